"""Whether a change has made a step slower: this package beside that of another checkout.

    git worktree add --detach ../before COMMIT
    python tools/benchmark_versions.py ../before [--repeats 15] [--only CNN minibatches]

Each version has a process of its own, with every model compiled, and the two take turns, so that a
change of the machine's speed meets both. The table gives the median time of a step here and there,
the median of its ratio within a turn, with its standard error, and the ratio of the fastest turns.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from benchmark_callbacks import compiled_mlp, median_and_error

import keras_sgmcmc as sg

N, S = 10_000, 100


def cnn(optimizer):
    layers = [keras.layers.Reshape((28, 28, 1))]
    for _ in range(2):
        layers += [keras.layers.Conv2D(32, 5, activation="relu"), keras.layers.MaxPooling2D(2)]
    layers += [keras.layers.Flatten(), keras.layers.Dense(200, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((784,)), *layers])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def small(optimizer, **arguments):
    model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(1)])
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True), **arguments)
    return model


def sgld():
    return sg.SGLD(1e-4, train_size=N, prior=1.0, seed=1)


def psgld():
    return sg.pSGLD(1e-4, train_size=N, prior=1.0, seed=1)


# What a row trains, the width of its data, the steps of a turn, and its callbacks.
ROWS = {
    "MLP, SGLD": lambda: (compiled_mlp(sgld()), 784, 60, []),
    "MLP, pSGLD": lambda: (compiled_mlp(psgld()), 784, 60, []),
    "MLP, SGLD, jit_compile": lambda: (compiled_mlp(sgld(), jit_compile=True), 784, 60, []),
    "MLP, pSGLD, jit_compile": lambda: (compiled_mlp(psgld(), jit_compile=True), 784, 60, []),
    "CNN, SGLD": lambda: (cnn(sgld()), 784, 15, []),
    "CNN, pSGLD": lambda: (cnn(psgld()), 784, 15, []),
    "MLP, pSGLD, noise": lambda: (
        compiled_mlp(psgld()),
        784,
        30,
        [sg.callbacks.GradientNoise()],
    ),
    "logistic regression": lambda: (small(sgld()), 50, 300, []),
    "logistic regression, draws": lambda: (
        small(sgld()),
        50,
        300,
        [sg.callbacks.PosteriorSamples(0, 100, max_samples=20)],
    ),
    "logistic regression, minibatches": lambda: (
        small(sgld(), steps_per_execution=20, jit_compile=True),
        50,
        None,
        [],
    ),
}


def prepared(row):
    """A function that trains a turn's steps, and returns the seconds of one."""
    model, width, steps, callbacks = ROWS[row]()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, width)).astype("float32")
    y = rng.integers(0, 2, N).astype("float32")
    if steps is None:
        steps = 1000
        data = (sg.minibatches(x, y, S, seed=1, steps=steps),)
    else:
        data = np.resize(x, (steps * S, width)), np.resize(y, steps * S), S

    def turn():
        begin = time.perf_counter()
        model.fit(*data, callbacks=callbacks, verbose=0, shuffle=False)
        return (time.perf_counter() - begin) / steps

    turn()
    return turn


def serve():
    """Answer each row that is asked for with the seconds of a step."""
    warnings.simplefilter("ignore")
    turns = {}
    for line in sys.stdin:
        row = line.strip()
        if row not in turns:
            turns[row] = prepared(row)
        print(turns[row](), flush=True)


def start(checkout):
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def ask(process, row):
    print(row, file=process.stdin, flush=True)
    return float(process.stdout.readline())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", nargs="?", type=pathlib.Path, help="the other checkout")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of rows")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.before is None or not (arguments.before / "keras_sgmcmc").is_dir():
        parser.error(f"no checkout of the package: {arguments.before}")
    here = start(pathlib.Path(__file__).resolve().parents[1])
    there = start(arguments.before.resolve())
    rows = [row for row in ROWS if any(part in row for part in arguments.only)]
    print(f"{'':34} {'us a step':>9} {'before':>8} {'ratio':>18} {'fastest':>8}")
    for row in rows:
        ask(here, row), ask(there, row)
        times = np.array([[ask(here, row), ask(there, row)] for _ in range(arguments.repeats)])
        ratio, error = median_and_error(times[:, 0] / times[:, 1])
        ours, theirs = 1e6 * np.median(times, 0)
        fastest = np.divide(*times.min(0))
        print(
            f"{row:34} {ours:9.0f} {theirs:8.0f} {ratio:9.3f} +- {error:.3f} {fastest:8.3f}",
            flush=True,
        )
    for process in (here, there):
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
