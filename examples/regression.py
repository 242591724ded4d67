"""Regression with a gap in the data: the posterior knows where it has seen nothing.

    python examples/regression.py [--figure regression.png]

80 points with noise of standard deviation 0.2 lie on both sides of a gap. SGLD samples the weights
of a small network; the figure shows the mean of y and how its spread splits into what the network
does not know (epistemic, it widens in the gap) and the noise of the observations.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib.pyplot as plt
import numpy as np

import keras_sgmcmc as sg

NOISE_STD = 0.2
GAP = (-1.0, 1.0)
EDGE = 2.5
WIDTH = 50
STEPS = 40_000
BURN_IN = 4_000


def truth(x):
    return np.sin(1.5 * x)


def observe(x, rng):
    return truth(x) + NOISE_STD * rng.standard_normal(x.shape)


def outside_gap(n, rng):
    """n points in two intervals of the same length, left and right of the gap."""
    distance = rng.uniform(GAP[1], EDGE, size=(n, 1))
    return np.where(np.arange(n)[:, None] % 2 == 0, distance, -distance)


def build_model():
    """Activations are divided by sqrt(width), which makes N(0, 1) a sensible prior of all weights.

    It also gives every layer a curvature of similar size, so that plain SGLD explores them all.
    """

    def dense(units, activation=None):
        start = keras.initializers.RandomNormal(stddev=1.0)
        return keras.layers.Dense(units, activation, kernel_initializer=start)

    return keras.Sequential(
        [
            keras.Input((1,)),
            dense(WIDTH, "tanh"),
            keras.layers.Rescaling(WIDTH**-0.5),
            dense(WIDTH, "tanh"),
            keras.layers.Rescaling(WIDTH**-0.5),
            dense(1),
        ]
    )


def sample_posterior(x, y):
    model = build_model()
    model.compile(
        optimizer=sg.SGLD(0.01, train_size=len(x), prior=1.0),
        loss=sg.GaussianNegativeLogLikelihood(NOISE_STD),
        steps_per_execution=100,
    )
    samples = sg.callbacks.PosteriorSamples(burn_in=BURN_IN, thinning=100)
    data = sg.minibatches(x, y, batch_size=len(x), steps=STEPS)
    model.fit(data, callbacks=[samples], shuffle=False, verbose=2)
    return samples.posterior


def coverage(posterior, x, y):
    """Share of the points within the central 95 % of the prediction."""
    prediction = posterior.predict_uncertainty(x, batch_size=len(x), verbose=0)
    return np.mean(np.abs(y - prediction.mean) < 1.96 * prediction.total_std)


def report(posterior, rng):
    places = {"centre of the data": (GAP[1] + EDGE) / 2, "centre of the gap": 0.0}
    print("\nepistemic standard deviation")
    for place, x in places.items():
        std = posterior.predict_uncertainty(np.array([[x]]), verbose=0).epistemic_std[0, 0]
        print(f"  {place:<20} x = {x:5.2f}   {std:.3f}")

    fresh = {"outside the gap": outside_gap(2000, rng), "in the gap": rng.uniform(*GAP, (2000, 1))}
    print("fresh observations within the total 95 % band")
    for place, x in fresh.items():
        print(f"  {place:<20} {coverage(posterior, x, observe(x, rng)):.1%}")


def plot(posterior, x, y, path):
    grid = np.linspace(-3.5, 3.5, 301)[:, None]
    prediction = posterior.predict_uncertainty(grid, batch_size=len(grid), verbose=0)
    grid, mean = grid[:, 0], prediction.mean[:, 0]
    epistemic = 1.96 * prediction.epistemic_std[:, 0]
    total = 1.96 * prediction.total_std[:, 0]

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.axvspan(*GAP, color="0.95", zorder=0)
    axes.text(0.0, 0.03, "no data", transform=axes.get_xaxis_transform(), ha="center", color="0.45")
    bands = (
        (total, "#c6dbef", "95 % of observations (epistemic + noise)"),
        (epistemic, "#6baed6", "95 % of the mean (epistemic)"),
    )
    for half_width, colour, label in bands:
        lower, upper = mean - half_width, mean + half_width
        axes.fill_between(grid, lower, upper, color=colour, lw=0, label=label)
    axes.plot(grid, mean, color="#08519c", lw=2, label="posterior mean")
    axes.plot(grid, truth(grid), color="black", lw=1.2, ls="--", label="true function")
    axes.scatter(x, y, s=18, color="#d94801", edgecolor="white", lw=0.5, zorder=3, label="data")
    axes.set(
        title=f"Posterior of a {WIDTH}-{WIDTH} tanh network, sampled by SGLD from {len(x)} points",
        xlabel="x",
        ylabel="y",
        xlim=(grid[0], grid[-1]),
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", default="regression.png", help="where to save the figure")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = outside_gap(80, rng)
    y = observe(x, rng)
    posterior = sample_posterior(x, y)
    report(posterior, rng)
    plot(posterior, x, y, arguments.figure)
    print(f"figure: {arguments.figure}")


if __name__ == "__main__":
    main()
