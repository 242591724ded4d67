"""Figures 1 and 2 of Ahn, Korattikara & Welling (2012): how exact, and how fast, SGFS is.

    python tools/reproduce_ahn_logistic.py --data DIR [--steps 100000] [--figures DIR]

Bayesian logistic regression of MNIST's 7 against 9: 10,000 digits, pixels / 255 projected onto 50
random directions (entries N(0, 1/50)), an intercept, a Gaussian prior of precision 1, batches of
500. With the mean m and covariance V of the iterates after warm-up, and those of the posterior,

    E1 = sum_i |m_i - m*_i| / sum_i |m*_i|,      E2 = sum_ij |V_ij - V*_ij| / sum_ij |V*_ij|

(their eq. 14) are printed beside the mixing rate, the inverse of the autocorrelation time (batch
means of the whitened weights), for SGFS in its full and its diagonal form with a = 0, ..., 6
(a^2 = 4 / step) and for SGLD. "E2 theory" is that of the covariance that the chain has by
`keras_sgmcmc.theory` at the mode, without sampling error. Cells whose H A exceeds 2 are unstable.

The reference is self-normalised importance sampling from the Laplace approximation, in antithetic
pairs, with the moments of the approximation as control variates; the E2 between its two halves is
printed, and NUTS is compared with it. Then the wall time to E2 = 0.10 (compilation excluded,
warm-up included) of SGFS, of NUTS with a diagonal mass matrix, and of NUTS on weights whitened by
the Laplace approximation.

Without `--data` the problem is scikit-learn's digits, the same classes, in batches of a twentieth.
"""

import argparse
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from linear_chains import Moments, linear_model, sample

import keras_sgmcmc as sg
from keras_sgmcmc import theory

PRIOR = 1.0
ROWS = 10_000
DIRECTIONS = 50
TARGET = 0.10
# Ahn's step eps is 2 eta / N here; as shares of the largest stable eta.
SGLD_SHARES = (0.5, 0.2, 0.1, 0.05, 0.02)


def load(directory):
    """Features with an intercept, labels (1 is a 9), and the rows of a batch."""
    if directory:
        with np.load(pathlib.Path(directory) / "mnist" / "mnist.npz") as archive:
            images, labels = archive["x_train"], archive["y_train"]
        images = images.reshape(len(images), -1) / 255.0
    else:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = images / 16.0
    chosen = np.flatnonzero(np.isin(labels, (7, 9)))[:ROWS]
    images, labels = images[chosen], labels[chosen]
    rng = np.random.default_rng(0)
    projection = rng.normal(0, DIRECTIONS**-0.5, (images.shape[1], DIRECTIONS))
    x = np.concatenate([images @ projection, np.ones((len(images), 1))], 1)
    return x, (labels == 9).astype("float64"), len(x) // 20


