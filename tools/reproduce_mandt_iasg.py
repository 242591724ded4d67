"""Figures 3 to 5 of Mandt, Hoffman & Blei (2017): iterate averages as a sampler.

    python tools/reproduce_mandt_iasg.py [--draws 2000] [--chains 8] [--passes 1000]
        [--only 3 4 5] [--figures DIR]

Linear regression with D = 10 standard normal features and N = 10,000 rows of a model that is right
(noise of variance 1), a flat prior.

Figure 3 is the covariance of the averages: batches of 10, windows of N / S = 1,000 steps, at a
short step (0.003) and at one that fits the window (0.05). Printed are the variances of the ten
marginals of the averages, on average in units of what `theory` predicts for the chain, and of the
posterior's.

Figures 4 and 5 are convergence, from the mode and from weights drawn from N(0, 1), against passes
over the data: a pass is N gradients of one example, whatever they are for. From the draws past the
burn-in that a chain has made by then, with covariance V and mean m, against those of the exact
posterior, P and m*,

    KL = KL(N(0, V) || N(0, P)),    dm^2 = (m - m*)' P^-1 (m - m*) / D

dm is in posterior standard deviations. From n independent draws of the posterior, for large n,
KL = D (D + 1) / (4 n) and dm = n^-1/2 on average. "passes to" is where a chain comes below a level
for good: the mean over the chains and the range from the first to the last, or how many come there
within their length if not all do. "floor" is the KL that no number of draws removes, by `theory`.
Burn-in is in passes and counts as work:

    IASG, SGLD   until 3 relaxation times after the farthest start would be 1 posterior standard
                 deviation away; whole passes
    NUTS         100 transitions of warm-up, a fifth of the library's default, and the search for
                 step sizes

Batches are of 100 here, and steps ten times as long as for batches of 10: with the same step / S a
pass brings as much, in a tenth of the steps. The relative excess of the variance of SGLD is about
r / 2 for r = step x N / S, and it forgets in 1 / r passes (curvatures are near 1): no step and no
batch size buys one without the other. NUTS takes at most 4 chains, for each is compiled afresh;
they adapt on their own, and run for four times as many passes, which take it little time.
"""

import argparse
import functools
import os
import pathlib
import time
import warnings
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import scipy.linalg
from linear_chains import linear_model

import keras_sgmcmc as sg
from keras_sgmcmc import theory

N, D, S = 10_000, 10, 10
WINDOW = N // S
STEPS = (0.003, 0.05)

BATCH = 100
PASS = N // BATCH
IASG_STEP = 0.5
SGLD_STEPS = (0.01, 0.003, 0.001)
NUTS_CHAINS, NUTS_WARMUP, NUTS_SHARE = 4, 100, 4
LEVELS = (1.0, 0.3, 0.1)
MEAN_LEVEL = 0.1
STARTS = {4: "the mode", 5: "random weights"}


def problem(seed=0):
    """Features, targets, and the posterior."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((N, D))
    y = x @ rng.standard_normal(D) + rng.standard_normal(N)
    return x, y, theory.gaussian_posterior(x, y, prior_precision=0.0)


class Iterates(keras.callbacks.Callback):
    """The weights at the end of every block of fused steps."""

    def __init__(self):
        super().__init__()
        self.draws = []

    def on_train_batch_end(self, batch, logs=None):
        self.draws.append(self.model.get_weights()[0].ravel())


def averages(x, y, start, rate, draws, seed, burn_in):
    """Window means of a chain, and its iterates at the windows' ends, both [draws, D]."""
    model = linear_model("linear", D, keras.optimizers.SGD(rate), steps_per_execution=WINDOW)
    model.set_weights([np.reshape(start, (D, 1))])
    callback, iterates = sg.callbacks.IterateAverages(burn_in), Iterates()
    data = sg.minibatches(x, y[:, None], S, seed=seed, steps=draws * WINDOW + burn_in)
    model.fit(data, callbacks=[callback, iterates], verbose=0, shuffle=False)
    means = weights_of(callback.posterior)
    return means, np.array(iterates.draws[-draws:], "float64")


def weights_of(posterior):
    (values,) = posterior.draws.values()
    return values.reshape(len(values), D).astype("float64")


