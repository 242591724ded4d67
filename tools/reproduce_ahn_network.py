"""The network of Ahn, Korattikara & Welling (2012), section 5: SGFS in full on 940 weights.

    python tools/reproduce_ahn_network.py --data DIR [--steps 4000]

MNIST on its first 20 principal components, a network 20-30-10, a Gaussian prior of precision 1,
batches of 2,000 (without `--data` scikit-learn's digits, batches of 200). SGFS in its full, block
and diagonal form with a = 6, and SGLD, run for the same number of steps from the same weights; what
is printed is the time a step, from epochs after the first, and error and negative log-likelihood of
the posterior predictive on test data, beside those of the last draw alone.
"""

import argparse
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import keras_sgmcmc as sg

COMPONENTS, HIDDEN, CLASSES = 20, 30, 10


def load(directory):
    """Training and test rows on the training rows' principal components, and the batch size."""
    if directory:
        with np.load(pathlib.Path(directory) / "mnist" / "mnist.npz") as archive:
            parts = [archive[f"{kind}_{part}"] for part in ("train", "test") for kind in "xy"]
        parts[0], parts[2] = (x.reshape(len(x), -1) / 255.0 for x in (parts[0], parts[2]))
        batch = 2000
    else:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x = x / 16.0
        parts = [x[:1400], y[:1400], x[1400:], y[1400:]]
        batch = 200
    mean = parts[0].mean(0)
    _, vectors = np.linalg.eigh(np.cov(parts[0].T))
    basis = vectors[:, ::-1][:, :COMPONENTS]
    train = (parts[0] - mean) @ basis
    scale = train.std(0)
    test = (parts[2] - mean) @ basis
    return (
        (train / scale).astype("float32"), parts[1].astype("int32"),
        (test / scale).astype("float32"), parts[3].astype("int32"), batch,
    )  # fmt: skip


class Pace(keras.callbacks.Callback):
    """Seconds of every epoch."""

    def on_train_begin(self, logs=None):
        self.times = []

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.times.append(time.perf_counter() - self.start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=os.environ.get("KERAS_SGMCMC_DATA"))
    parser.add_argument("--steps", type=int, default=4000)
    args = parser.parse_args()
    x, y, x_test, y_test, S = load(args.data)
    N = len(x)
    common = {"train_size": N, "prior": 1.0, "seed": 1}
    # C is gathered at every tenth step.
    sgfs = {**common, "batch_size": S, "warmup_steps": 1000, "warmup_learning_rate": 3e-3}
    samplers = {
        "SGFS full, a = 6": lambda: sg.SGFS(fisher="full", **sgfs),
        "SGFS block, a = 6": lambda: sg.SGFS(fisher="block", **sgfs),
        "SGFS diagonal, a = 6": lambda: sg.SGFS(fisher="diagonal", **sgfs),
        "SGLD, step 0.05": lambda: sg.SGLD(0.05, **common),
    }
    epoch = args.steps // 10
    burn_in = max(2000, args.steps // 2)
    print(f"N = {N}, S = {S}, network {COMPONENTS}-{HIDDEN}-{CLASSES}, {args.steps} steps")
    print(f"{'':22} {'ms/step':>8} {'draws':>6} {'error':>7} {'NLL':>7} {'last draw':>16}")
    for label, make in samplers.items():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((COMPONENTS,)),
                keras.layers.Dense(HIDDEN, "tanh"),
                keras.layers.Dense(CLASSES, "softmax"),
            ]
        )
        optimizer = make()
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        samples = sg.callbacks.PosteriorSamples(burn_in, thinning=max(1, args.steps // 200))
        pace = Pace()
        callbacks = [samples, pace]
        if optimizer.uses_batch_noise:
            callbacks.append(sg.callbacks.GradientNoise(every=10))
        data = sg.minibatches(x, y, S, seed=3, steps=epoch)
        model.fit(data, epochs=10, callbacks=callbacks, verbose=0, shuffle=False)
        posterior = samples.posterior
        found = posterior.evaluate(x_test, y_test, verbose=0)
        nll = -np.mean(posterior.log_predictive_density(x_test, y_test, verbose=0))
        probabilities = model.predict(x_test, verbose=0)
        last = np.mean(probabilities.argmax(1) != y_test)
        last_nll = -np.mean(np.log(probabilities[np.arange(len(y_test)), y_test] + 1e-30))
        print(
            f"{label:22} {1e3 * np.median(pace.times[3:]) / epoch:8.2f} {len(posterior):6d}"
            f" {100 * (1 - found['accuracy']):6.2f}% {nll:7.4f} {100 * last:7.2f}% {last_nll:7.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
