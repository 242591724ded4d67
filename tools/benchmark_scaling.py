"""How time grows with the work: with parameters, batch, draws, chains, and rows of a full matrix.

    python tools/benchmark_scaling.py [parameters] [batch] [epoch] [draws] [chains] [matrix]
                                      [--repeats 5]

parameters: SGLD and RMSprop on perceptrons 784-h-h-10 of 10^4 to 10^7 weights, batch 100.
batch: SGLD on the perceptron 784-400-400-10, batches of 10 to 10,000.
epoch: epochs of 20 to 2,000 fused steps of a logistic regression (50 weights, batches of 500).
draws: `Posterior.predict` of 100 rows by 10 to 10,000 draws of a perceptron 20-50-1.
chains: 1 to 64 chains of a logistic regression (50 weights, batches of 500), by
`sample_chains(vectorized=True)`.
matrix: SGFS with a full matrix of 100 to 2,000 rows, factored every 100 steps, and never again; the
factorisation itself; and SGLD.

All sizes of one kind take turns. A slope is d log(time) / d log(size) from the size before: 0 where
a call's own cost rules, 1 where time is proportional to the work. The least time is that of the
arithmetic, as in `benchmark_peers.py`.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from benchmark_callbacks import compiled_mlp
from benchmark_peers import binary_data, fitted, logistic_regression, machine, medians

import keras_sgmcmc as sg
from keras_sgmcmc import compilation
from keras_sgmcmc.optimizers.factors import factorise


def images(rows):
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 784)).astype("float32"), rng.integers(0, 10, rows)


def growth(title, unit, times, work=None):
    """Print time, slope and the least time by size: `times[name][size]` are seconds of turns."""
    print(f"\n{title}")
    print(f"{'':32} {'size':>9} {unit:>12} {'slope':>6} {'at least':>9}")
    for name, by_size in times.items():
        before = None
        for size, seconds in by_size.items():
            now = float(np.median(seconds))
            slope = ""
            if before is not None:
                slope = f"{np.log(now / before[1]) / np.log(size / before[0]):.2f}"
            least = ""
            if work is not None:
                flops, nbytes = work(size)
                least = f"{1e6 * max(flops / machine()[0], nbytes / machine()[1]):.0f}"
            print(f"{name:32} {size:9} {1e6 * now:12.0f} {slope:>6} {least:>9}", flush=True)
            before = size, now


def by_turns(variants, repeats):
    """`medians` of variants keyed by (name, size), as a dict of dicts."""
    times = {}
    for (name, size), seconds in medians(variants, repeats).items():
        times.setdefault(name, {})[size] = seconds
    return times


def parameters(repeats):
    N, S = 2000, 100
    x, y = images(N)
    variants = {}
    for width in (12, 106, 680, 2780):
        for name, optimizer in (
            ("SGLD", sg.SGLD(1e-4, train_size=N, prior=1.0, seed=1)),
            ("RMSprop", keras.optimizers.RMSprop(1e-5)),
        ):
            model = compiled_mlp(optimizer, width, jit_compile=True)
            steps = int(np.clip(2e8 / model.count_params(), 20, 400))
            data = sg.minibatches(x, y, S, seed=1, steps=steps)
            variants[name, model.count_params()] = fitted(model, data, shuffle=False)
    growth(
        "parameters, batch 100, jit_compile=True",
        "us a step",
        by_turns(variants, repeats),
        lambda size: (6 * S * size, 4 * 5 * size),
    )


def batch(repeats):
    N = 20_000
    x, y = images(N)
    variants = {}
    for size in (10, 100, 1000, 10_000):
        data = sg.minibatches(x, y, size, seed=1, steps=int(np.clip(2e4 / size, 10, 300)))
        sampler = sg.SGLD(1e-4, train_size=N, prior=1.0, seed=1)
        model = compiled_mlp(sampler, jit_compile=True)
        variants["SGLD", size] = fitted(model, data, shuffle=False)
    weights = 784 * 400 + 400 * 400 + 400 * 10
    growth(
        "batch, 478,410 weights, jit_compile=True",
        "us a step",
        by_turns(variants, repeats),
        lambda size: (6 * size * weights, 20 * weights + 12 * 784 * size),
    )


def epoch(repeats):
    N, D, S, steps = 10_000, 50, 500, 2000
    x, y = binary_data(N, D)
    variants = {}
    for length in (20, 200, steps):
        model = logistic_regression(N, D, steps_per_execution=100)
        data = sg.minibatches(x, y, S, seed=1, steps=length)

        def run(model=model, data=data, epochs=steps // length):
            begin = time.perf_counter()
            monitor = [sg.callbacks.ChainMonitor()]
            model.fit(data, epochs=epochs, callbacks=monitor, shuffle=False, verbose=0)
            return (time.perf_counter() - begin) / epochs

        variants["SGLD, fused steps", length] = run
    growth(
        "steps of an epoch of a logistic regression",
        "us an epoch",
        by_turns(variants, repeats),
    )


def draws(repeats):
    layers = [keras.Input((20,)), keras.layers.Dense(50, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(loss=sg.GaussianNegativeLogLikelihood(1.0))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 20)).astype("float32")
    variables = list(model.trainable_variables)
    variants = {}
    for count in (10, 100, 1000, 10_000):
        values = [[rng.standard_normal(v.shape) for v in variables] for _ in range(count)]
        posterior = sg.Posterior(model, variables, values, range(count))

        def run(posterior=posterior):
            begin = time.perf_counter()
            posterior.predict(x, batch_size=100, verbose=0)
            return time.perf_counter() - begin

        variants["Posterior.predict", count] = run
    growth(
        "draws, 100 rows",
        "us in all",
        by_turns(variants, repeats),
        lambda size: (2 * 100 * 1050 * size, 4 * 1101 * size),
    )


def chains(repeats):
    N, D, S, steps, epochs = 10_000, 50, 500, 2000, 6
    data = sg.minibatches(*binary_data(N, D), S, steps=steps)
    variants = {}
    for count in (1, 4, 16, 64):

        def run(count=count):
            posterior = sg.sample_chains(
                lambda: logistic_regression(N, D, steps_per_execution=100),
                data,
                chains=count,
                burn_in=steps,
                thinning=steps // 2,
                epochs=epochs,
                seed=1,
                vectorized=count > 1,
                verbose=0,
            )
            # The first epoch, which waits for the compiler, is not part of it.
            return posterior.seconds / (steps * (epochs - 1))

        variants["SGLD, fused steps", count] = run
    times = by_turns(variants, repeats)
    growth(
        "chains of a logistic regression",
        "us a step",
        times,
        lambda size: (6 * S * D * size, 4 * S * (2 * D + 4) * size),
    )
    (of,) = times.values()
    print("times one chain:", {c: round(float(np.median(t / of[1])), 2) for c, t in of.items()})


def matrix(repeats):
    N, S = 20_000, 100
    rng = np.random.default_rng(0)
    variants = {}
    for D in (100, 300, 1000, 2000):
        x = rng.standard_normal((N, D)).astype("float32")
        y = (x @ rng.standard_normal((D, 1)) / D**0.5 + rng.standard_normal((N, 1))).astype(
            "float32"
        )
        covariance = keras.ops.convert_to_tensor(x.T @ x / N)
        data = sg.minibatches(x, y, S, seed=1, steps=200)
        for name, every in (("SGFS, factored every 100", 100), ("SGFS", 10**6), ("SGLD", None)):
            if every is None:
                sampler = sg.SGLD(1e-3, train_size=N, prior=1.0, seed=1)
            else:
                sampler = sg.SGFS(
                    train_size=N,
                    batch_size=S,
                    prior=1.0,
                    fisher="full",
                    warmup_steps=0,
                    update_every=every,
                    seed=1,
                )
            layers = [keras.Input((D,)), keras.layers.Dense(1, use_bias=False)]
            model = keras.Sequential(layers)
            model.compile(sampler, sg.GaussianNegativeLogLikelihood(1.0))
            sampler.build(model.trainable_variables)
            if every is not None:
                sampler.update_noise_covariance([covariance], examples=N)
            monitor = [sg.callbacks.ChainMonitor()]
            variants[name, D] = fitted(model, data, callbacks=monitor, shuffle=False)
        variants["a factorisation", D] = _factorisation(covariance)
    growth("rows of a full matrix, batch 100", "us", by_turns(variants, repeats))


def _factorisation(matrix):
    precision = keras.ops.ones(matrix.shape[0])
    factor = compilation.traced(
        lambda: factorise(matrix, precision, largest_share=None, priors="all")[0]
    )

    def run():
        begin = time.perf_counter()
        factor().numpy()
        return time.perf_counter() - begin

    return run


KINDS = {f.__name__: f for f in (parameters, batch, epoch, draws, chains, matrix)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="|".join(KINDS), help="defaults to all")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"no such kinds: {unknown}")
    flops, size = machine()
    print(f"{os.cpu_count()} cores, {flops / 1e9:.0f} Gflop/s, {size / 1e9:.1f} GB/s by NumPy")
    for name in args.kinds or KINDS:
        KINDS[name](args.repeats)


if __name__ == "__main__":
    main()
