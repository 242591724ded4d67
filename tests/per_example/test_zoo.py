"""Models of many kinds: closed form = general way = plain loop = NumPy."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from per_example import zoo

from keras_sgmcmc.noise_covariance import estimate
from keras_sgmcmc.per_example import PerExampleGradients

# What has no closed form: (number of variables, a part of the reason).
NO_LAYER = "its layer has no closed form"
OUTSIDE = "it is used outside its layer's call"
NOT_BATCH = "is called on something that isn't the batch"
GENERAL = {
    "lstm_unrolled": (3, NO_LAYER),
    "gru_masked": (3, NO_LAYER),
    "simple_rnn": (3, NO_LAYER),
    "depthwise": (5, NO_LAYER),
    "own_weight": (1, NO_LAYER),
    "masked_sequence": (3, "the loss is masked"),
    "tied_weights": (1, OUTSIDE),
    "in_function": (2, OUTSIDE),
    "in_loop": (2, OUTSIDE),
    "folded_batch": (2, NOT_BATCH),
    "moved_batch": (2, NOT_BATCH),
}
# Where all has closed forms and yet the backward pass of the training step can't serve: layers that
# behave differently in training, or functions whose graphs can't be compared.
NOT_SHARED = {
    "attention_dropout",
    "normalizations",
    "batch_normalization",
    "dropout",
    "convolution_grouped",
}
CHEAP = [
    "dense",
    "dense_positions",
    "regularized",
    "shared_layer",
    "two_outputs",
    "convolution",
    "embedding",
    "batch_normalization",
]


def flat(tensors):
    return np.concatenate([np.ravel(tensor.numpy()) for tensor in tensors])


def assert_equal(found, expected, tolerance, scale=None):
    scale = np.abs(expected).max() if scale is None else scale
    assert np.abs(found - expected).max() <= tolerance * scale


def moments(estimator, x, y, graph=False):
    """`Moments` and the errors of the closed forms.

    A graph is what trains; to make one takes two or three times as long as the operations alone.
    """
    data = tf.nest.map_structure(tf.constant, (x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # see test_taps.py
        estimator.plan(data)
    found = tf.function(estimator.moments, autograph=False) if graph else estimator.moments
    return found(data), estimator.verify(data)


def check(estimator, model, x, y, tolerance, graph=False):
    """First and second moments, in any structure, against the plain loop."""
    gradients = zoo.loop(model, x, y)
    found, errors = moments(estimator, x, y, graph)
    # A sum may vanish where its terms don't.
    assert_equal(flat(found.first), gradients.sum(0), tolerance, np.abs(gradients).max())
    assert errors.numpy().max() <= max(10 * tolerance, 1e-12)
    assert errors.shape == (len(model.trainable_variables),)
    if estimator.structure == "diagonal":
        assert_equal(flat(found.second), (gradients**2).sum(0), tolerance)
        for second, variable in zip(found.second, model.trainable_variables, strict=True):
            assert second.shape == variable.shape
    else:
        products, start = gradients.T @ gradients, 0
        for second, shape in zip(found.second, estimator.shapes, strict=True):
            assert second.shape == shape
            stop = start + shape[0]
            assert_equal(second.numpy(), products[start:stop, start:stop], tolerance)
            start = stop
        assert start == len(products)
    rows = len(gradients)
    entries = len(found.second)
    assert list(map(int, found.examples)) == [rows] * entries
    assert list(map(int, found.groups)) == [rows] * entries


@pytest.mark.parametrize("name", zoo.ZOO)
def test_moments_equal_a_plain_loop(name):
    model, x, y = zoo.make(name)
    estimator = PerExampleGradients(model)
    data = tf.nest.map_structure(tf.constant, (x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = estimator.plan(data)
    count, reason = GENERAL.get(name, (0, ""))
    assert len(plan.general) == len(plan.reasons) == count, plan.reasons
    assert all(reason in found for found in plan.reasons.values())
    assert len(plan.closed) + count == len(model.trainable_variables)
    assert plan.shared == (count == 0 and name not in NOT_SHARED)
    assert (plan.mode is None) == (count == 0)
    check(estimator, model, x, y, 1e-5, graph=True)


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "vectorized") for name in CHEAP), ("convolution", "loop")],
)
def test_the_general_way_equals_a_plain_loop(name, mode):
    model, x, y = zoo.make(name)
    estimator = PerExampleGradients(model)
    estimator.reject(dict.fromkeys(range(len(model.trainable_variables)), "test"))
    plan = estimator.plan(tf.nest.map_structure(tf.constant, (x, y)))
    assert plan.closed == []
    assert set(plan.reasons.values()) == {"test"}
    assert plan.mode == ("graph" if name == "convolution" else "xla")
    if mode == "loop":
        plan.mode = "loop"
    check(estimator, model, x, y, 1e-5)


@pytest.mark.parametrize("name", ["dense_positions", "shared_layer", "convolution"])
def test_part_of_a_model_goes_the_general_way(name):
    """A variable goes its own way, whatever the others of its layer do."""
    model, x, y = zoo.make(name)
    estimator = PerExampleGradients(model, "full")
    estimator.reject({0: "test", 3 % len(model.trainable_variables): "test"})
    check(estimator, model, x, y, 1e-5)


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("dense", "block"),
        ("shared_convolution", "full"),
        ("two_outputs", "block"),
        ("two_outputs", "full"),
        ("convolution_1d_causal", "full"),
        ("embedding", "full"),
        ("attention", "block"),
        ("normalizations", "block"),
        ("own_weight", "full"),
    ],
)
def test_matrices_equal_numpy(name, structure):
    model, x, y = zoo.make(name)
    estimator = PerExampleGradients(model, structure)
    assert len(estimator.shapes) == (1 if structure == "full" else len(estimator.blocks))
    check(estimator, model, x, y, 1e-5)


@pytest.fixture
def in_float64():
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy("float32")


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "dense_positions",
        "shared_layer",
        "convolution_dilated",
        "embedding",
        "einsum",
        "normalizations",
        "own_weight",
    ],
)
def test_double_precision(name):
    model, x, y = zoo.make(name)
    assert {variable.dtype for variable in model.trainable_variables} == {"float64"}
    check(PerExampleGradients(model), model, x, y, 1e-10)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", ["dense", "convolution"])
def test_double_precision_of_the_general_way_and_of_matrices(name):
    model, x, y = zoo.make(name)
    estimator = PerExampleGradients(model, "full")
    estimator.reject({0: "test"})
    check(estimator, model, x, y, 1e-10)


def test_a_full_matrix_of_940_parameters_over_a_batch_of_2000():
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(30, "tanh"), keras.layers.Dense(10)]
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(2000, width)).astype("float32") for width in (20, 10))
    estimator = PerExampleGradients(model, "full")
    assert estimator.shapes == [(940, 940)]
    found, _ = moments(estimator, x, y)
    # Backpropagation written down, in double precision.
    kernel, bias, out, offset = (v.numpy().astype("float64") for v in model.trainable_variables)
    hidden = np.tanh(x @ kernel + bias)
    output = (hidden @ out + offset - y) * 2 / 10
    delta = output @ out.T * (1 - hidden**2)
    parts = [x[:, :, None] * delta[:, None], delta, hidden[:, :, None] * output[:, None], output]
    gradients = np.concatenate([part.reshape(2000, -1) for part in parts], 1)
    assert_equal(found.second[0].numpy(), gradients.T @ gradients, 1e-5)
    (covariance,) = estimate(found, estimator.blocks)
    assert_equal(covariance.numpy(), np.cov(gradients.T), 1e-4)