def variances_of_averages(x, y, posterior, draws):
    """Print the table of figure 3; rate: (means, iterates)."""
    variances = np.diag(posterior.covariance)
    ratio = theory.sandwich_ratio(posterior.A, posterior.C)
    curvatures = np.linalg.eigvalsh(posterior.A)[[0, -1]]
    print(f"tr(A^-1 C) / D = {ratio:.3f}, curvatures {curvatures[0]:.3f} to {curvatures[1]:.3f}")
    print(f"{'step':>6} {'of theory':>10} {'of posterior':>13} {'theory of posterior':>20}")
    results = {}
    for rate in STEPS:
        expected = theory.iterate_average_covariance(
            posterior.A, posterior.C, rate, window=WINDOW, S=S
        )
        burn_in = int(20 / (rate * curvatures[0]) / WINDOW + 1) * WINDOW
        results[rate] = averages(x, y, posterior.mean, rate, draws, 1, burn_in)
        found = results[rate][0].var(0)
        theirs = np.diag(expected)
        print(
            f"{rate:6g} {np.mean(found / theirs):10.3f} {np.mean(found / variances):13.3f}"
            f" {np.mean(theirs / variances):20.3f}",
            flush=True,
        )
    return results


def whitener(posterior):
    """W such that W (theta - mode) has covariance 1 under the posterior."""
    root = np.linalg.cholesky(posterior.covariance)
    return scipy.linalg.solve_triangular(root, np.eye(D), lower=True)


class Run(NamedTuple):
    """A chain: work done by the end of each draw and of the burn-in, in passes, and draws."""

    passes: np.ndarray
    draws: np.ndarray
    burn_in: float


class Method:
    """IASG or SGLD: one model, whose chains follow each other on one stream of batches.

    The steps are counted on from chain to chain, and batches and noise are functions of the step,
    so that no two chains share any.
    """

    def __init__(self, x, y, seed, optimizer, make_callback, relaxation):
        self.model = linear_model("linear", D, optimizer)
        self.arrays, self.seed = (x, y[:, None], BATCH), seed
        self.make_callback, self.relaxation = make_callback, relaxation

    def run(self, start, passes, distance):
        begin = int(self.model.optimizer.iterations)
        self.model.set_weights([np.reshape(start, (D, 1))])
        callback = self.make_callback(begin)
        data = sg.minibatches(*self.arrays, seed=self.seed, steps=passes * PASS, start_step=begin)
        self.model.fit(data, callbacks=[callback], verbose=0, shuffle=False)
        posterior = callback.posterior
        times = np.log(max(1.0, distance)) + 3
        burn_in = int(np.ceil(times * self.relaxation))
        return Run((posterior.steps - begin) / PASS, weights_of(posterior), burn_in)


class NoUTurn:
    """NUTS on all rows."""

    def __init__(self, x, y, seed):
        self.model = linear_model("linear", D, "sgd")
        self.arrays, self.seed = (x, y[:, None]), 100 * seed

    def run(self, start, passes, distance):
        self.seed += 1
        passes *= NUTS_SHARE
        found = sg.reference.nuts(
            self.model, *self.arrays, prior=None, start=[[np.reshape(start, (D, 1))]],
            # At the steps that the warm-up finds no chain takes fewer gradients for a transition.
            draws=passes // 6, warmup=NUTS_WARMUP, chains=1, seed=self.seed, verbose=0,
        )  # fmt: skip
        burn_in = int(found.warmup_gradients[0])
        each = found.gradients[0] / len(found)
        ends = burn_in + each * np.arange(1, len(found) + 1)
        kept = ends <= passes
        return Run(ends[kept], weights_of(found)[kept], burn_in)


def methods(x, y, posterior, seed):
    """label: (method, KL that its covariance has by theory)."""
    A, C = posterior.A, posterior.C

    def floor(covariance):
        return theory.gaussian_kl(covariance, posterior.covariance)

    found = {
        f"IASG, step {IASG_STEP:g}": (
            Method(
                x, y, seed, keras.optimizers.SGD(IASG_STEP), sg.callbacks.IterateAverages,
                theory.relaxation_time(A, IASG_STEP) / PASS,
            ),
            floor(theory.iterate_average_covariance(A, C, IASG_STEP, window=PASS, S=BATCH)),
        )
    }  # fmt: skip
    for rate in SGLD_STEPS:
        relaxation = theory.relaxation_time(A, rate) / PASS
        # Draws that are closer than this say little more.
        thinning = max(1, round(relaxation / 2)) * PASS
        found[f"SGLD, step {rate:g}"] = (
            Method(
                x, y, seed, sg.SGLD(rate, train_size=N, seed=seed),
                functools.partial(sg.callbacks.PosteriorSamples, thinning=thinning), relaxation,
            ),
            floor(theory.sgld_stationary_covariance(A, C, rate, N=N, S=BATCH)),
        )  # fmt: skip
    found["NUTS"] = NoUTurn(x, y, seed), 0.0
    return found


class Errors(NamedTuple):
    """Of the chains of a method, [chains, times]; NaN where there is too little to tell."""

    kl: np.ndarray
    mean: np.ndarray
    distance: np.ndarray
    burn_in: np.ndarray


