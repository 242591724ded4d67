"""A Bayesian digit classifier: compile with a sampler, fit, predict with the posterior.

    python examples/quickstart.py [--figure quickstart.png] [--data DIR]

The images are scikit-learn's 8 x 8 digits; with `--data DIR`, or the environment variable
KERAS_SGMCMC_DATA, they are 5,000 of MNIST's from DIR/mnist/mnist.npz. The same network is trained
three times on the same rows: sampled by pSGLD at temperature 1, and fitted by Adam for as many
steps and with early stopping. A table compares the three on test images; the figure shows the
images that the posterior is least certain about, and how far each method's confidence can be
trusted.
"""

import argparse
import os
import pathlib
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import keras_sgmcmc as sg

BATCH_SIZE = 100
STEPS = 20_000
BURN_IN = 4_000
THINNING = 40
PRIOR_PRECISION = 1.0
COLOURS = ("#08519c", "#fd8d3c", "#a63603")


class Split(NamedTuple):
    x: np.ndarray
    y: np.ndarray


def build_model(x):
    return keras.Sequential(
        [
            keras.Input(x.shape[1:]),
            keras.layers.Flatten(),
            keras.layers.Dense(100, "relu"),
            keras.layers.Dense(100, "relu"),
            keras.layers.Dense(10, "softmax"),
        ]
    )


def sample_posterior(train, precision=PRIOR_PRECISION, verbose=0):
    """Draws from the posterior of the weights under a N(0, 1 / precision) prior."""
    model = build_model(train.x)
    model.compile(
        optimizer=sg.pSGLD(
            learning_rate=3e-3,
            train_size=len(train.x),
            prior=precision,
            rho=0.999,
            epsilon=5e-3,
            adaptation_steps=BURN_IN,
        ),
        loss="sparse_categorical_crossentropy",
        steps_per_execution=THINNING,
    )
    data = sg.minibatches(train.x, train.y, BATCH_SIZE, steps=STEPS)
    samples = sg.callbacks.PosteriorSamples(burn_in=BURN_IN, thinning=THINNING)
    model.fit(data, callbacks=[samples], shuffle=False, verbose=verbose)
    return samples.posterior


def train_adam(train, validation=None):
    """Adam for STEPS steps, or, given validation data, until their loss no longer falls."""
    model = build_model(train.x)
    model.compile("adam", loss="sparse_categorical_crossentropy", steps_per_execution=50)
    stop = keras.callbacks.EarlyStopping(patience=10, restore_best_weights=True)
    steps_per_epoch = STEPS if validation is None else 50
    model.fit(
        sg.minibatches(train.x, train.y, BATCH_SIZE, steps=steps_per_epoch),
        epochs=STEPS // steps_per_epoch,
        validation_data=validation,
        callbacks=[] if validation is None else [stop],
        shuffle=False,
        verbose=0,
    )
    return model


def mnist_file(directory):
    """The file with MNIST, None if there is none."""
    path = pathlib.Path(directory or "") / "mnist" / "mnist.npz"
    return path if directory and path.exists() else None


def load_data(file=None, seed=0):
    """Training, validation and test rows, drawn at random: `seed` decides which are which."""
    if file is not None:
        with np.load(file) as arrays:
            x, y = arrays["x_train"] / 255.0, arrays["y_train"]
        sizes = (5000, 1000, 5000)
    else:
        digits = load_digits()
        x, y = digits.images / 16.0, digits.target
        sizes = (1000, 297, 500)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order].astype("float32"), y[order].astype("int32")
    ends = np.cumsum(sizes)
    return [
        Split(x[end - size : end], y[end - size : end])
        for end, size in zip(ends, sizes, strict=True)
    ]


class Scores(NamedTuple):
    accuracy: float
    nll: float
    ece: float


def score(probabilities, y, bins=10):
    """Accuracy, negative log-likelihood of the labels, expected calibration error (equal bins)."""
    of_label = np.take_along_axis(probabilities, y[:, None], axis=1)
    nll = -np.mean(np.log(np.maximum(of_label, np.finfo("float32").tiny)))
    confidence, correct = decisions(probabilities, y)
    bin_of_row = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(bin_of_row, weights=confidence - correct)
    return Scores(correct.mean(), nll, np.abs(gaps).sum() / len(y))


