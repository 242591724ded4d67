"""Figure 6 of Mandt, Hoffman & Blei (2017): the prior's precision by EM, and the validation loss.

    python tools/reproduce_mandt_hyperparameters.py --data DIR [--figures DIR] [--steps 60000]

Softmax regression with a Gaussian prior of precision lambda on all weights, on MNIST (50,000 rows
to train on, 10,000 to validate) and on a CoverType subset (four fifths, one fifth); without
`--data` on scikit-learn's digits. For a grid of lambda the mode is fitted (L-BFGS, all rows), and
its mean log loss on the validation rows is what the precisions are judged by, for those that are
learned too:

- EM (`callbacks.PriorPrecisionEM`) with SGFS, diagonal, and with constant SGD, scalar;
- variational inference with a mean-field Gaussian q, whose bound is maximised over lambda too:
  lambda = D / E_q |theta|^2.
"""

import argparse
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import scipy.optimize
import tensorflow as tf
from keras import ops

import keras_sgmcmc as sg

GRID = np.logspace(-1, 3, 9)
S = 100


def mnist(directory):
    with np.load(pathlib.Path(directory) / "mnist" / "mnist.npz") as archive:
        x, y = archive["x_train"].reshape(60_000, -1) / 255.0, archive["y_train"]
    return x[:50_000], y[:50_000], x[50_000:], y[50_000:]


def covtype(directory):
    with np.load(pathlib.Path(directory) / "covtype_subset" / "covtype_subset.npz") as archive:
        x, y = archive["x"].astype("float64"), archive["y"] - 1
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    count = len(x) * 4 // 5
    # Ten measurements; the other features are indicators.
    mean, std = x[:count, :10].mean(0), x[:count, :10].std(0)
    x[:, :10] = (x[:, :10] - mean) / std
    return x[:count], y[:count], x[count:], y[count:]


def digits(_):
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order] / 16.0, y[order]
    return x[:1300], y[:1300], x[1300:], y[1300:]


