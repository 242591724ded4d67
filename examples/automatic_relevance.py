"""Automatic relevance determination: the precision of each input's weights, learned while sampling.

    python examples/automatic_relevance.py [--figure automatic_relevance.png]

Friedman's regression: y depends on five of ten features, and on two of those jointly. Every
feature has first-layer weights of its own, and a Gaussian prior of a precision of its own, which
variational EM learns beside the noise level while SGLD samples the weights. What the data do not
need is driven to 0. A network with precision 1 everywhere, which is told the noise, is sampled for
comparison.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib.pyplot as plt
import numpy as np

import keras_sgmcmc as sg

FEATURES, RELEVANT = 10, 5
ROWS = 500
NOISE_STD = 1.0
WIDTH = 20
RATE = 0.01
STEPS = 300_000
LEARN_FROM = 30_000
BURN_IN = 150_000


def friedman(n, rng):
    """Features of variance 1, and y (Friedman 1991)."""
    x = rng.uniform(size=(n, FEATURES))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y += 10 * x[:, 3] + 5 * x[:, 4] + NOISE_STD * rng.standard_normal(n)
    return (x - 0.5) * np.sqrt(12), y[:, None]


def build_model():
    """A network with one hidden layer, whose kernel is a layer of its own for each feature."""
    inputs = keras.Input((FEATURES,))
    first = keras.layers.Dense(WIDTH, name="feature_0")  # with the bias of the hidden layer
    parts = [first(inputs[:, :1])]
    for i in range(1, FEATURES):
        feature = keras.layers.Dense(WIDTH, use_bias=False, name=f"feature_{i}")
        parts.append(feature(inputs[:, i : i + 1]))
    hidden = keras.layers.Activation("tanh")(keras.layers.Add()(parts))
    return keras.Model(inputs, keras.layers.Dense(1, name="output")(hidden))


def sample_posterior(x, y, learn):
    """A posterior, and the callback that learned its prior or None."""
    keras.utils.set_random_seed(0)
    model = build_model()
    groups = {f"feature_{i}/kernel": 1.0 for i in range(FEATURES)}
    groups |= {"output/kernel": 1.0, "bias": 1.0}
    model.compile(
        optimizer=sg.SGLD(RATE, train_size=len(x), prior=sg.GaussianPrior(groups=groups)),
        loss=sg.GaussianNegativeLogLikelihood(2 * NOISE_STD if learn else NOISE_STD),
        steps_per_execution=500,
    )
    samples = sg.callbacks.PosteriorSamples(burn_in=BURN_IN, thinning=500)
    callbacks = [samples]
    if learn:
        # The prior on the precisions is weak: it counts for one weight of the twenty of a group.
        em = sg.callbacks.PriorPrecisionEM(
            start=LEARN_FROM, shape=1.5, rate=1e-2, learn_noise_std=True
        )
        callbacks.append(em)
    data = sg.minibatches(x, y, batch_size=50, steps=STEPS // 10, seed=0)
    model.fit(data, epochs=10, callbacks=callbacks, shuffle=False, verbose=2)
    return samples.posterior, em if learn else None


def score(posterior, x, y):
    """Root mean squared error, and mean negative log predictive density, on fresh rows."""
    mean, _ = posterior.predict_moments(x, verbose=0)
    density = posterior.log_predictive_density(x, y, verbose=0)
    return np.sqrt(np.mean((mean - y) ** 2)), -np.mean(density)


def relevances(em):
    """sd of the prior of each feature's weights: of its precisions in the last half of updates."""
    values = [em.history[f"feature_{i}/kernel"] for i in range(FEATURES)]
    return np.exp([-0.5 * np.log(v[len(v) // 2 :]).mean() for v in values])


def plot(em, path):
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    colours = ["#08519c" if i < RELEVANT else "#d94801" for i in range(FEATURES)]
    left.bar(range(1, FEATURES + 1), relevances(em), color=colours)
    left.set(
        title="What the features need",
        xlabel="feature (blue: y depends on it)",
        ylabel=r"prior sd of its weights, $1 / \sqrt{\lambda}$",
        xticks=range(1, FEATURES + 1),
    )
    for i, colour in enumerate(colours):
        label = {0: "relevant", RELEVANT: "useless"}.get(i)
        right.plot(
            em.history["step"], em.history[f"feature_{i}/kernel"], color=colour, lw=1, label=label
        )
    right.set(
        title="Precisions while the weights are sampled",
        xlabel="step",
        ylabel=r"prior precision $\lambda$ (1 / squared weight)",
        yscale="log",
        ylim=(0.5, 2000),
    )
    right.legend(loc="upper right", ncols=2)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", default="automatic_relevance.png", help="where to save it")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    x, y = friedman(ROWS, rng)
    fresh = friedman(5000, rng)
    learned, em = sample_posterior(x, y, learn=True)
    fixed, _ = sample_posterior(x, y, learn=False)
    print("\nfeature        " + " ".join(f"{i:6d}" for i in range(1, FEATURES + 1)))
    print("sd of weights  " + " ".join(f"{value:6.3f}" for value in relevances(em)))
    sigma = em.history["noise_std"][len(em.history["noise_std"]) // 2 :].mean()
    print(f"noise: sigma = {sigma:.3f} (true: {NOISE_STD:g}, at first {2 * NOISE_STD:g})")
    print(f"\n{'5,000 fresh rows':<28}{'RMSE':>8}{'NLL':>8}")
    for name, posterior in (("precisions learned", learned), ("precision 1", fixed)):
        print("{:<28}{:>8.3f}{:>8.3f}".format(name, *score(posterior, *fresh)))
    plot(em, arguments.figure)
    print(f"figure: {arguments.figure}")


if __name__ == "__main__":
    main()
