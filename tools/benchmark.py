"""What a sampler's step costs beside the plain optimizer's, side by side through `fit`.

    python tools/benchmark.py

trains an MLP 784-400-400-10 (batch 100) and a small CNN with SGD, SGLD, RMSprop and pSGLD. The
optimizers take turns, so that a change of the machine's speed meets all of them; the table shows
the median time a step and the median of the ratios within a turn.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import keras_sgmcmc as sg

TRAIN_SIZE = 60_000
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(1e-3),
    "SGLD": lambda: sg.SGLD(1e-3, train_size=TRAIN_SIZE, prior=1.0),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-4),
    "pSGLD": lambda: sg.pSGLD(1e-4, train_size=TRAIN_SIZE, prior=1.0),
}
BASELINE = {"SGD": "SGD", "SGLD": "SGD", "RMSprop": "RMSprop", "pSGLD": "RMSprop"}


def mlp():
    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(400, "relu"),
            keras.layers.Dense(400, "relu"),
            keras.layers.Dense(10, "softmax"),
        ]
    )


def cnn():
    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(32, 5, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(32, 5, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(200, "relu"),
            keras.layers.Dense(10, "softmax"),
        ]
    )


def measure(build, jit_compile, steps, repeats, batch_size=100):
    """Milliseconds a step of every optimizer, one list entry a turn."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps * batch_size, 784)).astype("float32")
    y = rng.integers(0, 10, steps * batch_size)
    models = {}
    for name, make in OPTIMIZERS.items():
        keras.utils.set_random_seed(0)
        models[name] = build()
        models[name].compile(
            optimizer=make(), loss="sparse_categorical_crossentropy", jit_compile=jit_compile
        )
        # Tracing and compiling are over before the clock starts.
        models[name].fit(x[: 5 * batch_size], y[: 5 * batch_size], batch_size, verbose=0)
    times = {name: [] for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            start = time.perf_counter()
            model.fit(x, y, batch_size, verbose=0)
            times[name].append(1e3 * (time.perf_counter() - start) / steps)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=9, help="turns of each optimizer")
    parser.add_argument("--mlp-steps", type=int, default=200, help="steps a turn on the MLP")
    parser.add_argument("--cnn-steps", type=int, default=25, help="steps a turn on the CNN")
    parser.add_argument("--json", help="write the medians and ratios to this file as well")
    args = parser.parse_args()

    cases = [
        ("MLP 784-400-400-10", mlp, "auto", args.mlp_steps),
        ("MLP 784-400-400-10", mlp, True, args.mlp_steps),
        ("CNN", cnn, "auto", args.cnn_steps),
    ]
    rows = []
    print(f"{'model':20} {'jit_compile':12} {'optimizer':9} {'ms/step':>8}  ratio")
    for label, build, jit_compile, steps in cases:
        times = measure(build, jit_compile, steps, args.repeats)
        for name, values in times.items():
            base = BASELINE[name]
            ratio = statistics.median(a / b for a, b in zip(values, times[base], strict=True))
            rows.append(
                {
                    "model": label,
                    "jit_compile": jit_compile,
                    "optimizer": name,
                    "ms_per_step": statistics.median(values),
                    "baseline": base,
                    "ratio": ratio,
                }
            )
            print(
                f"{label:20} {jit_compile!s:12} {name:9} {rows[-1]['ms_per_step']:8.2f}"
                f"  {ratio:.2f} x {base}"
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
