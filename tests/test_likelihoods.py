"""Losses as densities: closed forms from scipy, and refusals."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import losses
from scipy import special, stats

from keras_sgmcmc.likelihoods import (
    Bernoulli,
    Categorical,
    MeanAbsoluteError,
    MeanSquaredError,
    align,
    compiled_likelihoods,
    likelihood,
)
from keras_sgmcmc.losses import GaussianNegativeLogLikelihood


def rows(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


LABELS = np.array([0, 2, 1, 2])


class HalfWidth(losses.Loss):
    """Stands for a loss with methods of its own: y ~ N(f_0, f_1^2) from outputs (f_0, f_1)."""

    def log_prob(self, y_true, y_pred):
        z = (y_true - y_pred[:, 0]) / y_pred[:, 1]
        return -0.5 * z**2 - keras.ops.log(y_pred[:, 1]) - 0.5 * np.log(2 * np.pi)

    def predictive_mean(self, y_pred):
        return y_pred[:, 0]

    def predictive_variance(self, y_pred):
        return y_pred[:, 1] ** 2

    def call(self, y_true, y_pred):
        return -self.log_prob(y_true, y_pred)


@pytest.mark.parametrize(
    "loss",
    [
        losses.SparseCategoricalCrossentropy(from_logits=True),
        losses.CategoricalCrossentropy(from_logits=True),
    ],
)
@pytest.mark.parametrize("target", ["labels", "column", "one_hot"])
def test_categorical_logits(loss, target):
    logits = rows(4, 3)
    y = {"labels": LABELS, "column": LABELS[:, None], "one_hot": np.eye(3)[LABELS]}[target]
    density = likelihood(loss, 3)
    log_p = special.log_softmax(logits.astype("float64"), axis=-1)
    got = density.log_prob(tf.constant(y), tf.constant(logits))
    np.testing.assert_allclose(got, log_p[range(4), LABELS], rtol=1e-5)
    p = np.exp(log_p)
    np.testing.assert_allclose(density.mean(tf.constant(logits)), p, rtol=1e-5)
    np.testing.assert_allclose(density.variance(tf.constant(logits)), p * (1 - p), rtol=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        "sparse_categorical_crossentropy",
        "SparseCategoricalCrossentropy",
        "ce",
        losses.categorical_crossentropy,
        losses.CategoricalCrossentropy,
    ],
)
def test_categorical_probabilities(loss):
    p = special.softmax(rows(4, 3), axis=-1)
    density = likelihood(loss, 3)
    assert type(density) is Categorical
    got = density.log_prob(tf.constant(LABELS), tf.constant(p))
    np.testing.assert_allclose(got, np.log(p[range(4), LABELS]), rtol=1e-5)
    np.testing.assert_array_equal(density.mean(tf.constant(p)), p)


def test_classes_of_several_positions_are_summed():
    logits, y = rows(2, 5, 3), np.arange(10).reshape(2, 5) % 3
    density = likelihood(losses.SparseCategoricalCrossentropy(from_logits=True), 3)
    log_p = special.log_softmax(logits, axis=-1)
    want = np.take_along_axis(log_p, y[..., None], axis=-1).sum((1, 2))
    got = density.log_prob(tf.constant(y), tf.constant(logits))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("from_logits", [True, False])
def test_bernoulli_sums_independent_outputs(from_logits):
    logits, y = rows(4, 2), np.array([[0, 1], [1, 1], [0, 0], [1, 0]])
    p = special.expit(logits)
    outputs = logits if from_logits else p
    density = likelihood(losses.BinaryCrossentropy(from_logits=from_logits), 2)
    want = stats.bernoulli.logpmf(y, p).sum(-1)
    np.testing.assert_allclose(density.log_prob(tf.constant(y), outputs), want, rtol=1e-5)
    np.testing.assert_allclose(density.mean(tf.constant(outputs)), p, rtol=1e-6)
    np.testing.assert_allclose(density.variance(tf.constant(outputs)), p * (1 - p), rtol=1e-5)


def test_bernoulli_takes_labels_without_the_last_axis_and_never_broadcasts():
    logits, y = rows(4, 1), np.array([0, 1, 1, 0])
    density = likelihood(losses.BinaryCrossentropy(from_logits=True), 1)
    want = stats.bernoulli.logpmf(y, special.expit(logits[:, 0]))
    got = density.log_prob(tf.constant(y), tf.constant(logits))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    with pytest.raises(ValueError, match="not broadcast"):
        density.log_prob(tf.constant(y), tf.constant(rows(4, 2)))


@pytest.mark.parametrize("shape", [(4, 1), (4, 3), (4, 3, 2)])
@pytest.mark.parametrize("loss", ["mse", losses.MeanSquaredError(), losses.mean_squared_error])
def test_mse_is_a_gaussian_of_variance_half_the_outputs(loss, shape):
    y, f = rows(*shape, seed=1), rows(*shape)
    d = np.prod(shape[1:])
    want = stats.norm.logpdf(y, f, np.sqrt(d / 2)).reshape(4, -1).sum(-1)
    density = likelihood(loss, shape[-1])
    assert type(density) is MeanSquaredError
    np.testing.assert_allclose(density.log_prob(tf.constant(y), tf.constant(f)), want, rtol=1e-5)
    np.testing.assert_allclose(density.variance(tf.constant(f)), np.full(shape, d / 2), rtol=1e-6)
    # -log p differs from the loss by a constant only: it is the density that was trained on.
    trained = np.mean((y - f) ** 2, axis=tuple(range(1, len(shape))))
    assert np.ptp(want + trained) < 1e-5


@pytest.mark.parametrize("loss", ["mae", losses.MeanAbsoluteError()])
def test_mae_is_a_laplace_of_scale_the_outputs(loss):
    y, f = rows(4, 3, seed=1), rows(4, 3)
    density = likelihood(loss, 3)
    assert type(density) is MeanAbsoluteError
    want = stats.laplace.logpdf(y, f, 3).sum(-1)
    np.testing.assert_allclose(density.log_prob(tf.constant(y), tf.constant(f)), want, rtol=1e-5)
    want = np.full((4, 3), stats.laplace(scale=3).var())
    np.testing.assert_allclose(density.variance(tf.constant(f)), want, rtol=1e-6)


def test_number_of_outputs_may_be_unknown_until_the_graph_runs():
    y, f = rows(4, 3, 2, seed=1), rows(4, 3, 2)
    density = likelihood("mse", 2)
    spec = tf.TensorSpec((None, None, 2))
    got = tf.function(density.log_prob, input_signature=[spec, spec], autograph=False)(y, f)
    want = stats.norm.logpdf(y, f, np.sqrt(3)).reshape(4, -1).sum(-1)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_gaussian_loss_states_its_own_density():
    y, f = rows(4, 2, seed=1), rows(4, 2)
    density = likelihood(GaussianNegativeLogLikelihood([0.3, 2.0]), 2)
    want = stats.norm.logpdf(y, f, [0.3, 2.0]).sum(-1)
    np.testing.assert_allclose(density.log_prob(tf.constant(y), tf.constant(f)), want, rtol=1e-5)
    variance = density.variance(tf.constant(f))
    np.testing.assert_allclose(variance, np.tile([0.09, 4.0], (4, 1)), rtol=1e-5)
    np.testing.assert_array_equal(density.outputs(f), f)


def test_own_loss_whose_outputs_are_parameters():
    outputs = np.abs(rows(4, 2))
    density = likelihood(HalfWidth(), 2)
    np.testing.assert_array_equal(density.mean(outputs), outputs[:, 0])
    np.testing.assert_array_equal(density.variance(outputs), outputs[:, 1] ** 2)
    with pytest.raises(ValueError, match="cannot be given to it"):
        density.outputs(outputs[:, 0])


def test_own_loss_without_a_mean():
    loss = HalfWidth()

    def no_mean(y_pred):
        raise NotImplementedError

    loss.predictive_mean = no_mean
    with pytest.raises(ValueError, match="OneHotCategorical"):
        likelihood(loss, 2).mean(np.ones((4, 2)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_outputs_inverts_the_mean_at_the_extremes(dtype):
    p = np.array([[0.0, 1.0], [0.25, 0.75]], dtype)
    logits = Categorical(from_logits=True).outputs(p)
    np.testing.assert_allclose(special.softmax(logits, axis=-1), p, atol=1e-7)
    logits = Bernoulli(from_logits=True).outputs(p)
    assert np.all(np.isfinite(logits))
    np.testing.assert_allclose(special.expit(logits), p, atol=1e-7)
    assert Categorical(from_logits=False).outputs(p) is p
    assert Bernoulli(from_logits=False).outputs(p) is p


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (losses.CategoricalCrossentropy(label_smoothing=0.1), "label_smoothing=0.1 is no density"),
        (losses.SparseCategoricalCrossentropy(ignore_class=0), "ignore_class=0 is no density"),
        (losses.BinaryFocalCrossentropy(), "BinaryFocalCrossentropy.*GaussianNegativeLog"),
        ("huber", "huber.*NegativeLogLikelihood"),
        (lambda y, f: f, "lambda.*NegativeLogLikelihood"),
        (["mse", "mae"], "several losses"),
        (None, "has no loss"),
    ],
)
def test_no_density_is_refused_with_the_remedy(loss, message):
    density = likelihood(loss, 3)
    with pytest.raises(ValueError, match=message):
        density.variance(tf.zeros((4, 3)))
    if loss is not None:
        with pytest.raises(ValueError, match=message):
            density.log_prob(tf.zeros((4, 3)), tf.zeros((4, 3)))


def test_an_output_without_a_loss_adds_nothing():
    got = likelihood(None, 3).log_prob(None, tf.ones((4, 3)))
    np.testing.assert_array_equal(got, np.zeros(4))


def test_classes_must_be_last():
    with pytest.raises(ValueError, match="last axis"):
        likelihood(losses.CategoricalCrossentropy(axis=1), 3)


def test_logits_of_losses_without_a_density():
    logits = rows(4, 3)
    softmax, sigmoid = special.softmax(logits, axis=-1), special.expit(logits)
    cases = [
        (losses.CategoricalFocalCrossentropy(from_logits=True), softmax),
        (losses.BinaryFocalCrossentropy(from_logits=True), sigmoid),
        (losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1), softmax),
        (losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1), sigmoid),
        ("huber", logits),
    ]
    for loss, want in cases:
        got = likelihood(loss, 3).mean(tf.constant(logits))
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=str(loss))


def test_compiled_likelihoods_of_several_outputs():
    a = keras.Input((2,))
    outputs = [keras.layers.Dense(3, name="kind")(a), keras.layers.Dense(1, name="size")(a)]
    model = keras.Model(a, outputs)
    by_name = {"size": "mse", "kind": losses.SparseCategoricalCrossentropy(from_logits=True)}
    for loss in (by_name, [by_name["kind"], "mse"]):
        model.compile(loss=loss)
        kind, size = compiled_likelihoods(model, model.output)
        assert type(kind) is Categorical
        assert kind.from_logits
        assert type(size) is MeanSquaredError
    kind, size = compiled_likelihoods(model, model.output, from_logits=False)
    assert not kind.from_logits
    model.compile(loss={"size": "mse"})
    np.testing.assert_array_equal(
        compiled_likelihoods(model, model.output)[0].mean(tf.ones((1, 3))), np.ones((1, 3))
    )
    model.compile(loss="mse")
    with pytest.raises(ValueError, match="no logits"):
        compiled_likelihoods(model, model.output, from_logits=True)
    model.compile(loss={"weight": "mse"})
    with pytest.raises(ValueError, match=r"kind.*Received.*weight"):
        compiled_likelihoods(model, model.output)


def test_align_follows_the_order_of_flatten():
    outputs = {"b": 0, "a": [1, 2]}
    assert align({"b": "x", "a": ["y", "z"]}, outputs) == ["y", "z", "x"]
    assert align([["y", "z"], "x"], outputs) == ["y", "z", "x"]
    assert align("one", outputs) == ["one"] * 3
    assert align({"q": "x"}, 0) == ["x"]
    with pytest.raises(ValueError, match=r"2 outputs.*3 entries"):
        align([1, 2, 3], outputs)
