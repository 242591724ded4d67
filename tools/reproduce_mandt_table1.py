"""Table 1 of Mandt, Hoffman & Blei (2017): KL divergence of what is sampled to the posterior.

    python tools/reproduce_mandt_table1.py --data DIR [--problems wine] [--steps 300000]

Linear regression on the white wines and on protein, logistic regression on skin, a Gaussian prior
of precision 1, no intercept, the paper's batch sizes. Chains start at the mode and run through
`fit`; what they visit after warm-up gives a mean and a covariance, whose KL divergence to the exact
posterior (on skin: its Laplace approximation) is printed beside what `theory` predicts for the
chain. A KL from n draws is too large by D (D + 1) / (4 n_cov) + D / (2 n_mean) on average: that
bias is printed beside it, with effective numbers of draws from batch means, and no KL is printed
below 100 of them.

The prediction takes into account that the noise of the batches grows off the mode (regression), and
is exact for the discrete chain. Features and targets are standardised; with the features scaled to
unit maximum (`--scaling maximum`) the noise grows so much that a constant step of any method stays
away from the posterior of the wines.
"""

import argparse
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import scipy.linalg
import tensorflow as tf

import keras_sgmcmc as sg
from keras_sgmcmc import theory

PRIOR = 1.0
PROBLEMS = ("wine", "protein", "skin")


class Moments(sg.callbacks.InGraphCallback):
    """Sums of u = W (theta - mode) and of u u' over every step after `begin`, a block an epoch."""

    def __init__(self, mode, whitening, begin):
        super().__init__()
        self.mode, self.whitening, self.begin = mode, whitening, begin
        self.blocks = []

    def create_state(self):
        size = len(self.mode)
        shapes = ((), (size,), (size, size))
        self.sums = [
            keras.Variable(np.zeros(shape), dtype="float64", trainable=False) for shape in shapes
        ]

    def wrap(self, step):
        def wrapped(data):
            logs = step(data)
            weights = [tf.reshape(v, [-1]) for v in self.model.trainable_variables]
            theta = tf.cast(tf.concat(weights, 0), "float64")
            u = tf.linalg.matvec(self.whitening, theta - self.mode)
            counts = tf.cast(tf.convert_to_tensor(self.optimizer.iterations) > self.begin, u.dtype)
            for total, value in zip(self.sums, (1.0, u, u[:, None] * u[None, :]), strict=True):
                total.assign_add(counts * value)
            return logs

        return wrapped

    def on_epoch_end(self, epoch, logs=None):
        count, first, second = (total.numpy() for total in self.sums)
        for total in self.sums:
            total.assign(tf.zeros_like(total))
        if count:
            self.blocks.append((count, first / count, second / count))

    def summary(self):
        """Mean and covariance in whitened coordinates, and effective numbers of draws of both."""
        counts, means, squares = map(np.array, zip(*self.blocks, strict=True))
        whole = counts == counts.max()
        means, squares = means[whole], squares[whole]
        mean = means.mean(0)
        covariance = squares.mean(0) - np.outer(mean, mean)
        variance = np.diag(covariance)
        n_mean = len(means) * variance / means.var(0, ddof=1)
        diagonals = np.stack([np.diag(square) for square in squares])
        n_cov = len(means) * 2 * variance**2 / diagonals.var(0, ddof=1)
        return mean, covariance, 1 / np.mean(1 / n_mean), 1 / np.mean(1 / n_cov)


def load(directory, name, scaling):
    """Features, targets, kind of model and batch size."""
    file = {"wine": "wine/wine_white", "protein": "protein/protein", "skin": "skin/skin"}[name]
    with np.load(pathlib.Path(directory) / f"{file}.npz") as archive:
        x, y = archive["x"].astype("float64"), archive["y"].astype("float64")
    x = (x - x.mean(0)) / x.std(0) if scaling == "standard" else x / np.abs(x).max(0)
    if name == "skin":
        return x, y, "logistic", 10_000
    return x, (y - y.mean()) / y.std(), "linear", 100


def methods(posterior, N, S):
    """label: (optimizer, H, Q of theory)."""
    A, C = posterior.A, posterior.C
    largest = np.linalg.eigvalsh(A)[-1]
    common = {"train_size": N, "prior": PRIOR, "seed": 1}
    batch = {**common, "batch_size": S, "warmup_steps": 1000}
    found = {}
    for form in ("scalar", "diagonal", "full"):
        H = theory.optimal_preconditioner(C, N=N, S=S, form=form, prior_precision=PRIOR)
        make = sg.ConstantSGD(1e-3 / largest, preconditioner=form, **batch)
        found[f"constant SGD {form}"] = make, H, None
    for fisher in ("diagonal", "full"):
        step = theory.sgfs_step(
            C, N=N, S=S, prior_precision=PRIOR, learning_rate=None, fisher=fisher
        )
        make = sg.SGFS(None, fisher=fisher, warmup_learning_rate=1e-5, **batch)
        found[f"SGFS {fisher}, a = 0"] = make, *step
    for share in (1.0, 0.1, 0.01, 0.001):
        rate = share / largest
        found[f"SGLD, step {share:g} / curvature"] = sg.SGLD(rate, **common), rate, 2 * rate / N
    return found