def importance_sampling(x, y, laplace, pairs, seed=0):
    """Mean and covariance of the posterior, of each half of the draws, and Kish's number."""
    D, rng = len(laplace.mean), np.random.default_rng(seed)
    root = np.linalg.cholesky(laplace.covariance)
    parts = []
    chunk = 500
    for _ in range(pairs // chunk):
        z = rng.standard_normal((chunk, D))
        z = np.concatenate([z, -z])
        theta = laplace.mean + z @ root.T
        logits = theta @ x.T
        energy = np.logaddexp(0, logits).sum(1) - logits @ y + PRIOR * np.sum(theta**2, 1) / 2
        parts.append((z, np.sum(z**2, 1) / 2 - energy))
    z, log_weights = (np.concatenate(part) for part in zip(*parts, strict=True))

    def moments(z, log_weights):
        w = np.exp(log_weights - log_weights.max())
        w /= w.sum()
        # Of q the moments are known: only what the weights change is estimated.
        excess = w - 1 / len(w)
        mean = excess @ z
        second = np.eye(D) + (z * excess[:, None]).T @ z
        covariance = second - np.outer(mean, mean)
        kish = sg.diagnostics.kish_sample_size(w)
        return laplace.mean + root @ mean, root @ covariance @ root.T, kish

    half = len(z) // 2
    return (
        moments(z, log_weights),
        moments(z[:half], log_weights[:half]),
        moments(z[half:], log_weights[half:]),
    )


def relative_errors(mean, covariance, reference):
    """E1 and E2."""
    return (
        sg.diagnostics.relative_error_mean(mean, reference[0]),
        sg.diagnostics.relative_error_covariance(covariance, reference[1]),
    )


def optimizer_of(kind, a, N, S, seed):
    step = None if a == 0 else 4.0 / a**2
    return sg.SGFS(
        step, fisher=kind, train_size=N, batch_size=S, prior=PRIOR, seed=seed,
        warmup_steps=1000, warmup_learning_rate=3e-3,
    )  # fmt: skip


class Chain:
    """A chain from zero weights, and what came of it."""

    def __init__(self, x, y, S, laplace, optimizer, steps, seed=7, keep=False):
        model = linear_model("logistic", x.shape[1], optimizer, steps_per_execution=500)
        # After the warm-up C is gathered, then what the warm-up left of the way is gone.
        burn_in = 4000
        self.moments = Moments(laplace.mean, laplace.covariance, burn_in)
        draws = sg.callbacks.PosteriorSamples(burn_in, max(1, steps // 1000))
        sample(
            model, x, y, self.moments, batch_size=S, steps=steps, start=np.zeros(x.shape[1]),
            noise_every=10, block=500, seed=seed, extra=[draws] if keep else (),
        )  # fmt: skip
        self.burn_in = burn_in
        if keep:
            (values,) = draws.posterior.draws.values()
            self.draws = values.reshape(len(values), -1)

    def errors(self, reference, blocks=None):
        return relative_errors(*self.moments.moments(blocks), reference)

    @property
    def mixing_rate(self):
        return self.moments.effective()[0] / self.moments.count

    def time_to(self, target, reference):
        """(steps past burn-in, seconds in all) from which on E2 stays at most `target`."""
        first = next(i for i, block in enumerate(self.moments.blocks) if block[0])
        errors = np.array(
            [
                self.errors(reference, blocks)[1]
                for blocks in range(first + 1, len(self.moments.blocks) + 1)
            ]
        )
        return _first(errors, target, 500, self.burn_in, self.moments.seconds_per_step)


def _first(errors, target, block, before, pace):
    above = np.flatnonzero(errors > target)
    reached = 0 if len(above) == 0 else above[-1] + 1
    if reached == len(errors):
        return None
    steps = (reached + 1) * block
    return steps, (before + steps) * pace


class WhitenedPrior(keras.regularizers.Regularizer):
    """The Gaussian prior on L u, in mean-loss units."""

    def __init__(self, root, rows):
        self.root, self.rows = root.astype("float32"), rows

    def __call__(self, u):
        theta = keras.ops.matmul(self.root, u)
        return PRIOR * keras.ops.sum(keras.ops.square(theta)) / (2 * self.rows)


def no_u_turn(x, y, laplace, draws, whitened):
    """Draws of one chain from zero weights, seconds of the warm-up and of all draws."""
    root = np.linalg.cholesky(laplace.covariance)
    width = x.shape[1]
    prior = WhitenedPrior(root, len(x)) if whitened else None
    model = keras.Sequential(
        [
            keras.Input((width,)),
            keras.layers.Dense(
                1, use_bias=False, kernel_initializer="zeros", kernel_regularizer=prior
            ),
        ]
    )
    model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
    posterior = sg.reference.nuts(
        model, x @ root if whitened else x, y[:, None], prior=None if whitened else PRIOR,
        draws=draws, warmup=500, chains=1, seed=1, verbose=0,
    )  # fmt: skip
    (values,) = posterior.draws.values()
    values = values.reshape(draws, width).astype("float64")
    if whitened:
        values = values @ root.T
    return values, posterior


def draw_scatter(rows, path):
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6))
    for axis, column, name in zip(axes, (3, 4), ("E1 (mean)", "E2 (covariance)"), strict=True):
        for method, marker in (("SGFS full", "o-"), ("SGFS diagonal", "s-"), ("SGLD", "^-")):
            found = [row for row in rows if row[0] == method]
            if found:
                axis.loglog([r[2] for r in found], [r[column] for r in found], marker, label=method)
            for row in found:
                note = row[1].split(" ")[0]
                axis.annotate(
                    note,
                    (row[2], row[column]),
                    fontsize=7,
                    xytext=(3, 3),
                    textcoords="offset points",
                )
        axis.set(xlabel="mixing rate", ylabel=name)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3, which="both")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def draw_marginals(chains, reference, path):
    """The two pairs of weights whose 2 x 2 covariance is best and worst, at two deviations."""
    import matplotlib.pyplot as plt

    angles = np.linspace(0, 2 * np.pi, 200)
    circle = 2 * np.array([np.cos(angles), np.sin(angles)])
    figure, axes = plt.subplots(2, len(chains), figsize=(4 * len(chains), 7.4), squeeze=False)
    for (label, chain), column in zip(chains.items(), axes.T, strict=True):
        mean, covariance = chain.moments.moments()
        D = len(mean)
        pairs = [(i, j) for i in range(D) for j in range(i)]

        def difference(pair, covariance=covariance):
            block = np.ix_(pair, pair)
            return np.sum(np.abs(covariance[block] - reference[1][block])) / np.sum(
                np.abs(reference[1][block])
            )

        pairs.sort(key=difference)
        for axis, pair, word in zip(column, (pairs[0], pairs[-1]), ("best", "worst"), strict=True):
            pair, block = list(pair), np.ix_(pair, pair)
            axis.plot(*chain.draws[:, pair].T, ".", color="0.7", markersize=2)
            for m, V, style in (
                (reference[0], reference[1], "r-"),
                (mean, covariance, "b--"),
            ):
                axis.plot(*(m[pair][:, None] + np.linalg.cholesky(V[block]) @ circle), style)
            axis.set_title(f"{label}: {word} pair, weights {pair[0]} and {pair[1]}", fontsize=8)
    figure.suptitle("Two standard deviations: reference (red) and chain (blue, dashed)", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=os.environ.get("KERAS_SGMCMC_DATA"))
    parser.add_argument("--steps", type=int, default=100_000, help="steps past burn-in")
    parser.add_argument("--pairs", type=int, default=100_000, help="of importance sampling")
    parser.add_argument("--draws", type=int, default=16_000, help="of NUTS")
    parser.add_argument("--seeds", type=int, default=3, help="chains of SGFS full, a = 0")
    parser.add_argument("--only", nargs="+", default=("table", "times"), choices=("table", "times"))
    parser.add_argument("--figures", type=pathlib.Path, help="directory for the figures")
    args = parser.parse_args()
    x, y, S = load(args.data)
    N, D = x.shape
    start = time.perf_counter()
    laplace = theory.gaussian_posterior(x, y, model="logistic", prior_precision=PRIOR)
    laplace_seconds = time.perf_counter() - start
    print(
        f"N = {N}, D = {D}, S = {S}, "
        f"tr(A^-1 C) / D = {theory.sandwich_ratio(laplace.A, laplace.C):.3f}"
    )
    whole, first, second = importance_sampling(x, y, laplace, args.pairs)
    reference = whole[:2]
    halves = relative_errors(*first[:2], second[:2])
    print(
        f"reference: {2 * args.pairs} importance-weighted draws, Kish's number {whole[2]:.0f}; "
        f"between its halves E1 = {halves[0]:.1e}, E2 = {halves[1]:.4f}"
    )
    errors = relative_errors(laplace.mean, laplace.covariance, reference)
    print(f"Laplace: E1 = {errors[0]:.4f}, E2 = {errors[1]:.4f}, {laplace_seconds:.2f} s")
    full = [
        Chain(
            x, y, S, laplace, optimizer_of("full", 0, N, S, seed), args.steps, seed + 7, seed == 1
        )
        for seed in range(1, args.seeds + 1)
    ]
    for seed, chain in enumerate(full, 1):
        errors = chain.errors(reference)
        print(
            f"SGFS full, a = 0, seed {seed}: E1 = {errors[0]:.4f}, E2 = {errors[1]:.4f} after "
            f"{chain.moments.count} draws",
            flush=True,
        )
    if "table" in args.only:
        table(args, x, y, S, laplace, reference, full)
    if "times" in args.only:
        times(args, x, y, laplace, laplace_seconds, reference, full)


