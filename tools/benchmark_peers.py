"""Time of a step through `fit`, beside other libraries and plain Keras: one process, in turns.

    python -m pip install ".[bench]"
    python tools/benchmark_peers.py [logistic] [effective] [mlp] [cnn] [--repeats 15] [--json FILE]

logistic: logistic regression, N = 10,000, D = 50, batches of 500 drawn with replacement: `fit` with
`steps_per_execution=100`, plain `fit` on arrays, BlackJAX's SGLD in a scan of 100 steps, with its
batches drawn and gathered within the scan or gathered before it, and posteriors' SGLD.
effective: effective samples a second of SGLD, pSGLD, SGFS and constant SGD on it, and of BlackJAX's
NUTS on all rows; and how the variances compare. It needs the extra `diagnostics` too.
mlp: MLP 784-400-400-10, batch 100: SGLD, pSGLD and Keras' RMSprop through `fit`, with XLA around
the whole step and without; the SGLD of BlackJAX, step by step and in a scan, and of posteriors.
cnn: a small CNN, batch 100, the same samplers without a peer, fused and unfused asked for alike.

posteriors (PyTorch) is left out where it isn't installed: `python -m pip install posteriors`.

Every variant runs once in each turn, so that a change of the machine's speed meets all. The table
has the median of the time a step, the median over turns of its ratio to the first row's with its
standard error, and the least time that the arithmetic could take: floating-point operations over
what a product of large matrices reaches here, or bytes over what a sum of large arrays does.
"""

import argparse
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import peers
from benchmark_callbacks import compiled_mlp, median_and_error

import keras_sgmcmc as sg


def medians(variants, repeats):
    """Seconds a step of each variant: name to a function that gives them for one turn."""
    times = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name, run in variants.items():
            seconds = run()
            if turn:  # the first traces and compiles
                times[name].append(seconds)
    return {name: np.array(values) for name, values in times.items()}


def table(title, times, work):
    """Print the rows of one model; the same as dicts."""
    flops, size = work
    limit = max(flops / machine()[0], size / machine()[1])
    first = next(iter(times))
    print(f"\n{title}: at least {1e6 * limit:.0f} us a step ({flops:.3g} flops, {size:.3g} bytes)")
    print(f"{'':52} {'us a step':>10} {'x the first':>17}")
    rows = []
    for name, values in times.items():
        middle, error = median_and_error(values / times[first])
        print(f"{name:52} {1e6 * np.median(values):10.0f} {middle:8.3f} +- {error:.3f}", flush=True)
        row = {"model": title, "variant": name, "us": 1e6 * float(np.median(values))}
        rows.append({**row, "ratio": middle, "error": error, "limit_us": 1e6 * limit})
    return rows


_MACHINE = []


def machine():
    """Floating-point operations, and bytes, a second that NumPy reaches on this machine."""
    if not _MACHINE:
        a, x = np.ones((1500, 1500), "float32"), np.ones(20_000_000, "float32")
        found = []
        for function, work in (
            (lambda: a @ a, 2 * 1500**3),
            (lambda: np.add(x, 1, out=x), 8 * 2e7),
        ):
            seconds = []
            for _ in range(7):
                begin = time.perf_counter()
                function()
                seconds.append(time.perf_counter() - begin)
            found.append(work / min(seconds))
        _MACHINE.extend(found)
    return _MACHINE


class Clock(keras.callbacks.Callback):
    """Time of an epoch after its first call, and the updates in it."""

    def on_train_batch_end(self, batch, logs=None):
        if not self._begun:
            self._begun, self._first = True, int(self.model.optimizer.iterations)
            self._begin = time.perf_counter()

    def on_epoch_begin(self, epoch, logs=None):
        self._begun = False

    def on_epoch_end(self, epoch, logs=None):
        seconds = time.perf_counter() - self._begin
        self.seconds = seconds / (int(self.model.optimizer.iterations) - self._first)


def fitted(model, *data, callbacks=(), **arguments):
    """A turn of `fit` for one epoch."""

    def run():
        clock = Clock()
        arguments.setdefault("verbose", 0)
        model.fit(*data, callbacks=[*callbacks, clock], **arguments)
        return clock.seconds

    return run


def binary_data(N, D):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, D)).astype("float32")
    y = (x @ rng.standard_normal(D) + rng.logistic(size=N) > 0).astype("float32")[:, None]
    return x, y


