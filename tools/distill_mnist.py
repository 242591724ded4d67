"""The posterior predictive of a network on MNIST as one network: does the student keep its error?

    python tools/distill_mnist.py --data DIR

A network 784-200-200-10 is sampled by pSGLD at temperature 1, and another of that size learns
(`keras_sgmcmc.distill`) what the draws predict together for the training images. What is printed is
error and negative log-likelihood on the test images of the ensemble, of the student and of the last
draw alone. Exits with an error if the errors of student and ensemble differ by more than 0.3
percentage points.
"""

import argparse
import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import keras_sgmcmc as sg

BATCH_SIZE = 100
TOLERANCE = 0.003


def load(directory):
    """Training and test images and their labels."""
    with np.load(pathlib.Path(directory) / "mnist" / "mnist.npz") as arrays:
        return [
            (arrays[f"x_{part}"].astype("float32") / 255, arrays[f"y_{part}"].astype("int32"))
            for part in ("train", "test")
        ]


def build_model(width):
    layers = keras.layers
    hidden = [layers.Dense(width, "relu") for _ in range(2)]
    return keras.Sequential(
        [keras.Input((28, 28)), layers.Flatten(), *hidden, layers.Dense(10, "softmax")]
    )


def sample_posterior(x, y, arguments):
    model = build_model(arguments.width)
    steps = len(x) // BATCH_SIZE
    burn_in = arguments.burn_in * steps
    model.compile(
        sg.pSGLD(
            learning_rate=arguments.learning_rate,
            train_size=len(x),
            prior=arguments.precision,
            rho=0.999,
            epsilon=5e-3,
            adaptation_steps=burn_in,
        ),
        loss="sparse_categorical_crossentropy",
        steps_per_execution=100,
    )
    thinning = (arguments.epochs - arguments.burn_in) * steps // arguments.draws
    samples = sg.callbacks.PosteriorSamples(burn_in=burn_in, thinning=thinning)
    data = sg.minibatches(x, y, BATCH_SIZE, seed=0)
    model.fit(data, epochs=arguments.epochs, callbacks=[samples], shuffle=False, verbose=2)
    return samples.posterior


def distil(posterior, x, arguments):
    steps = arguments.student_epochs * -(-len(x) // BATCH_SIZE)
    rate = keras.optimizers.schedules.CosineDecay(2e-3, steps)
    return sg.distill(
        posterior,
        build_model(arguments.width),
        x,
        epochs=arguments.student_epochs,
        batch_size=BATCH_SIZE,
        optimizer=keras.optimizers.Adam(rate),
        verbose=2,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", default=os.environ.get("KERAS_SGMCMC_DATA"), help="holds mnist/mnist.npz"
    )
    parser.add_argument("--width", type=int, default=200, help="units of a hidden layer")
    parser.add_argument("--epochs", type=int, default=30, help="of the sampler")
    parser.add_argument("--burn-in", type=int, default=10, help="epochs of them")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of pSGLD")
    parser.add_argument("--precision", type=float, default=30.0, help="of the prior")
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--student-epochs", type=int, default=10)
    arguments = parser.parse_args()
    if not arguments.data:
        parser.error("--data or KERAS_SGMCMC_DATA should name the folder of mnist/mnist.npz")
    (x, y), test = load(arguments.data)
    keras.utils.set_random_seed(0)

    seconds = [time.perf_counter()]
    posterior = sample_posterior(x, y, arguments)
    seconds.append(time.perf_counter())
    student = distil(posterior, x, arguments)
    seconds.append(time.perf_counter())
    print(f"\nsampling {np.diff(seconds)[0]:.0f} s, distilling {np.diff(seconds)[1]:.0f} s")

    predictions = {
        f"ensemble of {len(posterior)} draws": posterior.predict(test[0], 500, verbose=0),
        "student": student.predict(test[0], batch_size=500, verbose=0),
        "last draw": posterior[-1:].predict(test[0], 500, verbose=0),
    }
    errors = {}
    print(f"{f'{len(test[1]):,} test images':<24}{'error':>9}{'NLL':>9}")
    for name, p in predictions.items():
        errors[name] = np.mean(p.argmax(-1) != test[1])
        nll = sg.metrics.negative_log_likelihood(p, test[1])
        print(f"{name:<24}{errors[name]:>9.2%}{nll:>9.4f}")
    ensemble, of_student, _ = errors.values()
    gap = of_student - ensemble
    print(f"the student's error less the ensemble's: {100 * gap:+.2f} percentage points")
    if abs(gap) > TOLERANCE:
        sys.exit(f"more than {100 * TOLERANCE:g} percentage points")


if __name__ == "__main__":
    main()
