"""Time of a step through `fit`, beside BlackJAX and plain Keras, in one process and in turns.

    python -m pip install ".[bench]"
    python tools/benchmark_peers.py [logistic] [chains] [mlp] [cnn] [--repeats 15] [--json FILE]

logistic: logistic regression, N = 10,000, D = 50, batches of 500 drawn with replacement: `fit` with
`steps_per_execution=100`, plain `fit` on arrays, and BlackJAX's SGLD in a scan of 100 steps, with
its batches drawn and gathered within the scan, or gathered before it.
chains: the same, 4 to 64 chains in one program (`sample_chains(vectorized=True)`); the least time
is that of one chain.
mlp: MLP 784-400-400-10, batch 100: SGLD, pSGLD and Keras' RMSprop through `fit`, with XLA around
the whole step and without; BlackJAX's SGLD step by step and in a scan.
cnn: a small CNN, batch 100, the same samplers without a peer, fused and unfused asked for alike.

Every variant runs once in each turn, so that a change of the machine's speed meets all. The table
has the median of the time a step, the median over turns of its ratio to the first row's with its
standard error, and the least time that the arithmetic could take: floating-point operations over
what a product of large matrices reaches here, or bytes over what a sum of large arrays does.
"""

import argparse
import itertools
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from benchmark_callbacks import compiled_mlp, median_and_error

import keras_sgmcmc as sg
from keras_sgmcmc.vectorized_chains import StackedChains


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
    print(f"{'':44} {'us a step':>10} {'x the first':>17}")
    rows = []
    for name, values in times.items():
        middle, error = median_and_error(values / times[first])
        print(f"{name:44} {1e6 * np.median(values):10.0f} {middle:8.3f} +- {error:.3f}", flush=True)
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


def logistic_regression(N, D, **arguments):
    model = keras.Sequential([keras.Input((D,)), keras.layers.Dense(1)])
    sampler = sg.SGLD(1e-2, train_size=N, prior=1.0, seed=1)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(sampler, loss, **arguments)
    return model


def logistic(args):
    N, D, S, steps = 10_000, 50, 500, args.steps or 5000
    x, y = binary_data(N, D)

    def model(**arguments):
        return logistic_regression(N, D, **arguments)

    data = sg.minibatches(x, y, S, seed=1, steps=steps)
    monitor = [sg.callbacks.ChainMonitor()]
    variants = {
        "SGLD, fit, steps_per_execution=100": fitted(
            model(steps_per_execution=100), data, callbacks=monitor, shuffle=False
        ),
        "SGLD, fit, steps_per_execution=1000": fitted(
            model(steps_per_execution=1000), data, callbacks=monitor, shuffle=False
        ),
        "SGLD, plain fit on arrays": fitted(model(), x, y, batch_size=S, epochs=1),
    }
    variants |= blackjax_sgld(
        {"w": np.zeros((D, 1), "float32"), "b": np.zeros(1, "float32")},
        lambda p, row, label: -_softplus(-(2 * label - 1) * (row @ p["w"] + p["b"])).sum(),
        (x, y),
        S,
        steps,
    )
    return table(
        "logistic regression", medians(variants, args.repeats), (6 * S * D, 4 * S * (2 * D + 4))
    )


def chains(args):
    N, D, S, steps = 10_000, 50, 500, args.steps or 1000
    x, y = binary_data(N, D)
    variants = {}
    for count in (1, 4, 16, 64):
        models = [logistic_regression(N, D, steps_per_execution=100) for _ in range(count)]
        model = models[0] if count == 1 else StackedChains(models, seed=1)
        data = sg.minibatches(x, y, count * S, seed=1, steps=steps)
        monitor = [sg.callbacks.ChainMonitor()]
        name = "1 chain" if count == 1 else f"{count} chains, vectorized"
        variants[name] = fitted(model, data, callbacks=monitor, shuffle=False)
    return table(
        "chains of the logistic regression",
        medians(variants, args.repeats),
        (6 * S * D, 4 * S * (2 * D + 4)),
    )


