"""What samplers and gradient noise cost beside plain steps, side by side through `fit`.

    python tools/benchmark.py
    python tools/benchmark.py noise
    python tools/benchmark.py factors

The first trains an MLP 784-400-400-10 and a small CNN (batch 100) with SGD, SGLD, RMSprop, pSGLD.
The second trains such models with pSGLD, without and with `GradientNoise`: every step, every tenth,
and with `tf.vectorized_map` in place of the closed forms; it ends with the peak memory of each, and
the cost of a full covariance. The third compares two ways to keep the inverse of a full
covariance up to date. What is compared takes turns, so that a change of the machine's speed
meets all of it; tables show medians of the time a step, and of the ratios within a turn, and the
ratio of the fastest turns, which is the better one on a machine that is not quiet.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

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


def cnn(filters=(32, 32)):
    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(filters[0], 5, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(filters[1], 5, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(200, "relu"),
            keras.layers.Dense(10, "softmax"),
        ]
    )


def compiled(build, optimizer, jit_compile):
    keras.utils.set_random_seed(0)
    model = build()
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer=optimizer, loss=loss, jit_compile=jit_compile)
    return model


def arrays(rows, width=784):
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, width)).astype("float32"), rng.integers(0, 10, rows)


def measure(variants, steps, repeats, batch_size=100, width=784):
    """Milliseconds a step of each variant, (model, callbacks), one list entry a turn."""
    x, y = arrays(steps * batch_size, width)
    for model, callbacks in variants.values():
        # Tracing and compiling are over before the clock starts.
        some = slice(5 * batch_size)
        model.fit(x[some], y[some], batch_size, verbose=0, callbacks=callbacks)
    times = {name: [] for name in variants}
    for _ in range(repeats):
        for name, (model, callbacks) in variants.items():
            # What costs many plain steps is timed over fewer.
            number = max(5, steps // 10) if "vectorized_map" in name else steps
            rows = slice(number * batch_size)
            start = time.perf_counter()
            model.fit(x[rows], y[rows], batch_size, verbose=0, callbacks=callbacks)
            times[name].append(1e3 * (time.perf_counter() - start) / number)
    return times


def table(label, times, baseline):
    """Print a line for each variant; the same as dicts."""
    rows = []
    for name, values in times.items():
        base = baseline[name]
        ratio = statistics.median(a / b for a, b in zip(values, times[base], strict=True))
        fastest = min(values) / min(times[base])
        row = {"model": label, "variant": name, "ms_per_step": statistics.median(values)}
        rows.append({**row, "baseline": base, "ratio": ratio, "ratio_of_fastest": fastest})
        print(
            f"{label:32} {name:30} {row['ms_per_step']:8.2f}  {ratio:.2f} x {base}"
            f" ({fastest:.2f} of the fastest turns)",
            flush=True,
        )
    return rows


def benchmark_optimizers(args):
    rows = []
    for label, build, jit_compile, steps in [
        ("MLP 784-400-400-10", mlp, "auto", args.mlp_steps),
        ("MLP 784-400-400-10", mlp, True, args.mlp_steps),
        ("CNN", cnn, "auto", args.cnn_steps),
    ]:
        variants = {
            name: (compiled(build, make(), jit_compile), []) for name, make in OPTIMIZERS.items()
        }
        times = measure(variants, steps, args.repeats)
        rows += table(f"{label}, jit_compile={jit_compile}", times, BASELINE)
    return rows


class GeneralWay(sg.callbacks.GradientNoise):
    """`GradientNoise` without closed forms."""

    def create_state(self):
        super().create_state()
        self._estimator.reject(dict.fromkeys(range(len(self._estimator.variables)), "benchmark"))


NOISE = {
    "plain step": lambda: [],
    "noise every step": lambda: [sg.callbacks.GradientNoise()],
    "noise every 10 steps": lambda: [sg.callbacks.GradientNoise(every=10)],
    "vectorized_map every step": lambda: [GeneralWay()],
    "vectorized_map, groups of 10": lambda: [GeneralWay(microbatch_size=10)],
}
NOISE_MODELS = {
    "MLP 784-400-400-10": mlp,
    "CNN 5x5, 32 and 64 filters": lambda: cnn((32, 64)),
}


def sampler():
    return sg.pSGLD(1e-4, train_size=TRAIN_SIZE, prior=1.0)


def benchmark_noise(args):
    warnings.simplefilter("ignore")
    rows = []
    for label, steps in (
        ("MLP 784-400-400-10", args.mlp_steps),
        ("CNN 5x5, 32 and 64 filters", args.cnn_steps),
    ):
        variants = {
            name: (compiled(NOISE_MODELS[label], sampler(), "auto"), callbacks())
            for name, callbacks in NOISE.items()
        }
        times = measure(variants, steps, args.repeats)
        rows += table(label, times, dict.fromkeys(times, "plain step"))
        base = None
        for name in list(NOISE)[:2]:
            command = [sys.executable, __file__, "memory", "--model", label, "--variant", name]
            peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            base = base or peak
            rows.append({"model": label, "variant": name, "peak_kb": peak, "ratio": peak / base})
            print(f"{label:32} {name:26} {peak / 1024:6.0f} MB  {peak / base:.2f} x plain step")

    def small():
        layers = [keras.layers.Dense(42, "tanh"), keras.layers.Dense(10, "softmax")]
        return keras.Sequential([keras.Input((11,)), *layers])

    parameters = small().count_params()
    variants = {
        "plain step": (compiled(small, sampler(), "auto"), []),
        "full covariance every step": (
            compiled(small, sampler(), "auto"),
            [sg.callbacks.GradientNoise(structure="full")],
        ),
    }
    times = measure(variants, 20, args.repeats, batch_size=2000, width=11)
    label = f"MLP of {parameters} weights, batch 2000"
    return rows + table(label, times, dict.fromkeys(times, "plain step"))


def benchmark_factors(args):
    """Milliseconds a step that the inverse of a full C costs, kept up to date in two ways.

    As `SGFS` and `ConstantSGD` do, by a Cholesky factor and its inverse every 100 steps; and by the
    Woodbury identity with the gradients of every batch's examples.
    """
    # Not above: earlier versions, which `benchmark_versions.py` measures by this file, lack it.
    from keras_sgmcmc.optimizers.factors import factorise

    def refresh(matrix, precision):
        return factorise(matrix, precision, largest_share=None, priors="all")

    def woodbury(inverse, gradients):
        rows = gradients.shape[0]
        projected = tf.matmul(gradients, inverse)
        small = rows * tf.eye(rows) + tf.matmul(projected, gradients, transpose_b=True)
        return inverse - tf.matmul(projected, tf.linalg.solve(small, projected), transpose_a=True)

    rows = []
    rng = np.random.default_rng(0)
    print(f"{'weights':>8} {'batch':>6} {'refresh / 100':>14} {'Woodbury':>9} {'ratio':>6}")
    for D in (200, 940, 2000):
        data = rng.standard_normal((3 * D, D)).astype("float32")
        matrix, precision = tf.constant(np.cov(data.T), "float32"), tf.ones(D)
        for S in (10, 100):
            gradients = tf.constant(data[:S])
            calls = {
                "refresh": (tf.function(refresh, autograph=False), (matrix, precision), 100),
                "woodbury": (tf.function(woodbury), (matrix, gradients), 1),
            }
            times = {name: [] for name in calls}
            for turn in range(args.repeats + 1):
                for name, (function, arguments, steps) in calls.items():
                    start = time.perf_counter()
                    result = function(*arguments)
                    (result[0] if name == "refresh" else result).numpy()
                    if turn:  # the first traces
                        times[name].append(1e3 * (time.perf_counter() - start) / steps)
            row = {name: statistics.median(values) for name, values in times.items()}
            ratio = row["woodbury"] / row["refresh"]
            rows.append({"weights": D, "batch": S, **row, "ratio": ratio})
            print(f"{D:8d} {S:6d} {row['refresh']:14.2f} {row['woodbury']:9.2f} {ratio:6.1f}")
    return rows


def report_memory(args):
    """Print the peak memory of a process that trains one variant, in kB."""
    warnings.simplefilter("ignore")
    model = compiled(NOISE_MODELS[args.model], sampler(), "auto")
    x, y = arrays(2000)
    model.fit(x, y, 100, epochs=2, verbose=0, callbacks=NOISE[args.variant]())
    # Not `getrusage`, which begins at the memory of the process that started this one.
    with open("/proc/self/status") as status:
        print(next(line.split()[1] for line in status if line.startswith("VmHWM")))


WHAT = {
    "optimizers": benchmark_optimizers,
    "noise": benchmark_noise,
    "factors": benchmark_factors,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="optimizers", choices=[*WHAT, "memory"])
    parser.add_argument("--repeats", type=int, default=7, help="turns of each variant")
    parser.add_argument("--mlp-steps", type=int, default=400, help="steps a turn on the MLP")
    parser.add_argument("--cnn-steps", type=int, default=100, help="steps a turn on the CNN")
    parser.add_argument("--json", help="write the medians and ratios to this file as well")
    parser.add_argument("--model", choices=NOISE_MODELS, help="for memory")
    parser.add_argument("--variant", choices=NOISE, help="for memory")
    args = parser.parse_args()
    if args.what == "memory":
        report_memory(args)
        return
    rows = WHAT[args.what](args)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
