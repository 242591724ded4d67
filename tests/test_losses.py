import functools
import importlib
import json
import warnings

import fresh
import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
import tensorflow_probability as tfp

from keras_sgmcmc import losses
from keras_sgmcmc.losses import GaussianNegativeLogLikelihood, NegativeLogLikelihood
from keras_sgmcmc.schedules import BlockDecay, Cyclical, PowerDecay

tfd = tfp.distributions


@keras.saving.register_keras_serializable(package="test_losses")
def mean_and_scale(y_pred):
    mean, raw_scale = keras.ops.split(y_pred, 2, axis=-1)
    return tfd.Normal(mean, keras.ops.softplus(raw_scale))


@keras.saving.register_keras_serializable(package="test_losses")
def categorical(y_pred):
    return tfd.Categorical(logits=y_pred)


@keras.saving.register_keras_serializable(package="test_losses")
class ScaledNormal:
    """A callable object with a config, which Keras can save as well."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, y_pred):
        return tfd.Normal(y_pred, self.scale)

    def get_config(self):
        return {"scale": self.scale}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


LOSSES = {
    "Gaussian": GaussianNegativeLogLikelihood,
    "general": functools.partial(NegativeLogLikelihood, lambda y_pred: tfd.Normal(y_pred, 1.0)),
}


@pytest.fixture(params=LOSSES)
def make_loss(request):
    return LOSSES[request.param]


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def softmax(logits):
    p = np.exp(logits)
    return p / p.sum(-1, keepdims=True)


# The Gaussian likelihood


@pytest.mark.parametrize("noise_std", [1, 0.3, np.float32(2.0), [0.1, 1.0, 7.0], np.ones(3) * 0.2])
def test_gaussian_is_the_normalised_density(rng, noise_std):
    y, f = rng.normal(size=(2, 5, 3))
    expected = scipy.stats.norm.logpdf(y, f, noise_std).sum(axis=1)
    loss = GaussianNegativeLogLikelihood(noise_std)
    np.testing.assert_allclose(loss.log_prob(y, f), expected, rtol=1e-5)
    np.testing.assert_allclose(loss(y, f), -expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(loss.call(y, f), -expected, rtol=1e-5)


def test_gaussian_sums_over_every_axis_but_the_first(rng):
    y, f = rng.normal(size=(2, 4, 6, 3))
    noise_std = [0.5, 1.0, 2.0]
    expected = scipy.stats.norm.logpdf(y, f, noise_std).sum(axis=(1, 2))
    log_prob = GaussianNegativeLogLikelihood(noise_std).log_prob(y, f)
    assert log_prob.shape == (4,)
    np.testing.assert_allclose(log_prob, expected, rtol=1e-5)


def test_gaussian_gradient(rng):
    y, f = rng.normal(size=(2, 5, 2)).astype("float32")
    f = tf.Variable(f)
    with tf.GradientTape() as tape:
        loss = GaussianNegativeLogLikelihood([0.5, 3.0])(y, f)
    np.testing.assert_allclose(
        tape.gradient(loss, f), (f.numpy() - y) / np.square([0.5, 3.0]) / 5, rtol=1e-5
    )


@pytest.mark.parametrize("outputs", [1, 2, 10])
def test_mse_means_a_variance_of_half_the_outputs(rng, outputs):
    y, f = rng.normal(size=(2, 5, outputs)).astype("float32")
    f = tf.Variable(f)
    with tf.GradientTape(persistent=True) as tape:
        mse = keras.losses.MeanSquaredError()(y, f)
        gaussian = GaussianNegativeLogLikelihood(np.sqrt(outputs / 2))(y, f)
    np.testing.assert_allclose(tape.gradient(mse, f), tape.gradient(gaussian, f), rtol=1e-5)


def test_gaussian_moments(rng):
    f = rng.normal(size=(5, 2)).astype("float32")
    loss = GaussianNegativeLogLikelihood([0.5, 3.0])
    np.testing.assert_array_equal(loss.predictive_mean(f), f)
    np.testing.assert_allclose(loss.predictive_variance(f), np.tile([0.25, 9.0], (5, 1)))
    np.testing.assert_allclose(
        GaussianNegativeLogLikelihood(0.5).predictive_variance(f[:, 0]), np.full(5, 0.25)
    )


@pytest.mark.parametrize("noise_std", [0, -1.0, [1.0, 0.0], np.nan, np.inf, [], [[1.0]], "big"])
def test_noise_std_must_be_positive(noise_std):
    with pytest.raises(ValueError, match=r"`noise_std` must be .*Received: noise_std="):
        GaussianNegativeLogLikelihood(noise_std)


@pytest.mark.parametrize("shape", [(4, 1), (4, 2), (3,)])
def test_noise_std_must_fit_the_outputs(shape):
    loss = GaussianNegativeLogLikelihood([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"one entry for each entry of the last axis.*length 3"):
        loss(np.zeros(shape), np.zeros(shape))
    with pytest.raises(ValueError, match=r"one entry for each entry of the last axis.*length 3"):
        loss.predictive_variance(np.zeros(shape))


# Any distribution


def test_general_is_the_normalised_density(rng):
    y, f = rng.normal(size=(5, 1)), rng.normal(size=(5, 2))
    scale = np.log1p(np.exp(f[:, 1:]))
    expected = scipy.stats.norm.logpdf(y, f[:, :1], scale)[:, 0]
    loss = NegativeLogLikelihood(mean_and_scale)
    np.testing.assert_allclose(loss.log_prob(y, f), expected, rtol=1e-4)
    np.testing.assert_allclose(loss(y, f), -expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(loss.predictive_mean(f), f[:, :1], rtol=1e-6)
    np.testing.assert_allclose(loss.predictive_variance(f), scale**2, rtol=1e-5)


def test_general_gradient_of_the_scale(rng):
    y = rng.normal(size=(5, 1)).astype("float32")
    f = tf.Variable(rng.normal(size=(5, 2)).astype("float32"))
    with tf.GradientTape() as tape:
        loss = NegativeLogLikelihood(mean_and_scale)(y, f)
    mean, raw = f.numpy()[:, :1], f.numpy()[:, 1:]
    scale, slope = np.log1p(np.exp(raw)), 1 / (1 + np.exp(-raw))
    by_mean = (mean - y) / scale**2
    by_raw = (1 / scale - (y - mean) ** 2 / scale**3) * slope
    np.testing.assert_allclose(
        tape.gradient(loss, f), np.hstack([by_mean, by_raw]) / 5, rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float32"])
@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_class_labels_of_any_dtype(rng, dtype, shape):
    logits = rng.normal(size=(4, 3))
    labels = np.array([2, 0, 1, 2])
    expected = np.log(softmax(logits)[np.arange(4), labels])
    loss = NegativeLogLikelihood(categorical)
    y = labels.reshape(shape).astype(dtype)
    assert loss.log_prob(y, logits).shape == (4,)
    np.testing.assert_allclose(loss.log_prob(y, logits), expected, rtol=1e-5)
    np.testing.assert_allclose(loss(y, logits), -expected.mean(), rtol=1e-5)


def test_one_hot_labels_and_class_probabilities(rng):
    logits = rng.normal(size=(4, 3))
    labels = np.array([2, 0, 1, 2])
    loss = NegativeLogLikelihood(lambda y_pred: tfd.OneHotCategorical(logits=y_pred))
    np.testing.assert_allclose(
        loss(np.eye(3)[labels], logits),
        -np.log(softmax(logits)[np.arange(4), labels]).mean(),
        rtol=1e-5,
    )
    np.testing.assert_allclose(loss.predictive_mean(logits), softmax(logits), rtol=1e-5)


def test_class_index_has_no_moments():
    loss = NegativeLogLikelihood(categorical)
    for moment in (loss.predictive_mean, loss.predictive_variance):
        with pytest.raises(NotImplementedError, match="OneHotCategorical"):
            moment(np.zeros((4, 3)))


def test_multivariate_event_and_time_axis(rng):
    y, f = rng.normal(size=(2, 4, 6, 2))
    covariance = np.array([[2.0, 0.6], [0.6, 0.5]])
    root = np.linalg.cholesky(covariance).astype("float32")
    loss = NegativeLogLikelihood(lambda y_pred: tfd.MultivariateNormalTriL(y_pred, root))
    expected = scipy.stats.multivariate_normal([0, 0], covariance).logpdf(y - f).sum(axis=1)
    np.testing.assert_allclose(loss.log_prob(y, f), expected, rtol=1e-4)
    variance = loss.predictive_variance(f)
    np.testing.assert_allclose(variance, np.broadcast_to([2.0, 0.5], f.shape), rtol=1e-5)


def test_variance_is_broadcast_to_the_mean():
    class Fixed(tfd.Normal):
        def _variance(self):
            return tf.constant(4.0)

    loss = NegativeLogLikelihood(lambda y_pred: Fixed(y_pred, 2.0))
    variance = loss.predictive_variance(np.zeros((3, 2)))
    assert variance.shape == (3, 2)
    np.testing.assert_array_equal(variance, 4.0)


def test_make_distribution_must_be_a_function_of_predictions():
    with pytest.raises(ValueError, match=r"must be a function.*Received: make_distribution=<tfp"):
        NegativeLogLikelihood(tfd.Normal(0.0, 1.0))
    loss = NegativeLogLikelihood(lambda y_pred: y_pred)
    with pytest.raises(ValueError, match=r"must return a TFP distribution.*Received"):
        loss(np.zeros((2, 1)), np.zeros((2, 1)))


def test_distribution_without_the_batch_axis_is_refused():
    loss = NegativeLogLikelihood(lambda y_pred: tfd.Normal(0.0, 1.0))
    with pytest.raises(ValueError, match=r"make_distribution returned .*Normal.*of shape \(\)"):
        loss(np.zeros((3,)), np.zeros((3,)))


def test_losses_do_not_import_tensorflow_probability():
    names = [getattr(value, "__name__", "") for value in vars(losses).values()]
    assert not [name for name in names if name.startswith("tensorflow_probability")]


# What both share


@pytest.mark.parametrize(
    ("y_shape", "f_shape"), [((5,), (5, 1)), ((5, 1), (5,)), ((5, 1), (5, 1)), ((5,), (5,))]
)
def test_a_last_axis_of_one_is_never_broadcast(rng, make_loss, y_shape, f_shape):
    y, f = rng.normal(size=(2, 5))
    loss = make_loss()
    expected = scipy.stats.norm.logpdf(y, f)
    assert loss.log_prob(y.reshape(y_shape), f.reshape(f_shape)).shape == (5,)
    np.testing.assert_allclose(
        loss.log_prob(y.reshape(y_shape), f.reshape(f_shape)), expected, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("y_shape", "f_shape"),
    [
        ((5,), (5, 2)),
        ((5, 1), (5, 2)),
        ((5, 2), (5, 1)),
        ((5, 2), (5,)),
        ((4, 1), (5, 1)),
        ((), ()),
    ],
)
def test_other_shapes_are_refused(make_loss, y_shape, f_shape):
    with pytest.raises(ValueError, match=r"`y_true` must have the shape .* Received: y_true"):
        make_loss()(np.zeros(y_shape), np.zeros(f_shape))


def test_row_weights_multiply_the_log_likelihood(rng, make_loss):
    y, f = rng.normal(size=(2, 5, 2))
    weights = np.array([0.0, 1.0, 2.0, 0.5, 10.0])
    expected = -(weights * scipy.stats.norm.logpdf(y, f).sum(1)).sum() / 5
    for w in (weights, weights[:, None]):
        np.testing.assert_allclose(make_loss()(y, f, sample_weight=w), expected, rtol=1e-5)


def test_weights_of_single_outputs_are_refused(make_loss):
    # With five rows and five outputs, Keras would broadcast them against the rows.
    with pytest.raises(ValueError, match=r"one weight for each row.*shape \(5, 5\)"):
        make_loss()(np.zeros((5, 5)), np.zeros((5, 5)), sample_weight=np.ones((5, 5)))


def test_masked_predictions_are_refused(make_loss):
    model = keras.Sequential(
        [
            keras.Input((4, 1)),
            keras.layers.Masking(),
            keras.layers.SimpleRNN(1, return_sequences=True),
        ]
    )
    model.compile("sgd", make_loss())
    with pytest.raises(ValueError, match="carry a Keras mask"):
        model.fit(np.ones((4, 4, 1)), np.ones((4, 4, 1)), verbose=0)


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight", None, "none", "typo"])
def test_other_reductions_are_refused(make_loss, reduction):
    with pytest.raises(ValueError, match=r"the mean over the rows.*batch size.*Received: red"):
        make_loss(reduction=reduction)


def test_mean_is_a_synonym(rng, make_loss):
    y, f = rng.normal(size=(2, 5, 2))
    assert float(make_loss(reduction="mean")(y, f)) == float(make_loss()(y, f))


def test_float64_is_not_rounded(rng):
    y, f = rng.normal(size=(2, 5, 2))
    expected = -scipy.stats.norm.logpdf(y, f, 0.1).sum(1).mean()
    for loss in (
        GaussianNegativeLogLikelihood(0.1, dtype="float64"),
        NegativeLogLikelihood(
            lambda y_pred: tfd.Normal(y_pred, np.float64(0.1)), dtype=keras.DTypePolicy("float64")
        ),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            np.testing.assert_allclose(loss(y, tf.constant(f)), expected, rtol=1e-14)
        np.testing.assert_allclose(-np.mean(loss.log_prob(y, f)), expected, rtol=1e-14)


def test_rounding_a_float64_model_warns(make_loss):
    y_pred = tf.zeros((2, 1), "float64")
    with pytest.warns(UserWarning, match=r"computes in float64.*Give the loss dtype='float64'"):
        make_loss()(np.zeros((2, 1)), y_pred)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = make_loss(dtype="float32")(np.zeros((2, 1)), y_pred)
    assert value.dtype == "float32"


def make_model(loss, outputs, learning_rate=0.1, **compile_arguments):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(outputs, use_bias=False)])
    optimizer = keras.optimizers.SGD(learning_rate)
    model.compile(optimizer, loss, **compile_arguments)
    return model


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_takes_the_step_of_the_formula(rng, make_loss, jit_compile):
    x, y = rng.normal(size=(8, 3)), rng.normal(size=8)
    model = make_model(make_loss(), 1, jit_compile=jit_compile)
    (before,) = model.get_weights()
    model.fit(x, y, batch_size=8, verbose=0)
    gradient = x.T @ (x @ before - y[:, None]) / 8
    np.testing.assert_allclose(model.get_weights()[0], before - 0.1 * gradient, rtol=1e-4)


def test_fit_on_class_labels_with_jit_compile(rng):
    x, y = rng.normal(size=(8, 3)), rng.integers(3, size=(8, 1))
    model = make_model(NegativeLogLikelihood(categorical), 3, jit_compile=True)
    (before,) = model.get_weights()
    model.fit(x, y, batch_size=8, verbose=0)
    gradient = x.T @ (softmax(x @ before) - np.eye(3)[y[:, 0]]) / 8
    np.testing.assert_allclose(
        model.get_weights()[0], before - 0.1 * gradient, rtol=1e-4, atol=1e-6
    )


# Serialization


@pytest.mark.parametrize(
    "loss",
    [
        GaussianNegativeLogLikelihood(0.25, name="mine", reduction="mean", dtype="float64"),
        GaussianNegativeLogLikelihood(np.array([0.5, 2.0])),
        NegativeLogLikelihood(mean_and_scale, name="mine", reduction="mean", dtype="float64"),
        NegativeLogLikelihood(ScaledNormal(0.5)),
    ],
)
def test_serialization_round_trip(loss):
    config = json.loads(json.dumps(keras.losses.serialize(loss)))
    restored = keras.losses.deserialize(config)
    assert type(restored) is type(loss)
    assert restored.get_config() == loss.get_config()
    assert restored.dtype == loss.dtype
    f = np.array([[0.3, 0.7], [0.1, -2.0]])
    y = f[:, :1] if getattr(loss, "make_distribution", None) is mean_and_scale else 1 - f
    assert float(restored(y, f)) == float(loss(y, f))
    assert type(loss).from_config(loss.get_config()).get_config() == loss.get_config()


def test_config_holds_the_constructor_values():
    assert GaussianNegativeLogLikelihood([1, 2]).get_config() == {
        "name": "gaussian_negative_log_likelihood",
        "reduction": "sum_over_batch_size",
        "dtype": None,
        "noise_std": [1.0, 2.0],
    }


def unregistered(y_pred):
    return tfd.Normal(y_pred, 1.0)


@pytest.mark.parametrize(
    "function", [lambda y_pred: tfd.Normal(y_pred, 1.0), functools.partial(unregistered)]
)
def test_unregistered_function_trains_but_is_not_saved(tmp_path, function):
    model = make_model(NegativeLogLikelihood(function), 1)
    history = model.fit(np.ones((4, 3)), np.ones(4), verbose=0)
    assert np.isfinite(history.history["loss"][0])
    with pytest.raises(ValueError, match=r"not registered.*register_keras_serializable.*save_we"):
        model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")


def test_function_can_be_registered_after_training(tmp_path):
    def late(y_pred):
        return tfd.Normal(y_pred, 1.0)

    loss = NegativeLogLikelihood(late)
    with pytest.raises(ValueError, match="not registered"):
        loss.get_config()
    keras.saving.register_keras_serializable("test_losses")(late)
    assert NegativeLogLikelihood.from_config(loss.get_config()).make_distribution is late


def test_a_registered_lambda_is_refused_too():
    # Keras would save its bytecode, and not load it in safe mode.
    function = keras.saving.register_keras_serializable("test_losses", "anonymous")(
        lambda y_pred: tfd.Normal(y_pred, 1.0)
    )
    with pytest.raises(ValueError, match="not registered"):
        NegativeLogLikelihood(function).get_config()


LIKELIHOOD_MODULE = """
import keras

