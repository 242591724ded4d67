"""Table 1 of Mandt, Hoffman & Blei (2017): KL divergence of what is sampled to the posterior.

    python tools/reproduce_mandt_table1.py --data DIR [--problems wine] [--steps 300000]
        [--figures DIR]

Linear regression on the white wines and on protein, logistic regression on skin, a Gaussian prior
of precision 1, no intercept, the paper's batch sizes. Chains start at the mode and run through
`fit`; what they visit after warm-up gives a mean and a covariance, whose KL divergence to the exact
posterior (on skin: its Laplace approximation) is printed beside what `theory` predicts for the
chain. A KL from n draws is too large by D (D + 1) / (4 n_cov) + D / (2 n_mean) on average: that
bias is printed beside it, with effective numbers of draws from batch means, and no KL is printed
below 100 of them. "relax" is the relaxation time in steps.

The prediction takes into account that the noise of the batches grows off the mode (regression), and
is exact for the discrete chain. Features and targets are standardised; with the features scaled to
unit maximum (`--scaling maximum`) the noise grows so much that a constant step of any method stays
away from the posterior of the wines. `--targets raw` leaves y in its units: without an intercept
the model then leaves the mean of y unexplained, C is many times A, and nothing but the relaxation
times and the predictions is worth printing (add `--sample` to run the chains all the same).

For the full forms the paper prints 0.7 to 1.8 nats on wine and protein, and 0.005 on skin.
Without `--data` the problem is scikit-learn's diabetes data, with batches of 10.
"""

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from linear_chains import Moments, linear_model, sample

import keras_sgmcmc as sg
from keras_sgmcmc import theory

PRIOR = 1.0
PROBLEMS = ("wine", "protein", "skin")
FILES = {"wine": "wine/wine_white", "protein": "protein/protein", "skin": "skin/skin"}
BATCHES = {"wine": 100, "protein": 100, "skin": 10_000, "diabetes": 10}


def load(directory, name, scaling, targets):
    """Features, targets, kind of model and batch size."""
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True)
    else:
        with np.load(pathlib.Path(directory) / f"{FILES[name]}.npz") as archive:
            x, y = archive["x"].astype("float64"), archive["y"].astype("float64")
    x = (x - x.mean(0)) / x.std(0) if scaling == "standard" else x / np.abs(x).max(0)
    if name == "skin":
        return x, y, "logistic", BATCHES[name]
    if targets == "standard":
        y = (y - y.mean()) / y.std()
    return x, y, "linear", BATCHES[name]


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


def mean_field(x, y, kind, posterior):
    """Mean and covariance that ADVI finds, and its wall time."""
    model = linear_model(kind, x.shape[1], "sgd")
    model.set_weights([posterior.mean.reshape(-1, 1)])
    scale = np.sqrt(np.diag(posterior.covariance).min())
    found = sg.reference.advi(
        model, x, y.reshape(-1, 1), prior=PRIOR, learning_rate=scale / 2, draws=1, seed=1, verbose=0
    )
    (mean,), (std,) = found.mean.values(), found.std.values()
    return mean.reshape(-1), np.diag(std.reshape(-1) ** 2)


