"""Metrics of class probabilities, on arrays, on a Posterior and in Keras.

The oracles are scikit-learn, NumPy and, for the Keras metrics, the functions of arrays.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses
from scipy import special, stats
from sklearn.metrics import brier_score_loss, log_loss

from keras_sgmcmc import metrics
from keras_sgmcmc.posterior import Posterior


def probabilities(*shape, seed=0):
    return special.softmax(2.0 * np.random.default_rng(seed).normal(size=shape), axis=-1)


def test_scores_equal_those_of_scikit_learn():
    p, y = probabilities(60, 3), np.arange(60) % 3
    for targets in (y, y[:, None], np.eye(3)[y]):
        assert metrics.negative_log_likelihood(p, targets) == pytest.approx(log_loss(y, p))
        assert metrics.brier_score(p, targets) == pytest.approx(
            np.mean(np.sum((p - np.eye(3)[y]) ** 2, axis=1))
        )
    p, y = p[:, 0], y // 2
    for given in (p, p[:, None], np.stack([1 - p, p], axis=1)):
        assert metrics.negative_log_likelihood(given, y) == pytest.approx(log_loss(y, p))
        assert metrics.brier_score(given, y) == pytest.approx(2 * brier_score_loss(y, p))
    assert metrics.negative_log_likelihood([[0.0, 1.0]], [0]) == np.inf


def test_calibration_error_by_hand():
    # Ten rows of confidence 0.65, six right; ten of 0.95, all right.
    p = np.array([[0.65, 0.35]] * 10 + [[0.05, 0.95]] * 10)
    y = np.array([0] * 6 + [1] * 4 + [1] * 10)
    assert metrics.expected_calibration_error(p, y, bins=10) == pytest.approx(0.05, rel=1e-4)
    # One bin knows only the averages: 0.8 is claimed, and 16 of 20 are right.
    assert metrics.expected_calibration_error(p, y, bins=1) == pytest.approx(0.0, abs=1e-6)
    certain = np.eye(3)[[0, 1, 2]]
    assert metrics.expected_calibration_error(certain, [0, 1, 2]) == pytest.approx(0.0, abs=1e-6)
    assert metrics.expected_calibration_error(certain, [1, 2, 0]) == pytest.approx(1.0, rel=1e-6)


def test_entropies_by_hand():
    np.testing.assert_allclose(
        metrics.predictive_entropy([[1.0, 0.0], [0.5, 0.5]]), [0.0, np.log(2)], atol=1e-12
    )
    # Draws that are sure and disagree; that agree on not knowing.
    each = np.array([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])
    np.testing.assert_allclose(metrics.mutual_information(each), [np.log(2), 0.0], atol=1e-12)
    weighted = metrics.mutual_information(each, weights=[3.0, 1.0])
    np.testing.assert_allclose(weighted, [stats.entropy([3, 1]), 0.0], atol=1e-12)
    np.testing.assert_allclose(metrics.mutual_information(each[..., 1]), [np.log(2), 0], atol=1e-12)


def test_errors():
    p = probabilities(4, 3)
    with pytest.raises(ValueError, match=r"`probabilities`.*shape \(4, 3\).*softmax"):
        metrics.brier_score(np.log(p), [0, 1, 2, 0])
    with pytest.raises(ValueError, match=r"`y`.*0 to 2.*Received: shape \(3,\)"):
        metrics.negative_log_likelihood(p, [0, 1, 2])
    with pytest.raises(ValueError, match="`y`"):
        metrics.brier_score(p, [0, 1, 2, 3])
    with pytest.raises(ValueError, match="`bins`"):
        metrics.expected_calibration_error(p, [0, 1, 2, 0], bins=0)
    with pytest.raises(ValueError, match=r"`weights`.*\(2,\)"):
        metrics.mutual_information([p, p], weights=[1.0])
    with pytest.raises(ValueError, match=r"reduce=None"):
        metrics.mutual_information(p[:, 0])


def posterior_of(loss, units, weights=None):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(units)])
    model.compile(loss=loss)
    rng = np.random.default_rng(0)
    draws = [[rng.normal(size=v.shape) for v in model.weights] for _ in range(3)]
    return Posterior(model, model.weights, draws, [1, 2, 3], weights)


@pytest.mark.parametrize("units", [3, 1])
def test_quality_of_a_classifier(units):
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    y = np.arange(30) % 3
    if units == 1:
        loss, y = losses.BinaryCrossentropy(from_logits=True), y // 2
    posterior = posterior_of(loss, units, weights=[1.0, 2.0, 3.0])
    x = np.random.default_rng(1).normal(size=(30, 4)).astype("float32")
    p, each = posterior.predict(x, verbose=0), posterior.predict(x, reduce=None, verbose=0)
    information = metrics.mutual_information(each, weights=[1, 2, 3])
    want = {
        "negative_log_likelihood": metrics.negative_log_likelihood(p, y),
        "brier_score": metrics.brier_score(p, y),
        "expected_calibration_error": metrics.expected_calibration_error(p, y),
        "predictive_entropy": metrics.predictive_entropy(p).mean(),
        "mutual_information": information.mean(),
    }
    assert information.min() > 0
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(7)
    for got in (posterior.predictive_quality(x, y, verbose=0), posterior.predictive_quality(data)):
        assert got == pytest.approx(want, rel=1e-4)


def test_quality_of_a_regression_is_its_density():
    posterior = posterior_of("mse", 1)
    x, y = np.ones((5, 4), "float32"), np.zeros(5)
    got = posterior.predictive_quality(x, y, verbose=0)
    want = -posterior.log_predictive_density(x, y, verbose=0).mean()
    assert got == pytest.approx({"negative_log_likelihood": want})


CLASSES = [
    (metrics.BrierScore, metrics.brier_score),
    (metrics.ExpectedCalibrationError, metrics.expected_calibration_error),
    (metrics.PredictiveEntropy, lambda p, y: metrics.predictive_entropy(p).mean()),
]


@pytest.mark.parametrize(("cls", "function"), CLASSES)
@pytest.mark.parametrize("units", [4, 1])
@pytest.mark.parametrize("from_logits", [False, True])
def test_keras_metric_over_unequal_batches_is_the_function_of_all_rows(
    cls, function, units, from_logits
):
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(90, units)).astype("float32")
    p = special.softmax(logits, axis=-1) if units > 1 else special.expit(logits)
    y = rng.integers(0, max(units, 2), 90)
    outputs = logits if from_logits else p
    want = function(p, y)
    targets = [y, y[:, None]] + ([np.eye(units)[y]] if units > 1 else [])
    metric = cls.from_config(cls(from_logits=from_logits).get_config())
    for target in targets:
        for rows in np.split(np.arange(90), [7, 8, 60]):
            metric.update_state(target[rows], outputs[rows])
        assert float(metric.result()) == pytest.approx(want, rel=1e-4)
        metric.reset_state()
    # Weights that count rows twice or not at all.
    weights = rng.integers(0, 3, 90)
    repeated = np.repeat(np.arange(90), weights)
    for rows in (slice(0, 20), slice(20, 90)):
        metric.update_state(y[rows], outputs[rows], sample_weight=weights[rows])
    assert float(metric.result()) == pytest.approx(function(p[repeated], y[repeated]), rel=1e-4)


@pytest.mark.parametrize(("cls", "function"), CLASSES)
def test_keras_metric_of_sequences(cls, function):
    p, y = probabilities(6, 5, 3), np.random.default_rng(0).integers(0, 3, (6, 5))
    metric = cls()
    metric.update_state(y, p)
    assert float(metric.result()) == pytest.approx(function(p, y), rel=1e-4)
    metric.reset_state()
    metric.update_state(y, p, sample_weight=[1, 1, 0, 0, 0, 0])
    assert float(metric.result()) == pytest.approx(function(p[:2], y[:2]), rel=1e-4)


def test_keras_metrics_of_certain_predictions_and_of_none():
    for cls, _ in CLASSES:
        metric = cls()
        assert float(metric.result()) == 0.0
        metric.update_state([0, 1], np.eye(2))
        assert float(metric.result()) == 0.0
    bad = metrics.BrierScore()
    with pytest.raises(ValueError, match=r"`y_true`.*\(2,\).*one-hot.*Received.*\(2, 3\)"):
        bad.update_state(np.zeros((2, 3)), np.eye(2))
    with pytest.raises(ValueError, match="`bins`"):
        metrics.ExpectedCalibrationError(bins=0)


def test_keras_metrics_in_compile_and_in_evaluate_of_a_posterior(tmp_path):
    posterior = posterior_of(losses.SparseCategoricalCrossentropy(from_logits=True), 3)
    model = posterior.model
    compiled = [cls(from_logits=True) for cls, _ in CLASSES]
    compiled[1] = metrics.ExpectedCalibrationError(bins=5, from_logits=True)
    model.compile("sgd", loss=model.loss, metrics=compiled)
    x, y = np.random.default_rng(1).normal(size=(50, 4)).astype("float32"), np.arange(50) % 3
    names = ["brier_score", "expected_calibration_error", "predictive_entropy"]

    def want(p):
        ece = metrics.expected_calibration_error(p, y, bins=5)
        values = [metrics.brier_score(p, y), ece, metrics.predictive_entropy(p).mean()]
        return dict(zip(names, values, strict=True))

    got = posterior.evaluate(x, y, verbose=0)
    assert {k: got[k] for k in names} == pytest.approx(want(posterior.predict(x)), rel=1e-4)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    got = loaded.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    p = special.softmax(model.predict(x, verbose=0).astype("float64"), axis=-1)
    assert {k: got[k] for k in names} == pytest.approx(want(p), rel=1e-4)