def logistic_regression(N, D, sampler=None, **arguments):
    model = keras.Sequential([keras.Input((D,)), keras.layers.Dense(1)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    sampler = sampler or sg.SGLD(1e-2, train_size=N, prior=1.0, seed=1)
    model.compile(sampler, loss, **arguments)
    return model


def logistic(args):
    N, D, S, steps = 10_000, 50, 500, args.steps or 5000
    x, y = binary_data(N, D)
    data = sg.minibatches(x, y, S, seed=1, steps=steps)

    def fused(length, sampler=None, watch=None):
        model = logistic_regression(N, D, sampler, steps_per_execution=length)
        watch = watch or sg.callbacks.ChainMonitor()
        return fitted(model, data, callbacks=[watch], shuffle=False)

    variants = {
        "SGLD, fit, steps_per_execution=100": fused(100),
        "SGLD, fit, steps_per_execution=1000": fused(1000),
        "pSGLD, fit, steps_per_execution=100": fused(100, sg.pSGLD(1e-3, train_size=N, prior=1.0)),
        "SGLD, fit, steps_per_execution=100, every 10th drawn": fused(
            100, watch=sg.callbacks.PosteriorSamples(0, thinning=10, max_samples=2 * steps)
        ),
        "SGLD, plain fit on arrays": fitted(
            logistic_regression(N, D), x, y, batch_size=S, epochs=1
        ),
    }
    weights = peers.perceptron((D, 1), np.random.default_rng(0))
    variants |= peers.blackjax_sgld(weights, (x, y), S, steps)
    variants |= peers.posteriors_sgld(weights, (x, y), S, steps)
    work = 6 * S * D, 4 * S * (2 * D + 4)
    return table("logistic regression", medians(variants, args.repeats), work)


def effective(args):
    N, D, S, steps = 10_000, 50, 500, args.steps or 100_000
    x, y = binary_data(N, D)
    common = {"train_size": N, "prior": 1.0, "seed": 1}
    by_noise = {"batch_size": S, "warmup_steps": 1000, **common}
    ways = {
        "SGLD": (lambda: sg.SGLD(0.25, **common), 100),
        "pSGLD": (lambda: sg.pSGLD(0.002, **common), 100),
        'SGFS, fisher="full", learning_rate=None': (
            lambda: sg.SGFS(None, fisher="full", **by_noise),
            20,
        ),
        'ConstantSGD, preconditioner="full"': (
            lambda: sg.ConstantSGD(0.1, preconditioner="full", **by_noise),
            20,
        ),
    }
    weights = peers.perceptron((D, 1), np.random.default_rng(0))
    draws, warm, seconds = peers.blackjax_nuts(weights, (x, y), steps // 25)
    exact = np.concatenate([part.reshape(len(part), -1) for part in draws], axis=1)
    print(f"\nlogistic regression; NUTS took {warm:.0f} s to adapt, and that isn't counted")
    print(f"{'':44} {'us a draw':>10} {'effective/s':>12} {'mean':>7} {'variance':>9}")
    rows = []

    def report(name, draws, seconds):
        ess = sg.diagnostics.effective_sample_size(draws[None]).min()
        error = np.abs(draws.mean(0) - exact.mean(0)) / exact.std(0)
        row = {
            "us": 1e6 * seconds / len(draws),
            "effective_per_second": float(ess / seconds),
            "mean": float(np.sqrt(np.mean(error**2))),
            "variance": float(np.mean(draws.var(0) / exact.var(0))),
        }
        us, rate, mean, variance = row.values()
        print(f"{name:44} {us:10.0f} {rate:12.0f} {mean:7.3f} {variance:9.3f}", flush=True)
        rows.append({"model": "effective", "variant": name, **row})

    report("NUTS, BlackJAX, all rows", exact, seconds)
    for name, (sampler, thinning) in ways.items():
        model = logistic_regression(N, D, sampler(), steps_per_execution=1000)
        data = sg.minibatches(x, y, S, seed=1, steps=steps)
        noise = hasattr(model.optimizer, "noise_structure")
        warm_up = sg.minibatches(x, y, S, seed=2, steps=10_000)
        warming = sg.callbacks.GradientNoise(every=10) if noise else sg.callbacks.ChainMonitor()
        model.fit(warm_up, verbose=0, shuffle=False, callbacks=[warming])
        clock, samples = Clock(), sg.callbacks.PosteriorSamples(10_000, thinning)
        model.fit(data, verbose=0, shuffle=False, callbacks=[samples, clock])
        posterior = samples.posterior
        found = np.array([np.concatenate([a.ravel() for a in draw]) for draw in posterior])
        report(f"{name}, every {thinning}th", found, clock.seconds * steps)
    return rows


def mlp(args):
    N, S, steps = 10_000, 100, args.steps or 200
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 784)).astype("float32")
    y = rng.integers(0, 10, N).astype("int32")
    data = sg.minibatches(x, y, S, seed=1, steps=steps)

    variants = {}
    for length, jit_compile in ((1, "auto"), (1, True), (20, True)):
        way = ", jit_compile=True" if jit_compile is True else ""
        way += f", {length} steps a call" if length > 1 else ""
        for name, optimizer in {
            "SGLD": sg.SGLD(1e-3, train_size=N, prior=1.0, seed=1),
            "pSGLD": sg.pSGLD(1e-4, train_size=N, prior=1.0, seed=1),
            "RMSprop": keras.optimizers.RMSprop(1e-4),
        }.items():
            arguments = {"jit_compile": jit_compile, "steps_per_execution": length}
            model = compiled_mlp(optimizer, **arguments)
            variants[f"{name}, fit{way}"] = fitted(model, data, shuffle=False)
    weights = peers.perceptron((784, 400, 400, 10), rng)
    variants |= peers.blackjax_sgld(weights, (x, y), S, steps)
    variants |= peers.posteriors_sgld(weights, (x, y), S, steps)
    count = sum(w.size for w in weights.values())
    work = (6 * S * count, 4 * 5 * count)
    times = medians(variants, args.repeats)
    rows = table("MLP 784-400-400-10", times, work)
    for ours, theirs in (
        ("SGLD, fit", "SGLD, BlackJAX"),
        ("SGLD, fit", "SGLD, posteriors"),
        ("pSGLD, fit", "RMSprop, fit"),
    ):
        compare(times, ours, theirs)
    return rows


def compare(times, *names):
    """Print the ratio of two libraries' fastest variants."""
    best = []
    for name in names:
        of_name = [key for key in times if key.startswith(name)]
        if not of_name:
            return
        best.append(min(of_name, key=lambda key: np.median(times[key])))
    one, other = best
    middle, error = median_and_error(times[one] / times[other])
    print(f"{one} / {other}: {middle:.3f} +- {error:.3f}")


def cnn(args):
    N, S, steps = 2000, 100, args.steps or 20
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, N)
    data = sg.minibatches(x, y, S, seed=1, steps=steps)

    def model(optimizer, **arguments):
        convolution = [
            keras.layers.Conv2D(32, 5, activation="relu"),
            keras.layers.MaxPooling2D(2),
        ]
        dense = [keras.layers.Dense(200, "relu"), keras.layers.Dense(10)]
        layers = [*convolution, keras.layers.Flatten(), *dense]
        made = keras.Sequential([keras.Input((28, 28, 1)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(optimizer, loss, **arguments)
        return made

    def sampler():
        return sg.SGLD(1e-3, train_size=N, prior=1.0, seed=1)

    monitor = [sg.callbacks.ChainMonitor()]
    variants = {
        "SGLD, fit": fitted(model(sampler()), data, shuffle=False),
        # On a CPU the gate leaves these steps as they are; elsewhere it fuses them.
        "SGLD, fit, steps_per_execution=10": fitted(
            model(sampler(), steps_per_execution=10), data, callbacks=monitor, shuffle=False
        ),
        "RMSprop, fit": fitted(model(keras.optimizers.RMSprop(1e-4)), data, shuffle=False),
    }
    flops = 6 * S * (24 * 24 * 25 * 32 + 12 * 12 * 32 * 200 + 2000)
    count = 25 * 32 + 12 * 12 * 32 * 200 + 2000
    return table("CNN", medians(variants, args.repeats), (flops, 20 * count))


MODELS = {"logistic": logistic, "effective": effective, "mlp": mlp, "cnn": cnn}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="|".join(MODELS), help="defaults to all")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, help="steps of a turn")
    parser.add_argument("--json", help="where to write the rows too")
    args = parser.parse_args()
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"no such models: {unknown}")
    flops, size = machine()
    print(f"{os.cpu_count()} cores, {flops / 1e9:.0f} Gflop/s, {size / 1e9:.1f} GB/s by NumPy")
    rows = [row for name in args.models or MODELS for row in MODELS[name](args)]
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
