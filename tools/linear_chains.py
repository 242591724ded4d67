"""Chains of linear and logistic regression through `fit`, and the moments of all their iterates.

What the reproductions of the papers' linear experiments share.
"""

import time

import keras
import numpy as np
import scipy.linalg
import tensorflow as tf

import keras_sgmcmc as sg


class Moments(sg.callbacks.InGraphCallback):
    """Sums of u = W (theta - mode) and of u u' over every step after `begin`, a block an epoch.

    W is the inverse Cholesky factor of the reference's covariance, so that u has mean 0 and
    covariance 1 if the chain samples the reference.
    """

    def __init__(self, mode, covariance, begin):
        super().__init__()
        self.mode, self.begin = mode, begin
        self.root = np.linalg.cholesky(covariance)
        self.whitening = scipy.linalg.solve_triangular(self.root, np.eye(len(mode)), lower=True)
        self.blocks, self.times = [], []

    def create_state(self):
        size = len(self.mode)
        shapes = ((), (size,), (size, size))
        self.sums = [
            keras.Variable(np.zeros(shape), dtype="float64", trainable=False) for shape in shapes
        ]

    def wrap(self, step):
        def wrapped(data):
            logs = step(data)
            weights = [tf.reshape(v, [-1]) for v in self.model.trainable_variables]
            theta = tf.cast(tf.concat(weights, 0), "float64")
            u = tf.linalg.matvec(self.whitening, theta - self.mode)
            counts = tf.cast(tf.convert_to_tensor(self.optimizer.iterations) > self.begin, u.dtype)
            for total, value in zip(self.sums, (1.0, u, u[:, None] * u[None, :]), strict=True):
                total.assign_add(counts * value)
            return logs

        return wrapped

    def on_epoch_end(self, epoch, logs=None):
        count, first, second = (total.numpy() for total in self.sums)
        for total in self.sums:
            total.assign(tf.zeros_like(total))
        self.times.append(time.perf_counter())
        self.blocks.append((count, first, second))

    @property
    def seconds_per_step(self):
        """Wall time of a step, without the first epoch, in which everything is compiled."""
        per_epoch = np.diff(self.times).mean()
        return per_epoch / self.params["steps"]

    def whitened(self, blocks=None):
        """Mean and covariance of u over the first `blocks` epochs; None is all."""
        count, first, second = (sum(part) for part in zip(*self.blocks[:blocks], strict=True))
        mean = first / count
        return mean, second / count - np.outer(mean, mean)

    def moments(self, blocks=None):
        """Mean and covariance of theta over the first `blocks` epochs; None is all."""
        mean, covariance = self.whitened(blocks)
        return self.mode + self.root @ mean, self.root @ covariance @ self.root.T

    def effective(self):
        """Effective numbers of draws for means and for variances: of u, by batch means."""
        counts = np.array([block[0] for block in self.blocks])
        whole = counts == counts.max()
        means = np.array([block[1] for block in self.blocks])[whole] / counts.max()
        squares = np.array([np.diag(block[2]) for block in self.blocks])[whole] / counts.max()
        _, covariance = self.whitened()
        variance = np.diag(covariance)
        n_mean = len(means) * variance / means.var(0, ddof=1)
        n_cov = len(means) * 2 * variance**2 / squares.var(0, ddof=1)
        return 1 / np.mean(1 / n_mean), 1 / np.mean(1 / n_cov)

    @property
    def count(self):
        return int(sum(block[0] for block in self.blocks))


LOSSES = {
    "linear": lambda: sg.GaussianNegativeLogLikelihood(1.0),
    "logistic": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
}


def linear_model(kind, width, optimizer, steps_per_execution=1000):
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer=optimizer, loss=LOSSES[kind](), steps_per_execution=steps_per_execution)
    return model


def sample(
    model,
    x,
    y,
    moments,
    *,
    batch_size,
    steps,
    start=None,
    noise_every=20,
    block=None,
    seed=7,
    extra=(),
):
    """Run a chain of `steps` steps after `moments.begin` through `fit`; fills `moments`.

    `start` is the weights' first value, `block` the number of steps of an epoch,
    `extra` further callbacks.
    """
    optimizer = model.optimizer
    if start is not None:
        model.set_weights([np.reshape(start, (-1, 1))])
    callbacks = [moments, *extra]
    if optimizer.uses_batch_noise:
        callbacks.insert(0, sg.callbacks.GradientNoise(every=noise_every))
    block = block or 1000 * max(1, steps // 200_000)
    data = sg.minibatches(x, y.reshape(-1, 1), batch_size, seed=seed, steps=block)
    epochs = -(-(moments.begin + steps) // block)
    model.fit(data, epochs=epochs, callbacks=callbacks, verbose=0, shuffle=False)
