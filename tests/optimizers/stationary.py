"""The oracles as functions of a sampler class, so that mutated samplers can be held to them too."""

import numpy as np
import tensorflow as tf
from harness import assert_close, run
from oracles import (
    increment_variance,
    linear_chain_covariance,
    linear_posterior,
    scalar_stationary_variance,
    whitened_eigenvalues,
)

import keras_sgmcmc as sg


def frozen(cls, moments, learning_rate, **kwargs):
    """A sampler whose preconditioner is known, and the diagonal of its H.

    pSGLD gets its second moments set by hand, past `adaptation_steps`; SGLD has H = eta.
    """
    if not issubclass(cls, sg.pSGLD):
        return cls(learning_rate, seed=7, **kwargs), np.full(moments.shape, learning_rate)
    epsilon = 0.1
    metric = epsilon + np.sqrt(moments)

    class Frozen(cls):
        def build(self, variables):
            super().build(variables)
            self._second_moments[0].assign(moments.astype("float32"))
            self.iterations.assign(1)

    # The step is divided by the smallest metric so that both samplers move alike.
    step = learning_rate * metric.min()
    optimizer = Frozen(step, seed=7, epsilon=epsilon, adaptation_steps=1, **kwargs)
    return optimizer, step / metric


def moments_like(shape):
    """Second moments that differ along the first axis, from 0.25 to 4."""
    rows = np.linspace(0.5, 2.0, shape[0]) ** 2
    return np.broadcast_to(rows.reshape((-1,) + (1,) * (len(shape) - 1)), shape)


def check_pure_noise(cls, temperature=1.0, jit=True, step=0.1, train_size=50):
    """Without gradient and prior a step has variance 2 T H / N, kurtosis 3 and mean 0."""
    shape = (4, 100_000)
    optimizer, H = frozen(
        cls, moments_like(shape), step, train_size=train_size, temperature=temperature
    )
    start = np.zeros(shape, "float32")
    (draw,) = run(
        optimizer, start, lambda theta, _: tf.zeros_like(theta), steps=1, keep_every=1, jit=jit
    )
    expected = increment_variance(H[:, 0], train_size, temperature)
    n = shape[1]
    assert_close(
        draw.astype("float64").var(axis=1),
        expected,
        expected * np.sqrt(2 / n),
        "variance of one step",
        largest_error=0.005,
    )
    z = draw / np.sqrt(expected)[:, None]
    assert_close(z.mean(axis=1), 0.0, 1 / np.sqrt(n), "mean of one step")
    assert_close((z**4).mean(), 3.0, np.sqrt(96 / z.size), "kurtosis")


def check_quadratic(cls, temperature=1.0, jit=True, step_times_curvature=0.5, train_size=100):
    """Full batch on curvature h: variance T / (N h (1 - eta h / 2)), correlation 1 - eta h."""
    curvature, shape = 2.0, (4, 5_000)
    optimizer, H = frozen(
        cls,
        moments_like(shape),
        step_times_curvature / curvature,
        train_size=train_size,
        temperature=temperature,
    )
    expected = scalar_stationary_variance(curvature, H[:, 0], train_size, temperature)
    rng = np.random.default_rng(0)
    start = rng.standard_normal(shape) * np.sqrt(expected)[:, None]
    draws = run(
        optimizer,
        start.astype("float32"),
        lambda theta, _: curvature * theta,
        steps=60,
        keep_every=1,
        jit=jit,
    ).astype("float64")[20:]
    # Columns are independent chains: the standard error comes from them, not from a formula.
    squares = (draws**2).mean(axis=0)
    error = squares.std(axis=1, ddof=1) / np.sqrt(shape[1])
    assert_close(squares.mean(axis=1), expected, error, "variance", largest_error=0.02)
    products = (draws[1:] * draws[:-1]).mean(axis=0) / expected[:, None]
    error = products.std(axis=1, ddof=1) / np.sqrt(shape[1])
    correlation = 1 - H[:, 0] * curvature
    assert_close(products.mean(axis=1), correlation, error, "lag-1 autocorrelation")
    means = draws.mean(axis=0)
    error = means.std(axis=1, ddof=1) / np.sqrt(shape[1])
    assert_close(means.mean(axis=1), 0.0, error, "mean")


def check_prior(cls, temperature=1.0, jit=True, precision=4.0, train_size=10):
    """Without data the stationary law is the prior, N(0, T / lambda), whatever N."""
    shape = (4, 5_000)
    optimizer, H = frozen(
        cls,
        moments_like(shape),
        0.2 * train_size / precision,
        train_size=train_size,
        temperature=temperature,
        prior=precision,
    )
    expected = scalar_stationary_variance(precision / train_size, H[:, 0], train_size, temperature)
    rng = np.random.default_rng(0)
    start = rng.standard_normal(shape) * np.sqrt(temperature / precision)
    draws = run(
        optimizer,
        start.astype("float32"),
        lambda theta, _: tf.zeros_like(theta),
        steps=200,
        keep_every=4,
        jit=jit,
    ).astype("float64")[10:]
    squares = (draws**2).mean(axis=0)
    error = squares.std(axis=1, ddof=1) / np.sqrt(shape[1])
    assert_close(squares.mean(axis=1), expected, error, "variance", largest_error=0.02)


