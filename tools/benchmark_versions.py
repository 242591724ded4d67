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
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from benchmark import arrays, cnn, compiled, mlp
from benchmark_callbacks import median_and_error
from benchmark_peers import binary_data, fitted, logistic_regression

import keras_sgmcmc as sg

N, D, S = 10_000, 50, 100
SGLD, PSGLD = (
    lambda: sg.SGLD(1e-4, train_size=N, prior=1.0, seed=1),
    lambda: sg.pSGLD(1e-4, train_size=N, prior=1.0, seed=1),
)


def images(build, sampler, steps, jit_compile="auto", callbacks=()):
    model = compiled(build, sampler(), jit_compile)
    return fitted(model, *arrays(steps * S), S, callbacks=callbacks, shuffle=False)


def binary(steps, callbacks=()):
    model = logistic_regression(N, D)
    return fitted(model, *binary_data(steps * S, D), S, callbacks=callbacks, shuffle=False)


def minibatches(steps):
    model = logistic_regression(N, D, steps_per_execution=20, jit_compile=True)
    data = sg.minibatches(*binary_data(N, D), S, seed=1, steps=steps)
    return fitted(model, data, shuffle=False)


# Each makes a turn: a function that trains some steps, and returns the seconds of one.
ROWS = {
    "MLP, SGLD": lambda: images(mlp, SGLD, 60),
    "MLP, pSGLD": lambda: images(mlp, PSGLD, 60),
    "MLP, SGLD, jit_compile": lambda: images(mlp, SGLD, 60, True),
    "MLP, pSGLD, jit_compile": lambda: images(mlp, PSGLD, 60, True),
    "CNN, SGLD": lambda: images(cnn, SGLD, 15),
    "CNN, pSGLD": lambda: images(cnn, PSGLD, 15),
    "MLP, pSGLD, noise": lambda: images(mlp, PSGLD, 30, callbacks=[sg.callbacks.GradientNoise()]),
    "logistic regression": lambda: binary(300),
    "logistic regression, draws": lambda: binary(
        300, [sg.callbacks.PosteriorSamples(0, 100, max_samples=20)]
    ),
    "logistic regression, minibatches": lambda: minibatches(1000),
}


def serve():
    """Answer each row that is asked for with the seconds of a step."""
    warnings.simplefilter("ignore")
    turns = {}
    for line in sys.stdin:
        row = line.strip()
        if row not in turns:
            turns[row] = ROWS[row]()
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