def predicted(x, y, kind, posterior, H, Q, N, S):
    """Covariance of the chain."""
    try:
        if kind == "linear":
            return theory.linear_regression_stationary_covariance(
                x, y, H, Q, S=S, prior_precision=PRIOR
            )
        return theory.stationary_covariance(posterior.A, posterior.C, H, Q, S=S)
    except ValueError:  # says that the step is unstable
        return None


def sample(x, y, kind, posterior, optimizer, S, steps, thin):
    """The `Moments` of a chain of `steps` steps, and its wall time."""
    loss = {
        "linear": sg.GaussianNegativeLogLikelihood(1.0),
        "logistic": keras.losses.BinaryCrossentropy(from_logits=True),
    }[kind]
    model = keras.Sequential([keras.Input((x.shape[1],)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer=optimizer, loss=loss, steps_per_execution=1000)
    model.set_weights([posterior.mean.reshape(-1, 1)])
    begin = 2000 if getattr(optimizer, "warmup_steps", 0) else 0
    begin += steps // 20
    whitening = scipy.linalg.solve_triangular(
        np.linalg.cholesky(posterior.covariance), np.eye(x.shape[1]), lower=True
    )
    moments = Moments(posterior.mean, whitening, begin)
    callbacks = [moments]
    if optimizer.uses_batch_noise:
        callbacks.insert(0, sg.callbacks.GradientNoise(every=thin))
    epoch = 1000 * max(1, steps // 200_000)
    data = sg.minibatches(x, y.reshape(-1, 1), S, seed=7, steps=epoch)
    start = time.perf_counter()
    epochs = -(-(begin + steps) // epoch)
    model.fit(data, epochs=epochs, callbacks=callbacks, verbose=0, shuffle=False)
    return moments, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=os.environ.get("KERAS_SGMCMC_DATA"))
    parser.add_argument("--problems", nargs="+", default=PROBLEMS, choices=PROBLEMS)
    parser.add_argument("--methods", nargs="+", help="only those whose label holds one of these")
    parser.add_argument("--steps", type=int, default=300_000, help="steps past warm-up")
    parser.add_argument("--scaling", choices=["standard", "maximum"], default="standard")
    args = parser.parse_args()
    if not args.data:
        parser.error("the data are not in the repository: pass --data, or set KERAS_SGMCMC_DATA")
    for name in args.problems:
        x, y, kind, S = load(args.data, name, args.scaling)
        N, D = x.shape
        posterior = theory.gaussian_posterior(x, y, model=kind, prior_precision=PRIOR)
        ratio = theory.sandwich_ratio(posterior.A, posterior.C)
        print(f"\n{name}: N = {N}, D = {D}, S = {S}, tr(A^-1 C) / D = {ratio:.3f}")
        print(
            f"{'method':28} {'KL':>8} {'bias':>7} {'theory':>8}"
            f" {'trace':>7} {'theory':>7} {'n_cov':>8} {'us/step':>8}"
        )
        for label, (optimizer, H, Q) in methods(posterior, N, S).items():
            if args.methods and not any(word in label for word in args.methods):
                continue
            covariance = predicted(x, y, kind, posterior, H, Q, N, S)
            if covariance is None:
                print(f"{label:28} unstable")
                continue
            theory_kl = theory.gaussian_kl(covariance, posterior.covariance)
            theory_trace = np.trace(N * posterior.A @ covariance) / D
            moments, seconds = sample(x, y, kind, posterior, optimizer, S, args.steps, 20)
            mean, white, n_mean, n_cov = moments.summary()
            kl = theory.gaussian_kl(white, np.eye(D), mean, np.zeros(D))
            bias = D * (D + 1) / (4 * n_cov) + D / (2 * n_mean)
            shown = f"{kl:8.4f} {bias:7.4f}" if min(n_mean, n_cov) >= 100 else f"{'-':>8} {'-':>7}"
            print(
                f"{label:28} {shown} {theory_kl:8.4f}"
                f" {np.trace(white) / D:7.3f} {theory_trace:7.3f} {n_cov:8.0f}"
                f" {1e6 * seconds / int(optimizer.iterations.numpy()):8.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
