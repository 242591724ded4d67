"""The noise stream as a generator."""

import math
import re

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from keras_sgmcmc import random

EXTREME_WORDS = np.array([0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1], "uint32")


def modes(function):
    """`function` eagerly, in a graph and compiled."""
    return {
        "eager": function,
        "graph": tf.function(function),
        "jit": tf.function(function, jit_compile=True),
    }


def reference_words(shape, seed, step, stream):
    """pcg4d written out in NumPy."""
    with np.errstate(over="ignore"):
        size = int(np.prod(shape))
        u = np.uint32
        key = [np.full(size, value % 2**32, u) for value in (step, stream, seed)]
        x, y, z, w = (v * u(1664525) + u(1013904223) for v in (np.arange(size, dtype=u), *key))
        for last in (False, True):
            x = x + y * w
            y = y + z * x
            z = z + x * y
            w = w + y * z
            if not last:
                x, y, z, w = (v ^ (v >> u(16)) for v in (x, y, z, w))
    return w.reshape(shape), z.reshape(shape)


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (3, 5), (2, 3, 4, 5), (10_000,), (3, 5_001), (0, 3)]
)
def test_words_are_pcg4d_in_every_mode(shape):
    expected = reference_words(shape, seed=2**32 - 5, step=2**33 + 7, stream=3)
    for mode, function in modes(
        lambda step: random.words(shape, seed=2**32 - 5, step=step, stream=3)
    ).items():
        got = function(tf.constant(2**33 + 7, tf.int64))
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=mode)
            assert ours.dtype == tf.uint32


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_extreme_words_are_finite_and_right_in_every_mode(dtype):
    radius, angle = (grid.reshape(-1) for grid in np.meshgrid(EXTREME_WORDS, EXTREME_WORDS))
    u = (np.floor(radius / 2) + 0.5) * 2.0**-31
    s = angle.view("int32") * 2.0**-31
    expected = np.sqrt(-2 * np.log(u)) * np.sin(np.pi / 2 * s)
    # In float32 u is rounded to 24 bits, which moves the smallest radii by up to 2.5e-4.
    tolerance = 2.5e-4 if dtype == "float32" else 1e-9
    for mode, function in modes(
        lambda: random.normal_from_words(tf.constant(radius), tf.constant(angle), dtype)
    ).items():
        got = function().numpy()
        assert got.dtype == dtype
        assert np.all(np.isfinite(got)), mode
        np.testing.assert_allclose(got, expected, atol=tolerance, err_msg=mode)
    assert np.max(np.abs(expected)) > 6.6


def test_polynomials_are_as_exact_as_they_say():
    s = np.linspace(-1, 1, 100_001)
    error = s * random._polynomial(random._SINE, s * s) - np.sin(np.pi / 2 * s)
    assert np.abs(error).max() < 7e-9
    t = np.linspace(np.sqrt(0.5) - 1, np.sqrt(2) - 1, 100_001)
    error = t * random._polynomial(random._LOG, t) / -np.log1p(t) - 1
    assert np.abs(error[t != 0]).max() < 1.8e-7


def test_the_logarithm_is_right_to_rounding_and_never_negative():
    # Everywhere, and where u is close to 1.
    cells = np.concatenate([np.exp2(np.linspace(-1, 31, 200_001)), 2.0**31 - 128 * np.arange(1000)])
    cells = cells.astype("float32")
    expected = -2 * np.log(cells.astype("float64") * 2.0**-31)
    for mode, function in modes(lambda: random._minus_two_log(tf.constant(cells))).items():
        got = function().numpy()
        assert got.min() == 0, mode
        np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=mode)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normals_agree_between_modes_to_rounding(dtype):
    drawn = {
        mode: function().numpy()
        for mode, function in modes(
            lambda: random.normal((1000, 33), dtype, seed=1, step=2, stream=3)
        ).items()
    }
    tolerance = 5e-6 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(drawn["graph"], drawn["eager"], atol=tolerance)
    np.testing.assert_allclose(drawn["jit"], drawn["eager"], atol=tolerance)