def decisions(probabilities, y):
    """Of every row, the probability of the predicted class and whether it is the label."""
    return probabilities.max(axis=1), probabilities.argmax(axis=1) == y


def plot(predictions, test, path):
    figure = plt.figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.35, 1.0))
    plot_least_certain(left, next(iter(predictions.values())), test)
    plot_reliability(right, predictions, test)
    figure.savefig(path, dpi=110)


def plot_least_certain(figure, probabilities, test, rows=3, columns=2):
    figure.suptitle("The test images that the posterior is least certain about")
    entropy = -np.sum(probabilities * np.log(np.maximum(probabilities, 1e-12)), axis=1)
    axes = figure.subplots(rows, 2 * columns, width_ratios=(1.0, 2.0) * columns)
    pairs = axes.reshape(-1, 2)
    for (image, bars), i in zip(pairs, np.argsort(-entropy), strict=False):
        image.imshow(test.x[i], cmap="gray_r")
        image.set(xticks=[], yticks=[], xlabel=f"label {test.y[i]}")
        colours = np.where(np.arange(10) == test.y[i], "#31a354", "#9ecae1")
        bars.bar(range(10), probabilities[i], color=colours)
        bars.set(xticks=range(10), ylim=(0.0, 1.0), yticks=(0.0, 0.5, 1.0))
        bars.tick_params(labelsize=8)
        bars.spines[["top", "right"]].set_visible(False)
    for bars in axes[:, 1]:
        bars.set_ylabel("probability", fontsize=8)
    for bars in axes[-1, 1::2]:
        bars.set_xlabel("class (green: the label)", fontsize=8)


def plot_reliability(figure, predictions, test, shares=(0.04, 0.1, 0.2)):
    """Accuracy against confidence, in groups of rows of which every method has as many."""
    axes = figure.subplots()
    axes.plot((0, 1), (0, 1), color="0.6", ls="--", lw=1, label="calibrated")
    for (name, probabilities), colour in zip(predictions.items(), COLOURS, strict=True):
        confidence, correct = decisions(probabilities, test.y)
        ends = [round(share * len(test.y)) for share in shares]
        groups = np.split(np.argsort(confidence), ends)
        accuracy = np.array([correct[rows].mean() for rows in groups])
        error = np.sqrt(accuracy * (1.0 - accuracy) / [len(rows) for rows in groups])
        axes.errorbar(
            [confidence[rows].mean() for rows in groups],
            accuracy,
            yerr=error,
            label=name,
            color=colour,
            marker="o",
            capsize=3,
        )
    axes.set(
        title="Can the confidence be trusted?",
        xlabel="mean confidence (probability of the predicted class)\n"
        "points: least sure 4 %, next 6, 10, 80 %; bars: 1 std. error",
        ylabel="accuracy",
        xlim=(0.2, 1.02),
        ylim=(0.2, 1.04),
    )
    axes.text(0.22, 1.0, "above the line: too cautious\nbelow: too sure", va="top", color="0.4")
    axes.legend(loc="lower right", fontsize=9)


def argument_parser(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--data",
        default=os.environ.get("KERAS_SGMCMC_DATA"),
        help="folder that holds mnist/mnist.npz; without it scikit-learn's digits are used",
    )
    return parser


def main():
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--figure", default="quickstart.png", help="where to save the figure")
    arguments = parser.parse_args()

    file = mnist_file(arguments.data)
    train, validation, test = load_data(file)
    print(f"{file or 'digits of scikit-learn'}: {len(train.x):,} training images")
    keras.utils.set_random_seed(0)
    posterior = sample_posterior(train, verbose=2)
    adam = train_adam(train)
    stopped = train_adam(train, validation)
    predictions = {
        "posterior predictive (T = 1)": posterior.predict(test.x, batch_size=500, verbose=0),
        f"Adam, {STEPS:,} steps": adam.predict(test.x, verbose=0),
        "Adam, early stopping": stopped.predict(test.x, verbose=0),
    }

    print(f"\n{f'{len(test.y):,} test images':<30}{'accuracy':>10}{'NLL':>9}{'ECE':>9}")
    for name, probabilities in predictions.items():
        accuracy, nll, ece = score(probabilities, test.y)
        print(f"{name:<30}{accuracy:>10.1%}{nll:>9.3f}{ece:>9.3f}")
    plot(predictions, test, arguments.figure)
    print(f"figure: {arguments.figure}")


if __name__ == "__main__":
    main()