def table(args, x, y, S, laplace, reference, full):
    N, D = x.shape
    rows, kept = [], {"SGFS full, a = 0": full[0]}
    print(
        f"\n{'method':14} {'step':>14} {'H A':>6} {'mixing':>8} {'E1':>8} {'E2':>8} "
        f"{'E2 theory':>9} {'us/step':>8}"
    )
    cells = []
    for kind in ("full", "diagonal"):
        for a in range(7):
            step = theory.sgfs_step(
                laplace.C, N=N, S=S, prior_precision=PRIOR, fisher=kind,
                learning_rate=None if a == 0 else 4.0 / a**2,
            )  # fmt: skip
            optimizer = optimizer_of(kind, a, N, S, 1)
            cells.append((f"SGFS {kind}", f"a={a}", optimizer, *step))
    largest = np.linalg.eigvalsh(laplace.A)[-1]
    for share in SGLD_SHARES:
        rate = 2 * share / largest
        optimizer = sg.SGLD(rate, train_size=N, prior=PRIOR, seed=1)
        label = f"eps={2 * rate / N:.1e}"
        cells.append(("SGLD", label, optimizer, rate * np.ones(D), 2 * rate / N * np.ones(D)))
    for method, label, optimizer, H, Q in cells:
        matrix = H if H.ndim == 2 else np.diag(H)
        reach = np.abs(np.linalg.eigvals(matrix @ laplace.A)).max()
        line = f"{method:14} {label:>14} {reach:6.2f}"
        try:
            covariance = theory.stationary_covariance(laplace.A, laplace.C, H, Q, S=S)
        except ValueError:
            print(f"{line} unstable")
            continue
        predicted = relative_errors(laplace.mean, covariance, reference)[1]
        keep = (method, label) == ("SGFS diagonal", "a=2")
        if (method, label) == ("SGFS full", "a=0"):
            chain = full[0]
        else:
            chain = Chain(x, y, S, laplace, optimizer, args.steps, keep=keep)
        if keep:
            kept["SGFS diagonal, a = 2"] = chain
        rate, errors = chain.mixing_rate, chain.errors(reference)
        rows.append((method, label, rate, *errors))
        print(
            f"{line} {rate:8.5f} {errors[0]:8.4f} {errors[1]:8.4f} {predicted:9.4f} "
            f"{1e6 * chain.moments.seconds_per_step:8.0f}",
            flush=True,
        )
    if args.figures:
        args.figures.mkdir(parents=True, exist_ok=True)
        draw_scatter(rows, args.figures / "ahn_figure2.png")
        draw_marginals(kept, reference, args.figures / "ahn_figure1.png")


