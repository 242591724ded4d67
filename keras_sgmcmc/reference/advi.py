"""Mean-field variational inference with reparameterised gradients."""

import math

import numpy as np
import tensorflow as tf

from keras_sgmcmc import random
from keras_sgmcmc.posterior import Posterior
from keras_sgmcmc.reference.potential import (
    Potential,
    check_bytes,
    compile_or_trace,
    progress_bar,
    random_keys,
)
from keras_sgmcmc.validation import positive_integer, real_number

# Optimization steps that one call makes.
_BLOCK = 100

_INITIAL_STD = 0.01

# Adam's constants (Kingma & Ba 2015).
_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8


class MeanFieldPosterior(Posterior):
    """The `Posterior` that `advi` returns: independent draws of N(mean, diag(std)^2).

    Attributes:
        mean: Dict: path of a variable -> means of its elements.
        std: Dict: path of a variable -> standard deviations of its elements.
        elbo: The estimate of the evidence lower bound at every step, in nats, shape (steps,).
    """

    def __init__(self, model, variables, draws, steps, mean, std, elbo):
        super().__init__(model, variables, draws, steps)
        self.mean = mean
        self.std = std
        self.elbo = elbo


def advi(
    model,
    x,
    y=None,
    *,
    prior="optimizer",
    sample_weight=None,
    temperature=1.0,
    steps=5000,
    learning_rate=0.02,
    monte_carlo_samples=10,
    draws=1000,
    seed=None,
    jit_compile="auto",
    verbose="auto",
):
    """The Gaussian q = N(m, diag(s)^2) that is closest to exp(-U(theta) / T) in KL(q || p).

        ELBO(m, s) = E_z[-U(m + s z) / T] + sum_i log s_i + D/2 log(2 pi e),    z ~ N(0, I)

    is maximised over m and log s by Adam on reparameterised gradients, whose z come in pairs
    (z, -z). The learning rate is constant for the first half and then falls linearly to 0. Over
    this second half m and log s are averaged, which leaves little of the gradients' noise. If the
    loss is a normalised -log density and T = 1, the ELBO bounds the log evidence log p(y | x) from
    below.

    Mean-field variances are too small where weights are correlated: for a Gaussian posterior of
    precision matrix P they are 1/P_ii rather than (P^-1)_ii.

    Args:
        model, x, y, prior, sample_weight, temperature, seed, jit_compile, verbose: As for
            `keras_sgmcmc.reference.hmc`.
        steps: Optimization steps. Defaults to 5000.
        learning_rate: Adam's step in m (the weights' units) and in log s. Defaults to 0.02.
        monte_carlo_samples: Even number of z in an estimate of the gradient. Defaults to 10.
        draws: Draws from q. Defaults to 1000.

    Returns:
        `MeanFieldPosterior`: a `Posterior` of draws from q, with `mean`, `std` and `elbo`.

    Raises:
        ValueError: As for `hmc`, or if `monte_carlo_samples` is odd.
        FloatingPointError: If the ELBO stops being finite.

    Reference:
        A. Kucukelbir et al., "Automatic differentiation variational inference", JMLR 18, 2017,
        with Adam for its step sizes and without transformations, as weights are unconstrained.

    Example:

    >>> approximate = sg.reference.advi(model, x_train, y_train, prior=1.0)
    >>> plt.plot(approximate.elbo)
    """
    temperature = real_number("temperature", temperature, positive=True)
    steps = positive_integer("steps", steps)
    learning_rate = real_number("learning_rate", learning_rate, positive=True)
    samples = positive_integer("monte_carlo_samples", monte_carlo_samples, minimum=2)
    if samples % 2:
        raise ValueError(
            "`monte_carlo_samples` should be even, since samples come in pairs (z, -z). "
            f"Received: monte_carlo_samples={samples}"
        )
    draws = positive_integer("draws", draws)
    seed = random.as_seed(seed)
    potential = Potential(model, x, y, sample_weight, prior, temperature)
    check_bytes(potential, draws)
    key = tf.constant(np.uint32(seed).view("int32"))
    advance = compile_or_trace(potential, _ascend(potential, samples // 2, steps), jit_compile)
    size, dtype = potential.size, potential.dtype
    parameters = tf.concat(
        [potential.start, tf.fill((size,), tf.constant(math.log(_INITIAL_STD), dtype))], axis=0
    )
    state = [parameters, *(tf.zeros_like(parameters) for _ in range(3))]
    rate = tf.constant(learning_rate, dtype)
    bar = progress_bar(steps, verbose, "step")
    elbo = []
    for first in range(0, steps, _BLOCK):
        count = min(_BLOCK, steps - first)
        state, block = advance(
            state, rate, tf.constant(first), tf.constant(count), key, potential.data
        )
        elbo.append(block.numpy()[:count])
        bar.add(count)
        if not np.all(np.isfinite(elbo[-1])):
            raise FloatingPointError(
                f"The ELBO is not finite within steps {first} to {first + count}. Use a smaller "
                f"`learning_rate`. Received: learning_rate={learning_rate:g}"
            )
    mean, log_std = np.split(state[3].numpy(), 2)
    std = np.exp(log_std)
    z = np.random.default_rng(seed).standard_normal((draws, size))
    return MeanFieldPosterior(
        model,
        potential.variables,
        zip(*potential.arrays(mean + std * z), strict=True),
        np.arange(1, draws + 1),
        potential.named(mean),
        potential.named(std),
        np.concatenate(elbo),
    )


def _ascend(potential, pairs, steps):
    """The function that makes a block of steps of Adam on (m, log s)."""
    size, dtype = potential.size, potential.dtype
    entropy = 0.5 * size * math.log(2.0 * math.pi * math.e)

    def elbo_and_gradient(parameters, key, data):
        z = tf.random.stateless_normal((pairs, size), key, dtype=dtype, alg="philox")
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(parameters)
            mean, log_std = tf.split(parameters, 2)
            spread = tf.exp(log_std) * z
            theta = mean + tf.concat([spread, -spread], axis=0)
            elbo = tf.reduce_mean(potential.log_prob(theta, data)) + tf.reduce_sum(log_std)
        return elbo + entropy, tape.gradient(elbo, parameters)

    def advance(state, rate, first, count, seed, data):
        def body(i, parameters, mean, square, average, history):
            step = first + i
            key = random_keys(1, seed, step)[0]
            elbo, gradient = elbo_and_gradient(parameters, key, data)
            mean = _BETA_1 * mean + (1.0 - _BETA_1) * gradient
            square = _BETA_2 * square + (1.0 - _BETA_2) * tf.square(gradient)
            t = tf.cast(step + 1, dtype)
            unbiased = mean / (1.0 - _BETA_1**t), square / (1.0 - _BETA_2**t)
            left = tf.minimum(tf.ones((), dtype), 2.0 * (1.0 - tf.cast(step, dtype) / steps))
            parameters += rate * left * unbiased[0] / (tf.sqrt(unbiased[1]) + _EPSILON)
            averaged = tf.cast(tf.maximum(step - steps // 2, 0) + 1, dtype)
            average += (parameters - average) / averaged
            return i + 1, parameters, mean, square, average, history.write(i, elbo)

        history = tf.TensorArray(dtype, size=_BLOCK, element_shape=())
        _, *state, history = tf.while_loop(
            lambda i, *_: i < count,
            body,
            (tf.constant(0), *state, history),
            parallel_iterations=1,
        )
        return state, history.stack()

    return advance