class LinearRegression:
    """Five correlated features, condition number 10, 2,000 independent targets as columns."""

    N, D, TARGETS, BATCH = 200, 5, 2_000, 50
    NOISE_STD, PRECISION = 0.5, 1.0

    def __init__(self):
        rng = np.random.default_rng(3)
        basis, _ = np.linalg.qr(rng.standard_normal((self.D, self.D)))
        raw = rng.standard_normal((self.N, self.D))
        raw = (raw - raw.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(raw.T, bias=True))).T
        # Curvature of the mean loss, x'x / (N sigma^2): eigenvalues from 0.1 to 1 (over sigma^2).
        self.x = raw @ np.diag(np.sqrt(np.geomspace(0.1, 1.0, self.D))) @ basis.T
        truth = rng.standard_normal((self.D, self.TARGETS))
        noise = self.NOISE_STD * rng.standard_normal((self.N, self.TARGETS))
        self.y = self.x @ truth + noise
        self.mean, self.covariance = linear_posterior(
            self.x, self.y, self.NOISE_STD, self.PRECISION
        )

    def gradient(self, theta, step):
        """Gradient of the mean loss of a batch drawn independently with replacement."""
        seed = tf.stack([tf.constant(5, tf.int64), tf.cast(step, tf.int64)])
        rows = tf.random.stateless_uniform(
            (self.BATCH,), seed, maxval=self.N, dtype=tf.int32, alg="philox"
        )
        x = tf.gather(tf.constant(self.x, tf.float32), rows)
        y = tf.gather(tf.constant(self.y, tf.float32), rows)
        residual = tf.matmul(x, theta) - y
        return tf.matmul(x, residual, transpose_a=True) / (self.BATCH * self.NOISE_STD**2)


def check_regression(cls, temperature=1.0, jit=True, draws=6, spacing=500):
    """Bayesian linear regression: mean and covariance of the posterior, tempered by T."""
    problem = LinearRegression()
    shape = (problem.D, problem.TARGETS)
    curvature = np.linalg.eigvalsh(problem.x.T @ problem.x / problem.N).max()
    largest = curvature / problem.NOISE_STD**2 + problem.PRECISION / problem.N
    optimizer, H = frozen(
        cls,
        moments_like(shape),
        0.02 / largest,
        train_size=problem.N,
        prior=problem.PRECISION,
        temperature=temperature,
    )
    preconditioner = np.diag(H[:, 0])
    # The prediction for 50 of the targets, whose residuals and so whose batch noise differ.
    exact = np.mean(
        [
            linear_chain_covariance(
                problem.x,
                problem.y[:, target],
                problem.NOISE_STD,
                problem.PRECISION,
                preconditioner,
                problem.BATCH,
                temperature,
            )
            for target in range(0, problem.TARGETS, 40)
        ],
        axis=0,
    )
    rng = np.random.default_rng(1)
    start = problem.mean + np.linalg.cholesky(exact) @ rng.standard_normal(shape)
    chain = run(
        optimizer,
        start.astype("float32"),
        problem.gradient,
        steps=(draws + 1) * spacing,
        keep_every=spacing,
        jit=jit,
    ).astype("float64")[1:]
    deviations = chain - problem.mean
    tempered = temperature * problem.covariance

    # Columns share the batches, but their residuals are independent: they count as replicas.
    products = np.einsum("sit,sjt->tij", deviations, deviations) / len(chain)
    estimate = products.mean(axis=0)
    if temperature == 1:
        # Batch noise is not tempered: at T < 1 it weighs 1 / T times as much, as `exact` knows.
        eigenvalues = whitened_eigenvalues(tempered, estimate)
        assert np.all(np.abs(eigenvalues - 1) < 0.1), eigenvalues

    # In the eigenvectors of the exact covariance, every variance with its own standard error.
    vectors = np.linalg.eigh(exact)[1]
    along = np.einsum("ik,tij,jk->tk", vectors, products, vectors)
    error = along.std(axis=0, ddof=1) / np.sqrt(problem.TARGETS)
    expected = np.einsum("ik,ij,jk->k", vectors, exact, vectors)
    assert_close(along.mean(axis=0), expected, error, "variances", largest_error=0.02)

    pooled = np.einsum("ij,tji->t", np.linalg.inv(exact), products) / problem.D
    error = pooled.std(ddof=1) / np.sqrt(problem.TARGETS)
    assert_close(pooled.mean(), 1.0, error, "tr(P Sigma_hat) / D", largest_error=0.01)

    standardised = deviations.mean(axis=(0, 2)) / np.sqrt(np.diag(tempered))
    assert np.all(np.abs(standardised) < 0.03), standardised