def times(args, x, y, laplace, laplace_seconds, reference, full):
    print(f"\nwall time to E2 <= {TARGET}")
    for seed, chain in enumerate(full, 1):
        report(f"SGFS full, a = 0, seed {seed}", chain.time_to(TARGET, reference), "steps")
    for whitened in (False, True):
        draws, posterior = no_u_turn(x, y, laplace, args.draws, whitened)
        every = 20
        counts = range(every, args.draws + 1, every)
        errors = np.array(
            [relative_errors(draws[:n].mean(0), np.cov(draws[:n].T), reference)[1] for n in counts]
        )
        pace = posterior.seconds / args.draws
        found = _first(errors, TARGET, every, posterior.warmup_seconds / pace, pace)
        label = "NUTS, whitened" if whitened else "NUTS, diagonal mass matrix"
        report(label, found, "draws")
        E1, E2 = relative_errors(draws.mean(0), np.cov(draws.T), reference)
        print(f"{'':32} E1 = {E1:.4f}, E2 = {E2:.4f} after {args.draws} draws", flush=True)
    print(f"{'Laplace':32} {laplace_seconds:8.2f} s")


def report(label, found, unit):
    if found is None:
        print(f"{label:32} not reached", flush=True)
    else:
        print(f"{label:32} {found[1]:8.2f} s, {found[0]} {unit} past warm-up", flush=True)


if __name__ == "__main__":
    main()