def normals(size, **key):
    function = tf.function(
        lambda seed, step, stream: random.normal(
            (size,), "float32", seed=seed, step=step, stream=stream
        ),
        jit_compile=True,
    )
    return function(*(tf.constant(key.get(k, 0), tf.int64) for k in ("seed", "step", "stream")))


def test_moments_and_distribution():
    z = np.asarray(normals(4_000_000, seed=11, step=5, stream=2), dtype="float64")
    n = len(z)
    # Standard errors of the moments of n standard normals, Var z^k = E z^2k - (E z^k)^2.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = np.sqrt(variance / n)
        assert abs(np.mean(z**power) - mean) < 4 * error, power
    assert scipy.stats.kstest(z[:1_000_000], "norm").pvalue > 1e-4


def test_neighbours_are_uncorrelated():
    """Neighbouring elements, steps, variables and seeds; also of the squares (variances)."""
    n = 1_000_000
    base = np.asarray(normals(n, seed=3, step=10, stream=4))
    others = {
        "step": normals(n, seed=3, step=11, stream=4),
        "stream": normals(n, seed=3, step=10, stream=5),
        "seed": normals(n, seed=4, step=10, stream=4),
        "step and stream swapped": normals(n, seed=3, step=4, stream=10),
    }
    others |= {f"element + {lag}": np.roll(base, lag) for lag in (1, 2, 3, 4, 8, 64, 256, 4096)}
    for name, other in others.items():
        other = np.asarray(other)
        assert abs(np.mean(base * other)) < 4 / np.sqrt(n), name
        assert abs(np.mean((base**2 - 1) * (other**2 - 1))) < 4 * 2 / np.sqrt(n), name


def test_no_two_of_1000_streams_correlate():
    n = 10_000
    draw = tf.function(
        lambda step, stream: random.normal((n,), "float32", seed=123, step=step, stream=stream),
        jit_compile=True,
    )
    z = np.stack(
        [
            draw(tf.constant(step), tf.constant(stream)).numpy()
            for step in range(100)
            for stream in range(10)
        ]
    )
    for values in (z, z**2):
        values = (values - values.mean(1, keepdims=True)) / values.std(1, keepdims=True)
        correlation = values @ values.T / n
        np.fill_diagonal(correlation, 0)
        # 6 standard errors: the largest of 499,500 independent ones is about 4.9.
        assert np.abs(correlation).max() < 6 / np.sqrt(n)
    # The mean and the variance of each stream, as a set: chi-square of 1000.
    for statistic in (z.mean(1) * np.sqrt(n), (z.var(1) - 1) * np.sqrt(n / 2)):
        assert abs((statistic**2).sum() - 1000) < 4 * np.sqrt(2 * 1000)


@pytest.mark.parametrize("shape", [(1_000_000,), (1000, 1000), (100_000, 10)])
def test_compiled_counter_holds_no_long_constant(shape):
    # It would be 4 bytes for every weight of the model, and read from memory at every step.
    function = tf.function(
        lambda step: random.normal(shape, "float32", seed=1, step=step, stream=0),
        jit_compile=True,
    )
    step = tf.constant(1, tf.int64)
    assert function.get_concrete_function(step).graph.as_graph_def().ByteSize() < 100_000
    for stage in ("hlo", "optimized_hlo"):
        text = function.experimental_get_compiler_ir(step)(stage=stage)
        assert "u32[" in text
        sizes = re.findall(r"u32\[([\d,]+)\]\S* constant", text)
        assert all(math.prod(map(int, size.split(","))) <= 4096 for size in sizes), sizes


def test_draw_seed_follows_set_random_seed():
    keras.utils.set_random_seed(5)
    first = random.draw_seed()
    second = random.draw_seed()
    keras.utils.set_random_seed(5)
    assert random.draw_seed() == first != second