class Problem:
    """One data set, with a constant feature, and the modes of its posteriors."""

    def __init__(self, name, load, directory):
        parts = load(directory)
        self.name = name
        self.x, self.x_val = (np.pad(x, ((0, 0), (0, 1)), constant_values=1) for x in parts[::2])
        self.x, self.x_val = self.x.astype("float32"), self.x_val.astype("float32")
        self.y, self.y_val = (y.astype("int32") for y in parts[1::2])
        self.N, self.features = self.x.shape
        self.classes = int(self.y.max()) + 1
        self.D = self.features * self.classes
        self.dead = int(np.sum(~np.any(self.x, axis=0))) * self.classes
        self._start = np.zeros(self.D)
        x, y = tf.constant(self.x), tf.constant(self.y)

        @tf.function
        def loss(theta, precision):
            with tf.GradientTape() as tape:
                tape.watch(theta)
                logits = x @ tf.reshape(theta, (self.features, self.classes))
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
                penalty = 0.5 * precision * tf.reduce_sum(theta**2) / self.N
                value = tf.reduce_mean(losses) + penalty
            return value, tape.gradient(value, theta)

        self._loss = loss

    def validation_loss(self, precision):
        """Of the mode under `precision`, in nats a row; starts from the mode found last."""

        def objective(theta):
            value, gradient = self._loss(
                tf.constant(theta, tf.float32), tf.constant(precision, tf.float32)
            )
            return float(value), gradient.numpy().astype("float64")

        found = scipy.optimize.minimize(
            objective, self._start, jac=True, method="L-BFGS-B",
            options={"maxiter": 300, "ftol": 1e-8, "gtol": 1e-5, "maxcor": 20},
        )  # fmt: skip
        self._start = found.x
        return self.log_loss(found.x.reshape(self.features, self.classes))

    def log_loss(self, kernel):
        logits = self.x_val @ kernel
        logits -= logits.max(1, keepdims=True)
        chosen = logits[np.arange(len(logits)), self.y_val]
        return float(np.mean(np.log(np.exp(logits).sum(1)) - chosen))

    def model(self):
        dense = keras.layers.Dense(self.classes, use_bias=False, kernel_initializer="zeros")
        return keras.Sequential([keras.Input((self.features,)), dense])

    def fit(self, model, steps, callbacks=()):
        # Steps are fused in pieces of an epoch.
        epoch = 1000
        data = sg.minibatches(self.x, self.y, S, seed=1, steps=epoch)
        model.fit(data, epochs=steps // epoch, callbacks=list(callbacks), verbose=0, shuffle=False)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def em(problem, optimizer, steps):
    """The mean of the precision over the last half of the updates, and all of them."""
    model = problem.model()
    model.compile(optimizer, LOSS, steps_per_execution=1000)
    callback = sg.callbacks.PriorPrecisionEM(start=optimizer.warmup_steps + 2000)
    problem.fit(model, steps, [sg.callbacks.GradientNoise(every=10), callback])
    values = callback.history["all"]
    return float(np.exp(np.log(values[len(values) // 2 :]).mean())), values


class MeanField(keras.layers.Layer):
    """Logits x theta with theta ~ N(m, s^2), and KL(q || p(theta | lambda)) / N at its best lambda.

    The KL divergence is D/2 log(E|theta|^2 / D) - sum log s + constants there.
    """

    def __init__(self, classes, rows):
        super().__init__()
        self.classes, self.rows = classes, rows

    def build(self, shape):
        shape = (shape[-1], self.classes)
        self.mean = self.add_weight(shape=shape, initializer="zeros")
        start = keras.initializers.Constant(-3.0)
        self.log_std = self.add_weight(shape=shape, initializer=start)
        self.seeds = keras.random.SeedGenerator(1)

    def precision(self):
        return 1.0 / ops.mean(ops.square(self.mean) + ops.exp(2.0 * self.log_std))

    def call(self, x):
        size = self.mean.shape[0] * self.classes
        divergence = -0.5 * size * ops.log(self.precision()) - ops.sum(self.log_std)
        self.add_loss(divergence / self.rows)
        # The logits' law rather than the weights': less noise in the gradient.
        mean = ops.matmul(x, self.mean)
        variance = ops.matmul(ops.square(x), ops.exp(2.0 * self.log_std))
        z = sg_normal(ops.shape(mean), self.seeds)
        return mean + ops.sqrt(variance) * z


def sg_normal(shape, seeds):
    # The default generator is slow under XLA on a CPU.
    return tf.random.stateless_normal(shape, tf.cast(seeds.next(), tf.int32), alg="philox")


def variational(problem, steps):
    layer = MeanField(problem.classes, problem.N)
    model = keras.Sequential([keras.Input((problem.features,)), layer])
    schedule = keras.optimizers.schedules.CosineDecay(3e-3, steps)
    model.compile(keras.optimizers.Adam(schedule), LOSS, steps_per_execution=1000)
    problem.fit(model, steps)
    return float(layer.precision())


def reproduce(problem, steps):
    """Rows of (label, precision, validation loss), the grid and EM's traces."""
    dead = f", {problem.dead} of them of dead inputs" if problem.dead else ""
    print(f"\n{problem.name}: N = {problem.N}, {problem.D} weights{dead}, batches of {S}")
    grid = np.array([problem.validation_loss(precision) for precision in GRID[::-1]])[::-1]
    best = grid.argmin()
    print("  lambda   " + " ".join(f"{value:8.3g}" for value in GRID))
    print("  loss     " + " ".join(f"{value:8.4f}" for value in grid))
    common = {"train_size": problem.N, "batch_size": S, "prior": 1.0, "seed": 1}
    traces, rows = {}, []
    samplers = {
        "EM, SGFS diagonal": lambda: sg.SGFS(warmup_learning_rate=1e-3, **common),
        "EM, constant SGD scalar": lambda: sg.ConstantSGD(0.1, **common),
    }
    print(f"  {'':28} {'lambda':>8} {'loss':>8} {'above best':>11} {'seconds':>8}")
    for label, make in samplers.items():
        begin, optimizer = time.perf_counter(), make()
        precision, traces[label] = em(problem, optimizer, steps)
        seconds = time.perf_counter() - begin
        rows.append((label, precision, problem.validation_loss(precision)))
        report(rows[-1], grid[best], seconds)
        if isinstance(optimizer, sg.ConstantSGD):
            variances = optimizer._covariance[0].numpy()
            dead, faint = np.sum(variances == 0), np.mean(variances < 0.01 * variances.mean())
            print(
                f"    {dead} weights carry no gradient noise (dead inputs) and do not count; "
                f"{faint:.0%} carry less than a hundredth\n    of the mean: under one step for all "
                "they vary less than under the posterior, which makes |theta|^2 small and\n"
                "    lambda large"
            )
    begin = time.perf_counter()
    precision = variational(problem, steps)
    rows.append(("mean-field variational", precision, problem.validation_loss(precision)))
    report(rows[-1], grid[best], time.perf_counter() - begin)
    return grid, rows, traces


def report(row, best, seconds):
    label, precision, loss = row
    print(
        f"  {label:28} {precision:8.3f} {loss:8.4f} {loss / best - 1:10.2%} {seconds:8.0f}",
        flush=True,
    )


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(results), figsize=(5.5 * len(results), 4.2), squeeze=False, layout="constrained"
    )
    colours = ("#08519c", "#e6550d", "#31a354")
    for axis, (name, (grid, rows, _)) in zip(axes[0], results.items(), strict=True):
        axis.plot(GRID, grid, "o-", color="0.4", label="mode, on a grid")
        for (label, precision, loss), colour in zip(rows, colours, strict=True):
            axis.axvline(precision, color=colour, lw=1, ls="--")
            axis.plot(precision, loss, "D", color=colour, label=f"{label}: {precision:.3g}")
        axis.set(
            xscale="log",
            title=name,
            xlabel="prior precision $\\lambda$ (1 / squared weight)",
            ylabel="validation loss of the mode (nats a row)",
        )
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    print(f"figure: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=os.environ.get("KERAS_SGMCMC_DATA"))
    parser.add_argument("--figures", help="folder for the figure")
    parser.add_argument("--steps", type=int, default=60_000)
    args = parser.parse_args()
    sets = {"MNIST": mnist, "CoverType subset": covtype} if args.data else {"digits": digits}
    results = {}
    for name, load in sets.items():
        results[name] = reproduce(Problem(name, load, args.data), args.steps)
    if args.figures:
        plot(results, pathlib.Path(args.figures) / "mandt_figure6.png")


if __name__ == "__main__":
    main()
