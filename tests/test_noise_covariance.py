"""The covariance of a batch, and its average over batches, against NumPy."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import assert_close

from keras_sgmcmc import noise_covariance
from keras_sgmcmc.per_example import Moments

SHAPES = [(2, 3), (4,), (2,)]
SIZES = [6, 4, 2]


def split(rows):
    """Rows of gradients as one array for each variable."""
    parts = np.split(rows, np.cumsum(SIZES)[:-1], axis=1)
    return [part.reshape(-1, *shape) for part, shape in zip(parts, SHAPES, strict=True)]


def moments(rows, blocks=None):
    """`Moments` of gradients [examples, parameters], by NumPy."""
    if blocks is None:
        second = [(part**2).sum(0) for part in split(rows)]
    else:
        second = []
        for block in blocks:
            parts = [part.reshape(len(rows), -1) for part in split(rows)]
            flat = np.concatenate([parts[i] for i in block], 1)
            second.append(flat.T @ flat)
    first = [part.sum(0) for part in split(rows)]
    counts = [len(rows)] * len(second)
    return Moments(list(map(tf.constant, first)), list(map(tf.constant, second)), counts, counts)


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    return 3 + rng.normal(size=(50, 12)) @ rng.normal(size=(12, 12))


def test_diagonal(rows):
    found = noise_covariance.estimate(moments(rows), None)
    assert [entry.shape for entry in found] == SHAPES
    flat = np.concatenate([np.ravel(entry) for entry in found])
    np.testing.assert_allclose(flat, rows.var(axis=0, ddof=1), rtol=1e-10)


@pytest.mark.parametrize("blocks", [[[0, 1, 2]], [[0, 1], [2]], [[1], [2, 0]]])
def test_matrices(rows, blocks):
    found = noise_covariance.estimate(moments(rows, blocks), blocks)
    parts = np.split(np.arange(12), np.cumsum(SIZES)[:-1])
    for entry, block in zip(found, blocks, strict=True):
        order = np.concatenate([parts[i] for i in block])
        np.testing.assert_allclose(entry, np.cov(rows.T)[np.ix_(order, order)], rtol=1e-8)


@pytest.mark.parametrize("group", [2, 3, 7])
def test_groups_are_unbiased_also_if_the_last_is_smaller(group):
    draws = 4000
    rng = np.random.default_rng(1)
    rows = 2 + rng.normal(size=(10, draws, 12)) * np.arange(1, 13)
    starts = range(0, 10, group)
    sums = np.stack([rows[s : s + group].sum(0) for s in starts])
    sizes = np.array([len(rows[s : s + group]) for s in starts])
    second = (sums**2 / sizes[:, None, None]).sum(0)
    found = Moments([tf.constant(rows.sum(0))], [tf.constant(second)], [10], [len(starts)])
    (estimates,) = noise_covariance.estimate(found, None)
    error = np.std(estimates, axis=0) / np.sqrt(draws)
    assert_close(np.mean(estimates, axis=0), np.arange(1, 13) ** 2.0, error, "variance", 0.05)


def test_rounding_leaves_no_negative_variance():
    rows = np.full((1000, 12), 0.1, "float32") * np.float32(1 / 3)
    found = noise_covariance.estimate(moments(rows), None)
    assert all(np.all(entry >= 0) for entry in found)


def running(decay=None):
    return noise_covariance.RunningCovariance([(2,)], ["float32"], decay)


def update(average, value, examples=10, valid=True, restart=False):
    rate = average.update(
        [tf.constant(value, "float32")], examples, tf.constant(valid), tf.constant(restart)
    )
    return float(rate)


def test_all_examples_count_the_same():
    average = running()
    rng = np.random.default_rng(0)
    values, sizes = rng.normal(size=(6, 2)), [10, 3, 20, 10, 10, 7]
    for value, examples in zip(values, sizes, strict=True):
        update(average, value, examples)
    expected = np.average(values, axis=0, weights=sizes)
    np.testing.assert_allclose(average.entries[0].numpy(), expected, rtol=1e-5)
    assert average.examples.numpy() == 60


def test_an_exponential_average():
    average = running(decay=0.75)
    expected = np.zeros(2)
    for step, value in enumerate(np.random.default_rng(0).normal(size=(20, 2)), 1):
        kappa = max(1 / step, 0.25)
        assert update(average, value) == pytest.approx(kappa)
        expected += kappa * (value - expected)
    np.testing.assert_allclose(average.entries[0].numpy(), expected, rtol=1e-5)


def test_what_is_not_valid_adds_nothing():
    average = running()
    update(average, [1.0, 2.0])
    for value in ([np.nan, np.inf], [5.0, 6.0]):
        assert update(average, value, valid=False) == 0
    np.testing.assert_array_equal(average.entries[0].numpy(), [1, 2])
    assert average.examples.numpy() == 10


@pytest.mark.parametrize("decay", [None, 0.9])
def test_a_restart_forgets(decay):
    average = running(decay)
    update(average, [1e6, 2e6])
    assert update(average, [3.0, 4.0], restart=True) == 1
    np.testing.assert_allclose(average.entries[0].numpy(), [3, 4])
    assert average.examples.numpy() == 10
    average.reset()
    update(average, [5.0, 6.0])
    np.testing.assert_allclose(average.entries[0].numpy(), [5, 6])


def test_examples_needed():
    needed = noise_covariance.examples_needed
    assert needed([(3, 4)], "diagonal", 1000) == 1000
    assert needed([(3, 4)], "diagonal", None) == 0
    assert needed([(3, 3), (7, 7)], "block", 1000) == 350
    assert needed([(940, 940)], "full", 10) == 47_000


def variables(*entries):
    return [keras.Variable(np.asarray(entry, "float32")) for entry in entries]


def test_trace_and_effective_rank():
    trace, rank = noise_covariance.trace, noise_covariance.effective_rank
    even = variables(np.ones((3, 2)), np.ones(4))
    assert trace(even, "diagonal") == 10
    assert rank(even, "diagonal") == pytest.approx(10)
    assert rank(variables([0, 5.0], [0.0]), "diagonal") == pytest.approx(1)
    assert rank(variables(np.ones((6, 6))), "full") == pytest.approx(1)
    matrices = [np.diag([1.0, 2.0]), np.array([[2.0, 1.0], [1.0, 2.0]])]
    assert trace(variables(*matrices), "block") == 7
    expected = 49 / sum(np.sum(matrix**2) for matrix in matrices)
    assert rank(variables(*matrices), "block") == pytest.approx(expected)
    # Squares of these are below the smallest number.
    assert rank(variables(np.full(8, 1e-30)), "diagonal") == pytest.approx(8)
    assert math.isnan(rank(variables(np.zeros(3)), "diagonal"))