@keras.saving.register_keras_serializable(package="my_package")
def likelihood(y_pred):
    import tensorflow_probability as tfp
    mean, raw_scale = keras.ops.split(y_pred, 2, axis=-1)
    return tfp.distributions.Normal(mean, 0.1 + keras.ops.softplus(raw_scale))
"""

FRESH_PROCESS = """
import json, sys
import keras, numpy as np
import keras_sgmcmc.losses, keras_sgmcmc.schedules, my_likelihood
x, y = np.linspace(-1, 1, 12).reshape(4, 3), np.array([0.5, -1.0, 2.0, 0.0])
results = []
for path in sys.argv[1:]:
    model = keras.saving.load_model(path)
    rate = float(model.optimizer.learning_rate)
    results.append([type(model.loss).__name__, rate, float(model.test_on_batch(x, y))])
print(json.dumps(results))
"""


def test_models_load_in_a_fresh_process(tmp_path, monkeypatch):
    (tmp_path / "my_likelihood.py").write_text(LIKELIHOOD_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    likelihood = importlib.import_module("my_likelihood").likelihood
    models = [
        make_model(GaussianNegativeLogLikelihood(0.5), 1, PowerDecay(1, 9, 0.75)),
        make_model(NegativeLogLikelihood(likelihood), 2, BlockDecay(0.1, 1, 0.5)),
        make_model(GaussianNegativeLogLikelihood([0.5]), 1, Cyclical(0.1, 4)),
    ]
    # One step was taken, so these are the rates of t = 1.
    rates = [10**-0.75, 0.05, 0.05 * (1 + np.sqrt(0.5))]
    x, y = np.linspace(-1, 1, 12).reshape(4, 3), np.array([0.5, -1.0, 2.0, 0.0])
    paths = [str(tmp_path / f"{i}.keras") for i in range(3)]
    expected = []
    for model, path, rate in zip(models, paths, rates, strict=True):
        model.train_on_batch(x, y)
        model.save(path)
        expected.append([type(model.loss).__name__, rate, model.test_on_batch(x, y)])

    printed = fresh.run(FRESH_PROCESS, *paths, path=[tmp_path])
    received = json.loads(printed.splitlines()[-1])
    assert [row[0] for row in received] == [row[0] for row in expected]
    np.testing.assert_allclose(
        [row[1:] for row in received], [row[1:] for row in expected], rtol=1e-5
    )
