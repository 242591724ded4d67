"""Runs a sampler on a gradient that is written down, fast enough for variances to 2 %."""

import keras
import numpy as np
import tensorflow as tf


def run(optimizer, start, gradient, *, steps, keep_every, jit=True):
    """Draws [steps / keep_every, *shape] of one variable that starts at `start`.

    gradient: function of (theta, step) -> gradient of the mean loss. The steps between two draws
    run as one loop inside one `tf.function`; `jit` compiles the loop, the optimizer included.
    """
    variable = keras.Variable(start, name="theta")
    optimizer.build([variable])

    @tf.function(jit_compile=jit, autograph=False)
    def block():
        def body(i):
            optimizer.apply([gradient(tf.convert_to_tensor(variable), optimizer.iterations)])
            return i + 1

        tf.while_loop(lambda i: i < keep_every, body, [0])

    draws = []
    for _ in range(steps // keep_every):
        block()
        draws.append(np.array(variable.numpy()))
    return np.stack(draws)


def assert_close(estimate, expected, standard_error, what, largest_error=None):
    """`estimate` within 4 standard errors; and the standard error small enough to see a fault."""
    estimate, expected = np.asarray(estimate), np.asarray(expected)
    if largest_error is not None:
        relative = np.max(standard_error / np.abs(expected))
        assert relative <= largest_error, f"{what}: standard error {relative:.3%} sees nothing"
    z = (estimate - expected) / standard_error
    assert np.all(np.abs(z) <= 4), (
        f"{what}: {estimate} for {expected}, {z} standard errors of {standard_error}"
    )