def errors_of(runs, times, posterior):
    found = np.full((3, len(runs), len(times)), np.nan)
    whitening = whitener(posterior)
    for i, run in enumerate(runs):
        u = (run.draws - posterior.mean) @ whitening.T
        distance = np.sqrt(np.mean(u**2, 1))
        first = np.searchsorted(run.passes, run.burn_in, side="right")
        within = times <= run.passes[-1] + 1
        for j, end in enumerate(np.searchsorted(run.passes, times[within], side="right")):
            if end:
                found[2, i, j] = distance[end - 1]
            # With fewer a covariance is nearly singular, and its KL says no more than that.
            if end - first >= 2 * D:
                past = u[first:end]
                found[0, i, j] = theory.gaussian_kl(np.cov(past.T), np.eye(D))
                found[1, i, j] = np.sqrt(np.mean(past.mean(0) ** 2))
    return Errors(*found, np.array([run.burn_in for run in runs]))


def passes_to(errors, level, times):
    """For each chain the time from which on its error is at most `level`, infinite if never."""
    found = []
    for line in errors:
        # What is NaN before the first value is above every level, after the last it is nothing.
        length = np.flatnonzero(np.isfinite(line)).max(initial=-1) + 1
        first = np.flatnonzero(~(line[:length] <= level)).max(initial=-1) + 1
        found.append(times[first] if first < length else np.inf)
    return np.array(found)


def summary(values, form="{:.0f}"):
    """Mean and range over the chains."""
    if np.isnan(values).all():
        return "-"
    reached = np.isfinite(values)
    if not reached.all():
        return f"{reached.sum()} of {len(values)}"
    low, mean, high = (form.format(v) for v in (values.min(), values.mean(), values.max()))
    return f"{mean} ({low}-{high})"


def convergence(x, y, posterior, number, chains, passes):
    """Print the table of figure 4 or 5; times, and label: (`Errors`, floor)."""
    times = np.geomspace(1, NUTS_SHARE * passes, 400)
    last = np.searchsorted(times, passes) - 1
    starts = np.tile(posterior.mean, (chains, 1))
    if number == 5:
        starts = np.random.default_rng(number).standard_normal((chains, D))
    away = (starts - posterior.mean) @ whitener(posterior).T
    distances = np.sqrt(np.mean(away**2, 1))
    print(
        f"\nFigure {number}: from {STARTS[number]}, {distances.min():.0f} to {distances.max():.0f} "
        f"posterior standard deviations away; {chains} chains of {passes} passes (NUTS: "
        f"{min(chains, NUTS_CHAINS)} of {NUTS_SHARE * passes}); seed {number}"
    )
    heads = [f"passes to KL {level:g}" for level in LEVELS] + [f"to dm {MEAN_LEVEL:g}"]
    print(
        f"{'method':16} {'burn-in':>16}"
        + "".join(f" {head:>17}" for head in heads)
        + f" {f'KL at {passes}':>20} {f'dm at {passes}':>20} {'floor':>7} {'s/chain':>8}"
    )
    results = {}
    for label, (method, floor) in methods(x, y, posterior, number).items():
        count = min(chains, NUTS_CHAINS) if isinstance(method, NoUTurn) else chains
        begin = time.perf_counter()
        # The farthest start decides for all, so that a method has one burn-in.
        runs = [method.run(start, passes, distances.max()) for start in starts[:count]]
        seconds = (time.perf_counter() - begin) / count
        errors = errors_of(runs, times, posterior)
        results[label] = errors, floor
        cells = [passes_to(errors.kl, level, times) for level in LEVELS]
        cells.append(passes_to(errors.mean, MEAN_LEVEL, times))
        at = np.flatnonzero(np.isfinite(errors.kl).all(0)).max(initial=last)
        ends, finals = (
            [summary(e[:, i], "{:.3f}") for e in (errors.kl, errors.mean)] for i in (last, at)
        )
        print(
            f"{label:16} {summary(errors.burn_in):>16}"
            + "".join(f" {summary(cell):>17}" for cell in cells)
            + f" {ends[0]:>20} {ends[1]:>20} {floor:7.4f} {seconds:8.2f}",
            flush=True,
        )
        if at > last:
            print(f"{'':16} at {times[at]:.0f} passes KL {finals[0]}, dm {finals[1]}", flush=True)
    return times, results


def ellipse(covariance, radius=2.0):
    angles = np.linspace(0, 2 * np.pi, 200)
    return radius * np.linalg.cholesky(covariance) @ [np.cos(angles), np.sin(angles)]