def mlp(args):
    N, S, steps = 10_000, 100, args.steps or 200
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 784)).astype("float32")
    y = rng.integers(0, 10, N)
    data = sg.minibatches(x, y, S, seed=1, steps=steps)
    sizes = (784, 400, 400, 10)

    variants = {}
    for way, jit_compile in (("", "auto"), (", jit_compile=True", True)):
        for name, optimizer in {
            "SGLD": sg.SGLD(1e-3, train_size=N, prior=1.0, seed=1),
            "pSGLD": sg.pSGLD(1e-4, train_size=N, prior=1.0, seed=1),
            "RMSprop": keras.optimizers.RMSprop(1e-4),
        }.items():
            variants[f"{name}, fit{way}"] = fitted(
                compiled_mlp(optimizer, jit_compile=jit_compile), data, shuffle=False
            )

    weights = {}
    for k, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        scale = np.sqrt(2 / rows)
        weights[f"w{k}"] = (scale * rng.standard_normal((rows, columns))).astype("float32")
        weights[f"b{k}"] = np.zeros(columns, "float32")

    def log_likelihood(p, row, label):
        import jax

        for k in range(2):
            row = jax.nn.relu(row @ p[f"w{k}"] + p[f"b{k}"])
        return jax.nn.log_softmax(row @ p["w2"] + p["b2"])[label]

    variants |= blackjax_sgld(weights, log_likelihood, (x, y.astype("int32")), S, steps)
    count = sum(w.size for w in weights.values())
    work = (6 * S * count, 4 * 5 * count)
    return table("MLP 784-400-400-10", medians(variants, args.repeats), work)


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


def _softplus(values):
    import jax

    return jax.nn.softplus(values)


def blackjax_sgld(position, log_likelihood, data, batch_size, steps):
    """Turns of BlackJAX's SGLD on batches of rows drawn with replacement."""
    import blackjax
    import jax
    import jax.numpy as jnp

    rows = len(data[0])
    data = tuple(map(jnp.asarray, data))
    gradient = blackjax.sgmcmc.gradients.grad_estimator(
        lambda p: -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)),
        lambda p, row: log_likelihood(p, *row),  # which it maps over the rows
        rows,
    )
    sgld = blackjax.sgld(gradient)
    epsilon = 2 * 1e-4 / rows

    def step(position, key, batch):
        return sgld.step(key, position, batch, epsilon)

    def draw(key):
        index = jax.random.randint(key, (batch_size,), 0, rows)
        return tuple(part[index] for part in data)

    def drawn(position, key):
        at, noise = jax.random.split(key)
        return step(position, noise, draw(at)), None

    block = max(1, min(100, steps // 2))  # the first is not timed

    @jax.jit
    def scan(position, key):
        return jax.lax.scan(drawn, position, jax.random.split(key, block))[0]

    @jax.jit
    def gather(key):
        index = jax.random.randint(key, (block, batch_size), 0, rows)
        return tuple(part[index] for part in data)

    @jax.jit
    def scan_stacked(position, key, batches):
        def one(position, given):
            return step(position, *given), None

        return jax.lax.scan(one, position, (jax.random.split(key, block), batches))[0]

    one = jax.jit(lambda position, key: drawn(position, key)[0])

    def turn(advance, count):
        def run():
            now = jax.tree.map(jnp.asarray, position)
            keys = jax.random.split(jax.random.key(1), steps // count)
            now = jax.block_until_ready(advance(now, keys[0]))
            begin = time.perf_counter()
            for key in keys[1:]:
                now = advance(now, key)
            jax.block_until_ready(now)
            return (time.perf_counter() - begin) / (count * (len(keys) - 1))

        return run

    return {
        "SGLD, BlackJAX, scan": turn(scan, block),
        "SGLD, BlackJAX, scan of gathered batches": turn(
            lambda now, key: scan_stacked(now, key, gather(key)), block
        ),
        "SGLD, BlackJAX, jitted step": turn(one, 1),
    }


MODELS = {"logistic": logistic, "chains": chains, "mlp": mlp, "cnn": cnn}


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
