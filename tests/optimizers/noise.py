"""What the tests of samplers share that take C, the covariance of per-example gradients."""

import keras
import numpy as np
import tensorflow as tf
from harness import assert_close, run


def given(cls, C, *args, **kwargs):
    """A sampler that knows C ([D] or [D, D], or one for each block) when it is built."""
    entries = C if isinstance(C, list) else [C]

    class Given(cls):
        def build(self, variables):
            first = not self.built
            super().build(variables)
            if first:
                tensors = [tf.constant(entry, tf.float32) for entry in entries]
                self.update_noise_covariance(tensors, 1e6)

    return Given(*args, warmup_steps=0, **kwargs)


class Steps:
    """Reads H and Q from the moves of an optimizer, with noise that is chosen."""

    def __init__(self, optimizer, sizes):
        self.optimizer = optimizer
        self.variables = [keras.Variable(np.zeros(n, "float32"), name=f"w{n}") for n in sizes]
        self.sizes = sizes
        D = sum(sizes)
        # One row for each stream: those of the variables or blocks, then those of the gradients.
        self.noise = tf.Variable(np.zeros((2 * len(sizes), D), "float32"))

        def normal(shape, dtype, stream):
            return tf.cast(tf.reshape(self.noise[stream, : int(np.prod(shape))], shape), dtype)

        object.__setattr__(optimizer, "_normal", normal)
        optimizer.build(self.variables)

    def move(self, gradient, noise=None):
        for variable in (*self.variables, *getattr(self.optimizer, "_velocity", ())):
            variable.assign(tf.zeros_like(variable))
        self.noise.assign(np.zeros(self.noise.shape) if noise is None else noise)
        parts = np.split(np.asarray(gradient, "float32"), np.cumsum(self.sizes)[:-1])
        self.optimizer.apply([tf.constant(part) for part in parts], self.variables)
        return np.concatenate([v.numpy().astype("float64") for v in self.variables])

    def matrices(self):
        """H and Q, [D, D]."""
        D, streams = sum(self.sizes), self.noise.shape[0]
        H = -np.stack([self.move(row) for row in np.eye(D)], axis=1)
        roots = []
        for stream in range(streams):
            for element in range(D):
                noise = np.zeros((streams, D))
                noise[stream, element] = 1.0
                roots.append(self.move(np.zeros(D), noise))
        root = np.stack(roots, axis=1)
        return H, root @ root.T


def assert_matrices(actual, expected, what, rtol=1e-5):
    error = np.max(np.abs(actual - expected)) / max(np.max(np.abs(expected)), 1e-30)
    assert error < rtol, f"{what}: {error:.2e}\n{actual}\n{expected}"


def covariance_matrix(D=5, seed=0, spread=30.0):
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((D, D)))
    return (basis * np.geomspace(1.0, 1.0 / spread, D)) @ basis.T


def linear_noise(A, C, S):
    """Gradient of the mean loss A theta, with Gaussian noise N(0, C / S)."""
    root = np.linalg.cholesky(C / S)

    def gradient(theta, step):
        seed = tf.stack([tf.constant(5, tf.int64), tf.cast(step, tf.int64)])
        z = tf.random.stateless_normal(theta.shape, seed, alg="philox")
        value = tf.reshape(theta, (len(A), -1))
        noisy = tf.matmul(tf.constant(A, tf.float32), value)
        noisy += tf.matmul(tf.constant(root, tf.float32), tf.reshape(z, (len(A), -1)))
        return tf.reshape(noisy, theta.shape)

    return gradient


def whitened_data(N, D, seed=0):
    """[N, D] with mean 0 and covariance 1 (divisor N), exactly."""
    x = np.random.default_rng(seed).standard_normal((N, D))
    basis, _ = np.linalg.qr(x - x.mean(0))
    return np.sqrt(N) * basis


def minibatch_means(x, S):
    """Gradient of the mean of (theta - x_n)^2 / 2 over batches drawn with replacement."""

    def gradient(theta, step):
        seed = tf.stack([tf.constant(7, tf.int64), tf.cast(step, tf.int64)])
        rows = tf.random.stateless_uniform((S,), seed, maxval=len(x), dtype=tf.int32, alg="philox")
        return theta - tf.reduce_mean(tf.gather(tf.constant(x, tf.float32), rows), 0)

    return gradient


def assert_covariance(draws, expected, what, largest_error=0.02):
    """Draws [steps, D, chains] have the covariance `expected`, [D, D], and mean 0.

    The variances along its eigenvectors, and their mean relative to it, are within 4 standard
    errors, which come from the chains.
    """
    vectors = np.linalg.eigh(expected)[1]
    variances = np.einsum("ik,ij,jk->k", vectors, expected, vectors)
    along = np.einsum("ik,tic->tkc", vectors, draws.astype("float64")) ** 2
    products = along.mean(axis=0).T
    error = products.std(axis=0, ddof=1) / np.sqrt(len(products))
    assert_close(products.mean(axis=0), variances, error, f"{what}: variances")
    pooled = (products / variances).mean(axis=1)
    error = pooled.std(ddof=1) / np.sqrt(len(pooled))
    assert_close(pooled.mean(), 1.0, error, f"{what}: tr(P S) / D", largest_error=largest_error)


def sample(optimizer, expected, gradient, *, steps, keep_every, chains, skip=0, jit=True):
    """Draws [n, D, chains] from a run that starts at the stationary law, without the first.

    XLA takes longer to compile the factorisation of a matrix than the run takes without it.
    """
    z = np.random.default_rng(1).standard_normal((len(expected), chains))
    start = (np.linalg.cholesky(expected) @ z).astype("float32")
    return run(optimizer, start, gradient, steps=steps, keep_every=keep_every, jit=jit)[skip:]


def copies(C, form, chains):
    """C of independent chains, the columns of one variable [D, chains]."""
    if form == "full":
        return np.kron(C, np.eye(chains))
    return np.repeat(np.diag(C)[:, None], chains, axis=1)