def draw_covariances(found, posterior, path):
    import matplotlib.pyplot as plt

    curvatures, vectors = np.linalg.eigh(posterior.A)
    plane = vectors[:, [0, -1]] * np.sqrt(N * curvatures[[0, -1]])
    figure, axes = plt.subplots(1, len(found), figsize=(5.2 * len(found), 6.2))
    for axis, (rate, (means, iterates)) in zip(axes, found.items(), strict=True):
        for draws, color, label in (
            (iterates, "tab:cyan", "iterates"),
            (means, "black", "iterate averages"),
        ):
            z = (draws - posterior.mean) @ plane
            size = 4 if label == "iterates" else 3
            axis.plot(*z[:1000].T, ".", color=color, alpha=0.35, markersize=size, mew=0)
            line = "-" if label == "iterates" else "--"
            outline = z.mean(0)[:, None] + ellipse(np.cov(z.T))
            axis.plot(*outline, line, color=color, label=label, zorder=4)
        axis.plot(*ellipse(np.eye(2)), color="tab:blue", lw=2.5, label="posterior")
        reach = 1.4 * max(np.abs(ellipse(np.cov(((iterates - posterior.mean) @ plane).T))).max(), 2)
        axis.set(
            title=f"step {rate:g}: step x curvature x window = {rate * WINDOW:g}",
            xlabel=f"direction of the smallest curvature ({curvatures[0]:.3f})",
            ylabel=f"direction of the largest curvature ({curvatures[-1]:.3f})",
            xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal",
        )  # fmt: skip
        axis.legend(fontsize=8, loc="upper right")
    figure.suptitle(
        "Constant SGD and its averages over windows of N / S steps, in posterior standard "
        "deviations.\nEllipses at two; 1,000 of the draws",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def draw_convergence(number, times, results, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.9))
    colors = ("tab:green", "tab:red", "tab:orange", "tab:purple", "tab:blue")
    for color, (label, (errors, floor)) in zip(colors, results.items(), strict=True):
        for axis, values in zip(axes, (errors.kl, errors.mean, errors.distance), strict=True):
            axis.plot(times, values.mean(0), color=color, label=label)
            axis.fill_between(times, values.min(0), values.max(0), color=color, alpha=0.15, lw=0)
        if label.startswith("SGLD"):
            axes[0].axhline(floor, color=color, lw=0.8, ls=":")
    exact = times[times >= 2 * D]
    axes[0].plot(
        exact, D * (D + 1) / (4 * exact), color="0.4", ls="--", label="an exact draw a pass"
    )
    axes[1].plot(exact, exact**-0.5, color="0.4", ls="--", label="an exact draw a pass")
    axes[2].axhline(1.0, color="0.4", ls="--", label="a posterior draw")
    for axis, title, ylabel in zip(
        axes,
        (
            "Covariance of the draws past the burn-in\n(dotted: what bias leaves of SGLD)",
            "Mean of the draws past the burn-in",
            "Where the chain is\n(NUTS: from the end of its warm-up)",
        ),
        (
            "KL to the posterior [nats]",
            "rms error [posterior standard deviations]",
            "rms distance from the mode\n[posterior standard deviations]",
        ),
        strict=True,
    ):
        axis.set(xscale="log", yscale="log", xlabel="passes over the data", ylabel=ylabel)
        axis.set_title(title, fontsize=10)
        axis.set_xlim(times[0], times[-1])
        axis.grid(alpha=0.3, which="both", lw=0.5)
    for axis, limits in zip(axes, ((0.01, 10), (0.01, 1), (0.3, 300)), strict=True):
        axis.set_ylim(limits)
    axes[0].legend(fontsize=8)
    chains = {len(errors.kl) for errors, _ in results.values()}
    figure.suptitle(
        f"Convergence from {STARTS[number]}: mean and range over "
        f"{max(chains)} chains (NUTS {min(chains)})"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draws", type=int, default=2000, help="windows of figure 3")
    parser.add_argument("--chains", type=int, default=8, help="chains of figures 4 and 5")
    parser.add_argument("--passes", type=int, default=1000, help="length of those chains")
    parser.add_argument("--only", type=int, nargs="+", default=(3, 4, 5), choices=(3, 4, 5))
    parser.add_argument("--figures", type=pathlib.Path, help="directory for the figures")
    args = parser.parse_args()
    # The callback measures the curvature anew for each chain, from some of the rows and off the
    # mode; the ratios of all the data are printed.
    warnings.filterwarnings("ignore", "The step is short for windows|tr\\(A\\^-1 C\\)")
    x, y, posterior = problem()
    if args.figures:
        args.figures.mkdir(parents=True, exist_ok=True)
    if 3 in args.only:
        found = variances_of_averages(x, y, posterior, args.draws)
        if args.figures:
            draw_covariances(found, posterior, args.figures / "mandt_figure3.png")
    for number in sorted(set(args.only) - {3}):
        times, results = convergence(x, y, posterior, number, args.chains, args.passes)
        if args.figures:
            path = args.figures / f"mandt_figure{number}.png"
            draw_convergence(number, times, results, path)


if __name__ == "__main__":
    main()
