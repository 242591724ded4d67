"""distill: what the student learns, what it is afterwards, and the errors."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

import keras_sgmcmc as sg

LOGITS = losses.SparseCategoricalCrossentropy(from_logits=True)


@keras.saving.register_keras_serializable(package="tests")
def gaussian(y_pred):
    import tensorflow_probability as tfp

    mean, log_std = keras.ops.split(y_pred, 2, axis=-1)
    return tfp.distributions.Normal(mean, keras.ops.exp(log_std))


# One row for each input: a linear student can predict anything for them.
ROWS = np.eye(6, dtype="float32")


def model_of(units, activation=None, loss=None):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(units, activation)])
    if loss is not None:
        model.compile(loss=loss)
    return model


def posterior_of(units, loss, count=3):
    model = model_of(units, loss=loss)
    rng = np.random.default_rng(0)
    draws = [[rng.normal(size=v.shape) for v in model.weights] for _ in range(count)]
    return sg.Posterior(model, model.weights, draws, range(count), weights=range(1, count + 1))


def train(posterior, student, steps=600, rate=0.1):
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps))
    x = np.tile(ROWS, (steps // 2, 1))
    return sg.distill(
        posterior, student, x, epochs=2, batch_size=len(ROWS), optimizer=optimizer, verbose=0
    )


def test_student_of_a_classifier_is_an_ordinary_model_that_predicts_the_mean(tmp_path):
    posterior, x = posterior_of(3, LOGITS), ROWS
    student = model_of(3, "softmax")
    assert train(posterior, student) is student
    assert not student.compiled
    want = posterior.predict(x, verbose=0)
    # Draws differ by far more than that, so no single one is what was learned.
    assert posterior.predict(x, reduce=None, verbose=0).std(0).max() > 0.2
    np.testing.assert_allclose(student.predict(x, verbose=0), want, atol=2e-3)

    student.save(tmp_path / "student.keras")
    loaded = keras.saving.load_model(tmp_path / "student.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), student.predict(x, verbose=0))


def test_gradient_is_that_of_the_average_divergence_to_the_draws():
    # Korattikara et al.: one step of SGD against the average over the draws of KL(p_s || p_w), by
    # differences; the student's logits are read as such from its loss, and its optimizer stays.
    posterior, x, rate = posterior_of(3, LOGITS), ROWS, 1e-2
    student = model_of(3)
    student.compile("adam", loss=LOGITS)
    optimizer = student.optimizer
    each = posterior.predict(x, reduce=None, verbose=0).astype("float64")

    def divergence(weights):
        logits = x @ weights[0] + weights[1]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        per_draw = (each * (np.log(each) - log_p)).sum(-1).mean(-1)
        return np.average(per_draw, weights=[1, 2, 3])

    start = [v.astype("float64") for v in student.get_weights()]
    want = []
    for i, array in enumerate(start):
        gradient = np.empty_like(array)
        for index in np.ndindex(array.shape):
            sides = []
            for sign in (1, -1):
                moved = [v.copy() for v in start]
                moved[i][index] += sign * 1e-5
                sides.append(divergence(moved))
            gradient[index] = (sides[0] - sides[1]) / 2e-5
        want.append(gradient)
    sgd = keras.optimizers.SGD(rate)
    sg.distill(posterior, student, x, epochs=1, batch_size=len(x), optimizer=sgd, verbose=0)
    for before, after, gradient in zip(start, student.get_weights(), want, strict=True):
        np.testing.assert_allclose((before - after) / rate, gradient, atol=1e-4)
    assert student.optimizer is optimizer
    assert int(optimizer.iterations) == 0


def test_student_with_a_spread_of_its_own_learns_mean_and_total_std():
    posterior, x = posterior_of(1, sg.GaussianNegativeLogLikelihood(0.5)), ROWS
    student = model_of(2, loss=sg.NegativeLogLikelihood(gaussian))
    train(posterior, student, steps=1000)
    want = posterior.predict_uncertainty(x, verbose=0)
    mean, log_std = np.split(student.predict(x, verbose=0), 2, axis=-1)
    assert np.ptp(want.total_std) > 0.5
    np.testing.assert_allclose(mean, want.mean, atol=5e-3)
    np.testing.assert_allclose(np.exp(log_std), want.total_std, rtol=5e-3)


def test_posteriors_own_model_can_be_the_student_and_the_mean_of_a_regression_is_learned():
    posterior, x = posterior_of(1, "mae"), ROWS
    before = posterior.predict(x, verbose=0)
    student = posterior.model
    train(posterior, student)
    np.testing.assert_allclose(student.predict(x, verbose=0), before, atol=2e-3)
    np.testing.assert_array_equal(posterior.predict(x, verbose=0), before)


def test_errors():
    posterior, x = posterior_of(3, "sparse_categorical_crossentropy"), ROWS
    data = tf.data.Dataset.from_tensor_slices(x).batch(2)
    with pytest.raises(ValueError, match=r"`x` should be an array.*Dataset"):
        sg.distill(posterior, model_of(3, "softmax"), data)
    with pytest.raises(ValueError, match="`epochs`"):
        sg.distill(posterior, model_of(3, "softmax"), x, epochs=0)
    with pytest.raises(ValueError, match=r"`student`.*whether its outputs are logits.*compile"):
        sg.distill(posterior, model_of(3), x)
    with pytest.raises(ValueError, match=r"`student`.*\(3,\).*Received.*\(4,\)"):
        sg.distill(posterior, model_of(4, "softmax"), x)
    with pytest.raises(ValueError, match=r"`student`.*density.*Received: The loss `KLDiv"):
        sg.distill(posterior, model_of(3, "softmax", loss=losses.KLDivergence()), x)
    with pytest.raises(ValueError, match="holds no draw"):
        sg.distill(posterior[:0], model_of(3, "softmax"), x)
    posterior.model.compile(loss=losses.KLDivergence())
    with pytest.raises(ValueError, match=r"`posterior`.*posterior.model.compile"):
        sg.distill(posterior, model_of(3, "softmax"), x)