def run(x, y, kind, posterior, optimizer, S, steps, keep):
    """The `Moments` of a chain, and some of its draws if `keep`."""
    model = linear_model(kind, x.shape[1], optimizer)
    begin = 2000 if getattr(optimizer, "warmup_steps", 0) else 0
    begin += steps // 20
    moments = Moments(posterior.mean, posterior.covariance, begin)
    draws = sg.callbacks.PosteriorSamples(begin, max(1, steps // 600)) if keep else None
    sample(
        model, x, y, moments, batch_size=S, steps=steps, start=posterior.mean,
        extra=[draws] if keep else [],
    )  # fmt: skip
    if keep:
        (draws,) = draws.posterior.draws.values()
        draws = draws.reshape(len(draws), -1)
    return moments, draws


def ellipse(covariance, radius=2.0):
    angles = np.linspace(0, 2 * np.pi, 200)
    return radius * np.linalg.cholesky(covariance) @ [np.cos(angles), np.sin(angles)]


def draw_figures(directory, results):
    """Like the paper's figures 1 (what is sampled) and 2 (predicted and empirical covariances)."""
    import matplotlib.pyplot as plt

    columns = 5
    lines = {name: -(-len(rows) // columns) for name, rows in results.items()}
    shape = (sum(lines.values()), columns)
    figure, axes = plt.subplots(*shape, figsize=(2.2 * columns, 2.5 * shape[0] + 0.6))
    first = 0
    for name, rows in results.items():
        block = axes[first : first + lines[name]].ravel()
        first += lines[name]
        for axis in block[len(rows) :]:
            axis.set_axis_off()
        for axis, (label, row) in zip(block, rows.items(), strict=False):
            posterior, moments, draws, _ = row
            axis.set_title(f"{name}: {label}", fontsize=7)
            values, vectors = np.linalg.eigh(posterior.covariance)
            plane = vectors[:, [-1, 0]] / np.sqrt(values[[-1, 0]])
            axis.plot(*((draws - posterior.mean) @ plane).T, ".", color="0.7", markersize=2)
            mean, covariance = moments.moments()
            centre = ((mean - posterior.mean) @ plane)[:, None]
            axis.plot(*ellipse(np.eye(2)), color="tab:blue", lw=1.5)
            axis.plot(*(centre + ellipse(plane.T @ covariance @ plane)), "--", color="tab:red")
            axis.set(
                xlim=(-6, 6), ylim=(-6, 6), aspect="equal", xticks=[-4, 0, 4], yticks=[-4, 0, 4]
            )
            axis.tick_params(labelsize=6)
    figure.suptitle(
        "Iterates in the plane of the posterior's widest (across) and narrowest direction, in its "
        "standard deviations.\nEllipses at two: posterior (blue), iterates (red, dashed)",
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.2 / (shape[0] + 0.2)))
    figure.savefig(directory / "mandt_figure1.png", dpi=130)

    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 5), squeeze=False)
    for axis, (name, rows) in zip(axes[0], results.items(), strict=True):
        for label, (posterior, moments, _, predicted_covariance) in rows.items():
            if "SGLD" in label:
                continue
            _, covariance = moments.moments()
            values, vectors = np.linalg.eigh(posterior.covariance)
            basis = vectors / np.sqrt(values)
            upper = np.triu_indices(len(values))
            pair = [(basis.T @ m @ basis)[upper] for m in (predicted_covariance, covariance)]
            axis.plot(*pair, ".", markersize=5, label=label)
        low, high = axis.get_xlim()
        axis.plot([low, high], [low, high], color="black", lw=0.6)
        axis.set(xlabel="predicted", ylabel="empirical")
        axis.set_title(f"{name}: covariances on the posterior's axes, in its variances", fontsize=9)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(directory / "mandt_figure2.png", dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=os.environ.get("KERAS_SGMCMC_DATA"))
    parser.add_argument("--problems", nargs="+", default=PROBLEMS, choices=PROBLEMS)
    parser.add_argument("--methods", nargs="+", help="only those whose label holds one of these")
    parser.add_argument("--steps", type=int, default=300_000, help="steps past warm-up")
    parser.add_argument("--scaling", choices=["standard", "maximum"], default="standard")
    parser.add_argument("--targets", choices=["standard", "raw"], default="standard")
    parser.add_argument("--sample", action="store_true", help="run the chains with --targets raw")
    parser.add_argument("--figures", type=pathlib.Path, help="directory for the figures")
    args = parser.parse_args()
    results = {}
    for name in args.problems if args.data else ["diabetes"]:
        x, y, kind, S = load(args.data, name, args.scaling, args.targets)
        results[name] = table(name, x, y, kind, S, args)
    if args.figures:
        args.figures.mkdir(parents=True, exist_ok=True)
        draw_figures(args.figures, results)


def table(name, x, y, kind, S, args):
    N, D = x.shape
    posterior = theory.gaussian_posterior(x, y, model=kind, prior_precision=PRIOR)
    ratio = theory.sandwich_ratio(posterior.A, posterior.C)
    print(f"\n{name}: N = {N}, D = {D}, S = {S}, tr(A^-1 C) / D = {ratio:.3f}")
    print(
        f"{'method':28} {'KL':>8} {'bias':>7} {'theory':>8}"
        f" {'trace':>7} {'theory':>7} {'n_cov':>8} {'relax':>9} {'us/step':>8}"
    )

    def chosen(label):
        return not args.methods or any(word in label for word in args.methods)

    def kl_of(covariance, mean=posterior.mean):
        return theory.gaussian_kl(covariance, posterior.covariance, mean, posterior.mean)

    runs = args.targets == "standard" or args.sample
    rows = {}
    for label, (optimizer, H, Q) in methods(posterior, N, S).items():
        if not chosen(label):
            continue
        covariance = predicted(x, y, kind, posterior, H, Q, N, S)
        if covariance is None:
            print(f"{label:28} unstable")
            continue
        relaxation = theory.relaxation_time(posterior.A, H)
        theory_trace = np.trace(N * posterior.A @ covariance) / D
        shown, trace, effective, pace = f"{'-':>8} {'-':>7}", "-", "-", "-"
        if runs:
            moments, draws = run(
                x, y, kind, posterior, optimizer, S, args.steps, args.figures is not None
            )
            mean, found = moments.moments()
            n_mean, n_cov = moments.effective()
            bias = D * (D + 1) / (4 * n_cov) + D / (2 * n_mean)
            if min(n_mean, n_cov) >= 100:
                shown = f"{kl_of(found, mean):8.4f} {bias:7.4f}"
            trace = f"{np.trace(N * posterior.A @ found) / D:.3f}"
            effective, pace = f"{n_cov:.0f}", f"{1e6 * moments.seconds_per_step:.0f}"
            rows[label] = posterior, moments, draws, covariance
        print(
            f"{label:28} {shown} {kl_of(covariance):8.4f} {trace:>7} {theory_trace:7.3f}"
            f" {effective:>8} {relaxation:9.0f} {pace:>8}",
            flush=True,
        )
    if chosen("ADVI") and runs:
        mean, found = mean_field(x, y, kind, posterior)
        optimum = np.diag(1 / np.diag(N * posterior.A))
        trace, best = (np.trace(N * posterior.A @ c) / D for c in (found, optimum))
        print(
            f"{'ADVI, mean field':28} {kl_of(found, mean):8.4f} {0:7.4f} {kl_of(optimum):8.4f}"
            f" {trace:7.3f} {best:7.3f}"
        )
    return rows


if __name__ == "__main__":
    main()
