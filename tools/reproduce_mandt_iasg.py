"""Figure 3 of Mandt, Hoffman & Blei (2017): the covariance of iterate averages.

    python tools/reproduce_mandt_iasg.py [--draws 2000]

Linear regression with D = 10 standard normal features and N = 10,000 rows of a model that is right
(noise of variance 1), batches of 10, windows of N / S = 1,000 steps, at a short step (0.003) and at
one that fits the window (0.05). Printed are the variances of the ten marginals of the averages, on
average in units of what `theory` predicts for the chain, and of the posterior's.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from linear_chains import linear_model

import keras_sgmcmc as sg
from keras_sgmcmc import theory

N, D, S = 10_000, 10, 10
WINDOW = N // S
STEPS = (0.003, 0.05)


def problem(seed=0):
    """Features, targets, and the posterior."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((N, D))
    y = x @ rng.standard_normal(D) + rng.standard_normal(N)
    return x, y, theory.gaussian_posterior(x, y, prior_precision=0.0)


def averages(x, y, start, rate, draws, seed, burn_in):
    """Window means of a chain, [draws, D]."""
    model = linear_model("linear", D, keras.optimizers.SGD(rate))
    model.set_weights([np.reshape(start, (D, 1))])
    callback = sg.callbacks.IterateAverages(burn_in)
    data = sg.minibatches(x, y[:, None], S, seed=seed, steps=draws * WINDOW + burn_in)
    model.fit(data, callbacks=[callback], verbose=0, shuffle=False)
    (values,) = callback.posterior.draws.values()
    return values.reshape(len(values), D).astype("float64")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draws", type=int, default=2000)
    args = parser.parse_args()
    x, y, posterior = problem()
    variances = np.diag(posterior.covariance)
    ratio = theory.sandwich_ratio(posterior.A, posterior.C)
    curvatures = np.linalg.eigvalsh(posterior.A)[[0, -1]]
    print(f"tr(A^-1 C) / D = {ratio:.3f}, curvatures {curvatures[0]:.3f} to {curvatures[1]:.3f}")
    print(f"{'step':>6} {'of theory':>10} {'of posterior':>13} {'theory of posterior':>20}")
    for rate in STEPS:
        expected = theory.iterate_average_covariance(
            posterior.A, posterior.C, rate, window=WINDOW, S=S
        )
        burn_in = int(20 / (rate * curvatures[0]) / WINDOW + 1) * WINDOW
        draws = averages(x, y, posterior.mean, rate, args.draws, 1, burn_in)
        found = draws.var(0)
        theirs = np.diag(expected)
        print(
            f"{rate:6g} {np.mean(found / theirs):10.3f} {np.mean(found / variances):13.3f}"
            f" {np.mean(theirs / variances):20.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
