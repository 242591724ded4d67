"""Posterior: its draws, and what they predict together. The oracles are NumPy and SciPy."""

import gc
import tracemalloc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses
from scipy import special, stats

from keras_sgmcmc import predictive
from keras_sgmcmc.losses import GaussianNegativeLogLikelihood
from keras_sgmcmc.posterior import Posterior

LOGITS = losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(autouse=True)
def _quiet_and_seeded():
    keras.utils.set_random_seed(1)
    keras.config.disable_interactive_logging()
    yield
    keras.config.enable_interactive_logging()


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def mlp(units=3, **compile_args):
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(units)]
    )
    model.compile(**{"loss": LOGITS, **compile_args})
    return model


def posterior_of(model, count=4, seed=0, **kwargs):
    """Random draws of everything but the seeds."""
    rng = np.random.default_rng(seed)
    draws = [[rng.normal(size=v.shape) for v in model.weights] for _ in range(count)]
    for draw in draws:
        for v, value in zip(model.weights, draw, strict=True):
            if "variance" in v.path:
                np.exp(value, out=value)
    return Posterior(model, model.weights, draws, steps=10 * np.arange(1, count + 1), **kwargs)


def one_by_one(posterior, x):
    """Oracle: what the model gives with each draw set as its weights; restores the weights."""
    before = posterior.model.get_weights()
    outputs = []
    for weights in posterior:
        posterior.model.set_weights(weights)
        outputs.append(keras.tree.map_structure(np.array, posterior.model(x, training=False)))
    posterior.model.set_weights(before)
    return outputs


def linear(shape=(3, 1), **compile_args):
    model = keras.Sequential([keras.Input(shape[:1]), layers.Dense(shape[1])])
    model.compile(**{"loss": GaussianNegativeLogLikelihood(0.5), **compile_args})
    return model


# Averages.


def test_probabilities_are_averaged_not_logits():
    # Case 102: p = (0.9, 0.1) and (0.1, 0.9) from logits of unequal scale (a constant shift of 10
    # times their size); the mean probability is (0.5, 0.5), the softmax of mean logits is not.
    model = keras.Sequential([keras.Input((1,)), layers.Dense(2, use_bias=False)])
    model.compile(loss=LOGITS)
    a, b = np.log([0.9, 0.1]), np.log([0.1, 0.9]) + 25.0
    posterior = Posterior(model, model.weights, [[a[None]], [b[None]]], steps=[1, 2])
    np.testing.assert_allclose(posterior.predict(np.ones((3, 1))), np.full((3, 2), 0.5), atol=1e-6)
    sharp = [np.array([[10.0, -10.0]]), np.array([[-1.0, 1.0]])]
    posterior = Posterior(model, model.weights, [[v] for v in sharp], steps=[1, 2])
    want = np.mean(special.softmax(np.array(sharp), axis=-1), axis=0)
    np.testing.assert_allclose(posterior.predict(np.ones((1, 1))), want, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "units", "from_logits", "link"),
    [
        (LOGITS, 3, None, special.softmax),
        (losses.CategoricalCrossentropy(from_logits=True), 3, None, special.softmax),
        (losses.BinaryCrossentropy(from_logits=True), 3, None, special.expit),
        (LOGITS, 3, False, np.array),
        ("mse", 3, None, np.array),
        (lambda y, f: f, 3, True, special.softmax),
        (lambda y, f: f, 1, True, special.expit),
        (lambda y, f: f, 3, False, np.array),
    ],
)
def test_meaning_of_the_outputs(loss, units, from_logits, link):
    posterior, x = posterior_of(mlp(units, loss=loss)), normal(7, 4)
    axis = {"axis": -1} if link is special.softmax else {}
    want = [link(f, **axis) for f in one_by_one(posterior, x)]
    each = posterior.predict(x, reduce=None, from_logits=from_logits)
    assert each.shape == (4, 7, units)
    np.testing.assert_allclose(each, want, atol=1e-5)
    mean = posterior.predict(x, from_logits=from_logits)
    np.testing.assert_allclose(mean, np.mean(want, axis=0), atol=1e-5)


def test_unknown_loss_must_declare_logits_unless_the_outputs_are_visibly_probabilities():
    posterior = posterior_of(mlp(loss=lambda y, f: f))
    with pytest.raises(ValueError, match="from_logits=True"):
        posterior.predict(normal(2, 4))
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    with pytest.raises(ValueError, match="not compiled"):
        posterior_of(model).predict(normal(2, 4))
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="softmax")])
    posterior = posterior_of(model)
    want = np.mean(one_by_one(posterior, normal(2, 4)), axis=0)
    np.testing.assert_allclose(posterior.predict(normal(2, 4)), want, atol=1e-6)


def test_moments_of_a_linear_model():
    model, x = linear(), normal(6, 3)
    draws = [[normal(3, 1, seed=s), normal(1, seed=s + 50)] for s in range(9)]
    posterior = Posterior(model, model.weights, draws, steps=range(9))
    mu = np.stack([x @ k + b for k, b in draws])
    mean, std = posterior.predict_moments(x)
    np.testing.assert_allclose(mean, mu.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(std, mu.std(0), rtol=1e-5)
    weights = np.arange(9.0)
    posterior = Posterior(model, model.weights, draws, steps=range(9), weights=weights)
    mean, std = posterior.predict_moments(x, batch_size=4)
    want = np.average(mu, axis=0, weights=weights)
    np.testing.assert_allclose(mean, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        std, np.sqrt(np.average((mu - want) ** 2, axis=0, weights=weights)), rtol=1e-5
    )
    np.testing.assert_allclose(posterior.predict(x), want, rtol=1e-5, atol=1e-6)


def test_moments_without_cancellation():
    # mean/std = 1e4: the sum of squares minus the squared sum has no correct digit in float32.
    model = linear((1, 1))
    values = (1e4 + normal(50)).astype("float32")
    draws = [[np.zeros((1, 1)), [v]] for v in values]
    mean, std = Posterior(model, model.weights, draws, range(50)).predict_moments(np.ones((2, 1)))
    np.testing.assert_allclose(mean, np.full((2, 1), values.mean(dtype="float64")), rtol=1e-6)
    np.testing.assert_allclose(std, np.full((2, 1), values.std(dtype="float64")), rtol=1e-5)


def test_total_uncertainty_of_the_bayesian_linear_model():
    # Case 108: exact posterior N(m, V) of the weights; total variance = sigma^2 + x' V x.
    rng, sigma = np.random.default_rng(3), 0.5
    x, new = rng.normal(size=(20, 3)), rng.normal(size=(5, 3))
    y = x @ [1.0, -1.0, 0.5] + sigma * rng.normal(size=20)
    V = np.linalg.inv(x.T @ x / sigma**2 + np.eye(3))
    m = V @ x.T @ y / sigma**2
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1, use_bias=False)])
    model.compile(loss=GaussianNegativeLogLikelihood(sigma))
    # Six points of mean m and covariance V exactly.
    root = np.sqrt(3) * np.linalg.cholesky(V).T
    draws = [[w[:, None]] for w in np.concatenate([m + root, m - root])]
    got = Posterior(model, model.weights, draws, range(6)).predict_uncertainty(new)
    epistemic = np.sqrt(np.einsum("ni,ij,nj->n", new, V, new))[:, None]
    np.testing.assert_allclose(got.mean[:, 0], new @ m, atol=1e-5)
    np.testing.assert_allclose(got.epistemic_std, epistemic, rtol=1e-4)
    np.testing.assert_allclose(got.observation_std, np.full((5, 1), sigma), rtol=1e-5)
    np.testing.assert_allclose(got.total_std, np.hypot(epistemic, sigma), rtol=1e-5)


def test_total_uncertainty_with_several_noises_and_with_mse():
    x, draws = normal(6, 3), [[normal(3, 2, seed=s), np.zeros(2)] for s in range(5)]
    spread = np.std([x @ k for k, _ in draws], axis=0)
    for loss, variance in ((GaussianNegativeLogLikelihood([0.1, 3.0]), [0.01, 9.0]), ("mse", 1.0)):
        model = linear((3, 2), loss=loss)
        got = Posterior(model, model.weights, draws, range(5)).predict_uncertainty(x)
        np.testing.assert_allclose(got.total_std, np.sqrt(spread**2 + variance), rtol=1e-5)
    # A mixture of indicators: the total variance of a class is p (1 - p) of the mean p.
    posterior = posterior_of(mlp())
    got = posterior.predict_uncertainty(normal(6, 4))
    np.testing.assert_allclose(got.total_std, np.sqrt(got.mean * (1 - got.mean)), rtol=1e-4)
    with pytest.raises(ValueError, match=r"huber.*GaussianNegativeLogLikelihood"):
        posterior_of(mlp(loss="huber")).predict_uncertainty(normal(6, 4))


def test_order_of_draws_does_not_matter():
    posterior, x = posterior_of(mlp(), count=20), normal(9, 4)
    shuffled = posterior[np.random.default_rng(0).permutation(20)]
    np.testing.assert_allclose(shuffled.predict(x), posterior.predict(x), rtol=1e-6)
    np.testing.assert_allclose(
        shuffled.predict_moments(x)[1], posterior.predict_moments(x)[1], rtol=1e-6
    )


# The network: inference mode, on the draw's own state, without side effects.


def stateful(name=None):
    """A model with moving statistics, dropout and always-on noise."""
    x = inputs = keras.Input((4,))
    x = layers.BatchNormalization()(layers.Dense(5)(x))
    x = layers.Dropout(0.5)(x)
    model = keras.Model(inputs, layers.Dense(1)(x), name=name)
    model.compile(loss="mse", metrics=["mae", keras.metrics.MeanSquaredError()])
    return model


def test_statistics_of_each_draw_are_used():
    # Case 44.
    posterior, x = posterior_of(stateful()), normal(9, 4)
    each = posterior.predict(x, reduce=None)
    for got, weights in zip(each, posterior, strict=True):
        posterior.model.set_weights(weights)
        want = posterior.model.predict(x, verbose=0)
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)
    # With one draw's weights and another's statistics the answer is another.
    state = [v for v in posterior.model.weights if "moving" in v.path]
    assert len(state) == 2
    posterior.model.set_weights(posterior.weights(0))
    for v in state:
        v.assign(posterior.draws[v.path][1])
    assert np.abs(posterior.model.predict(x, verbose=0) - each[0]).max() > 1e-2


def test_live_model_is_untouched_even_by_errors():
    # Case 106.
    model, x, y = stateful(), normal(40, 4), normal(40, 1)
    model.fit(x, y, verbose=0)
    posterior = posterior_of(model)

    def state():
        tracked = model.variables + model.metrics_variables + model.optimizer.variables
        return [keras.ops.convert_to_numpy(v).copy() for v in tracked]

    before, metrics = state(), model.get_metrics_result()
    posterior.predict(x)
    posterior.predict_uncertainty(x)
    posterior.log_predictive_density(x, y)
    posterior.evaluate(x, y)
    for bad in (normal(40, 7), {"a": x}):
        with pytest.raises((ValueError, KeyError)):
            posterior.predict(bad)
    for a, b in zip(before, state(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.get_metrics_result() == metrics
    assert keras.ops.convert_to_numpy(model(x[:1])).shape == (1, 1)  # no scope is left open


def test_random_layers_that_ignore_training_give_all_draws_the_same_noise():
    class Noise(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(3)

        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x), seed=self.seed_generator)

    model = keras.Sequential([keras.Input((1,)), layers.Dense(1), Noise()])
    model.compile(loss="mse")
    draws = [[np.zeros((1, 1)), np.full(1, 10.0 * s)] for s in range(3)]
    posterior = Posterior(model, model.weights, draws, range(3))
    each = posterior.predict(np.zeros((4, 1)), reduce=None)
    np.testing.assert_allclose(each - each[0], np.tile([[[0]], [[10]], [[20]]], (4, 1)), atol=1e-5)
    assert np.std(each[0]) > 0.1
    np.testing.assert_array_equal(posterior.predict(np.zeros((4, 1)), reduce=None), each)


def test_one_trace_for_all_draws_batches_and_calls():
    # Case 104.
    traces = []

    class Counting(layers.Layer):
        def call(self, x):
            traces.append(x.shape)
            return x

    model = keras.Sequential([keras.Input((4,)), Counting(), layers.Dense(3)])
    model.compile(loss=LOGITS)
    posterior = posterior_of(model, count=5)
    traces.clear()
    for rows, batch_size in ((10, 4), (8, 4), (3, 32), (70, 32)):  # with and without a short batch
        posterior.predict(normal(rows, 4), batch_size=batch_size)
    posterior[1:3].predict(normal(10, 4))
    posterior.predict_moments(normal(5, 4))
    Posterior.concatenate([posterior, posterior]).predict(normal(5, 4))
    assert traces == [(None, 4)]
    model.compile(loss="mse")  # means something else now
    posterior.predict(normal(10, 4))
    assert len(traces) == 2


def test_repeated_calls_hold_no_memory():
    posterior, x, y = posterior_of(mlp(metrics=["accuracy"])), normal(9, 4), np.arange(9) % 3
    counts = []
    gc.freeze()  # what other tests have left is not looked through
    for _ in range(3):
        posterior.predict(x)
        posterior.evaluate(x, y)
        gc.collect()
        counts.append(sum(isinstance(o, (tf.Graph, keras.Variable)) for o in gc.get_objects()))
    assert counts[-1] == counts[1]


def test_memory_does_not_grow_with_the_draws():
    """Nor from call to call: a stack of what all draws say would take 9.6 MB."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    draws = [[normal(1, 1, seed=s), normal(1, seed=s)] for s in range(60)]
    posterior, x = Posterior(model, model.weights, draws, range(60)), normal(20_000, 1)
    y = np.zeros((20_000, 1), "float32")

    def use():
        posterior.predict(x, batch_size=20_000, verbose=0)
        posterior.predict_moments(x, batch_size=20_000, verbose=0)
        posterior.log_predictive_density(x, y, batch_size=20_000, verbose=0)

    use()
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(3):
            use()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3e6
    assert sizes[2] - sizes[0] < 1e5


@pytest.mark.parametrize("reduce", ["mean", None])
def test_groups_of_draws_change_nothing(reduce, monkeypatch):
    model = mlp()
    draws = [[normal(*v.shape, seed=s) for v in model.weights] for s in range(7)]
    posterior, x = Posterior(model, model.weights, draws, range(7)), normal(9, 4)
    nbytes = 4 * (sum(int(np.prod(v.shape)) for v in model.weights) + 9 * 3)
    sizes, stacked = [], predictive.stacked

    def recorded(group):
        sizes.append(len(group))
        return stacked(group)

    def predict(nbytes):
        monkeypatch.setattr(predictive, "GROUP_BYTES", nbytes)
        sizes.clear()
        return posterior.predict(x, batch_size=4, reduce=reduce, verbose=0), list(sizes)

    monkeypatch.setattr(predictive, "stacked", recorded)
    one_by_one, each = predict(0)
    in_groups, groups = predict(3 * nbytes)
    assert each == [1] * 7
    assert groups == [1, 3, 3]
    np.testing.assert_array_equal(in_groups, one_by_one)


def test_frozen_layers_take_the_value_they_had():
    model, x = mlp(), normal(5, 4)
    frozen, last = model.layers
    frozen.trainable = False
    draws = [[normal(*v.shape, seed=s) for v in last.weights] for s in range(2)]
    posterior = Posterior(model, model.trainable_variables, draws, steps=[1, 2])
    want = np.mean(special.softmax(one_by_one(posterior, x), axis=-1), axis=0)
    other = [np.ones((4, 5)), np.ones(5)]
    old = frozen.get_weights()
    frozen.set_weights(other)
    frozen.trainable = True  # neither the values nor the flags of later matter
    np.testing.assert_allclose(posterior.predict(x), want, atol=1e-6)
    for i, value in enumerate(old + draws[1]):
        np.testing.assert_array_equal(posterior[1][i], value)
    common = zip(frozen.weights, other, strict=True)
    posterior = Posterior(model, last.weights, draws, [1, 2], common=common)
    frozen.set_weights(old)
    np.testing.assert_array_equal(posterior[0][0], np.ones((4, 5)))
    assert np.abs(posterior.predict(x) - want).max() > 1e-3


# Kinds of inputs and outputs.


def test_inputs_as_tensors_and_datasets(monkeypatch):
    posterior, x = posterior_of(mlp()), normal(11, 4)
    want = posterior.predict(x)
    data = tf.data.Dataset.from_tensor_slices(x)
    both = tf.data.Dataset.from_tensor_slices((x, np.zeros(11)))
    for chunk_bytes in (2**28, 1):  # all rows at once; chunk by chunk
        monkeypatch.setattr(predictive, "CHUNK_BYTES", chunk_bytes)
        for given in (tf.constant(x), x.astype("float64"), data.batch(4), both.batch(4)):
            np.testing.assert_allclose(posterior.predict(given, batch_size=3), want, atol=1e-6)
        each = posterior.predict(data.batch(4), batch_size=3, reduce=None)
        np.testing.assert_allclose(each.mean(0), want, atol=1e-6)


def test_dataset_is_read_once():
    posterior, reads = posterior_of(mlp()), []

    def generate():
        reads.append(1)
        yield from np.split(normal(12, 4), 3)

    data = tf.data.Dataset.from_generator(
        generate, output_signature=tf.TensorSpec((None, 4), tf.float32)
    )
    np.testing.assert_allclose(posterior.predict(data), posterior.predict(normal(12, 4)), atol=1e-6)
    assert reads == [1]


def two_outputs(as_dict):
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    x = layers.Concatenate()([a, b])
    outputs = {"kind": layers.Dense(3, name="kind")(x), "age": layers.Dense(1, name="age")(x)}
    model = keras.Model({"a": a, "b": b}, outputs if as_dict else list(outputs.values()))
    loss = {"kind": LOGITS, "age": GaussianNegativeLogLikelihood(0.5)}
    model.compile(loss=loss, metrics={"kind": ["accuracy"], "age": ["mae"]})
    return model


@pytest.mark.parametrize("as_dict", [True, False])
def test_dict_inputs_and_several_outputs(as_dict):
    posterior = posterior_of(two_outputs(as_dict))
    x = {"a": normal(7, 4), "b": normal(7, 2)}
    y = {"kind": np.arange(7) % 3, "age": normal(7, seed=5)}
    mean = posterior.predict(x, batch_size=3)
    assert type(mean) is (dict if as_dict else list)
    outputs = one_by_one(posterior, x)
    keys = ("kind", "age") if as_dict else (0, 1)
    logits, f = (np.stack([o[k] for o in outputs]) for k in keys)
    p = special.softmax(logits, axis=-1)
    np.testing.assert_allclose(mean[keys[0]], p.mean(0), atol=1e-5)
    np.testing.assert_allclose(mean[keys[1]], f.mean(0), atol=1e-5)
    _, std = posterior.predict_moments(x)
    np.testing.assert_allclose(std[keys[1]], f.std(0), rtol=1e-4)
    total = posterior.predict_uncertainty(x).total_std
    np.testing.assert_allclose(total[keys[1]], np.hypot(f.std(0), 0.5), rtol=1e-4)

    log_p = np.log(p[:, range(7), y["kind"]]) + stats.norm.logpdf(y["age"], f[..., 0], 0.5)
    want = special.logsumexp(log_p, axis=0) - np.log(4)
    np.testing.assert_allclose(posterior.log_predictive_density(x, y), want, rtol=1e-4)

    got = posterior.evaluate(x, y)
    nll = -np.log(p.mean(0)[range(7), y["kind"]]).mean()
    density = stats.norm.logpdf(y["age"], f.mean(0)[:, 0], 0.5)
    assert got["kind_loss"] == pytest.approx(nll, rel=1e-4)
    assert got["age_loss"] == pytest.approx(-density.mean(), rel=1e-4)
    assert got["loss"] == pytest.approx(nll - density.mean(), rel=1e-4)
    assert got["age_mae"] == pytest.approx(np.abs(f.mean(0)[:, 0] - y["age"]).mean(), rel=1e-4)
    accuracy = (p.mean(0).argmax(-1) == y["kind"]).mean()
    assert got["kind_accuracy"] == pytest.approx(accuracy)
    with pytest.raises(ValueError, match="one entry of `y` for each"):
        posterior.log_predictive_density(x, y["age"])


def test_subclassed_model_without_a_training_argument():
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, inputs):
            a, b = inputs
            return self.dense(a) + b, self.dense(b)

    model, x = Pair(), (normal(5, 2), normal(5, 2, seed=1))
    model(x)
    model.compile(loss="mse")
    posterior = posterior_of(model)
    got, want = posterior.predict(x), one_by_one(posterior, x)
    for i in range(2):
        np.testing.assert_allclose(got[i], np.mean([w[i] for w in want], axis=0), atol=1e-5)
    y = (normal(5, 2, seed=2), normal(5, 2, seed=3))
    assert posterior.evaluate(x, y)["loss"] == pytest.approx(
        sum(np.mean((a - b) ** 2) for a, b in zip(got, y, strict=True)), rel=1e-5
    )


@pytest.mark.parametrize("dtype", ["float64", "mixed_float16", "mixed_bfloat16"])
def test_dtypes(dtype):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, dtype=dtype)])
    model.compile(loss="mse")
    posterior, x = posterior_of(model), normal(6, 4)
    f = np.array([x @ k + b for k, b in posterior])
    got = posterior.predict(x)
    if dtype == "float64":
        assert got.dtype == "float64"
        np.testing.assert_allclose(got, f.mean(0), rtol=1e-12)
    else:
        assert got.dtype == "float32"
        np.testing.assert_allclose(got, f.mean(0), atol=0.05)
    y = normal(6, seed=2)
    want = special.logsumexp(stats.norm.logpdf(y, f[..., 0], 0.5**0.5), axis=0) - np.log(4)
    got = posterior.log_predictive_density(x, y)
    np.testing.assert_allclose(got, want, rtol=1e-6 if dtype == "float64" else 0.1)


# Densities and metrics.


def test_log_density_of_a_regression():
    model, x, y = linear((3, 2), loss="mse"), normal(8, 3), normal(8, 2, seed=9)
    draws = [[normal(3, 2, seed=s), normal(2, seed=s + 9)] for s in range(3)]
    weights = np.array([1.0, 2.0, 5.0])
    posterior = Posterior(model, model.weights, draws, range(3), weights)
    log_p = [stats.norm.logpdf(y, x @ k + b, 1.0).sum(-1) for k, b in draws]
    want = special.logsumexp(log_p, axis=0, b=weights[:, None] / 8)
    np.testing.assert_allclose(posterior.log_predictive_density(x, y, 3), want, rtol=1e-5)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(3)
    np.testing.assert_allclose(posterior.log_predictive_density(data), want, rtol=1e-5)


def test_log_density_does_not_underflow():
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    draws = [[np.zeros((1, 1)), [v]] for v in (99.0, 100.0, 101.0)]
    x, y = np.zeros((1, 1)), np.zeros(1)
    for loss, sigma in ((GaussianNegativeLogLikelihood(0.7), 0.7), ("mse", 0.5**0.5)):
        model.compile(loss=loss)
        posterior = Posterior(model, model.weights, draws, range(3))
        log_p = stats.norm.logpdf(0.0, [99.0, 100.0, 101.0], sigma)
        assert log_p.max() < -9e3
        want = special.logsumexp(log_p) - np.log(3)
        np.testing.assert_allclose(posterior.log_predictive_density(x, y), [want], rtol=1e-6)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", None])
def test_log_density_of_classes_does_not_underflow(activation):
    # With a softmax or sigmoid layer the probabilities themselves are 0 in float32.
    units = 1 if activation == "sigmoid" else 2
    model = keras.Sequential([keras.Input((1,)), layers.Dense(units, activation=activation)])
    loss = losses.BinaryCrossentropy() if activation == "sigmoid" else LOGITS
    if activation == "softmax":
        loss = "sparse_categorical_crossentropy"
    model.compile(loss=loss)
    bias = [[1e4], [1.1e4]] if units == 1 else [[0.0, 1e4], [0.0, 1.1e4]]
    posterior = Posterior(model, model.weights, [[np.zeros((1, units)), b] for b in bias], [1, 2])
    got = posterior.log_predictive_density(np.zeros((1, 1)), np.zeros(1, "int64"))
    np.testing.assert_allclose(got, [-1e4 - np.log(2)], rtol=1e-6)


def test_log_density_errors():
    posterior, x = posterior_of(mlp(loss="huber")), normal(5, 4)
    with pytest.raises(ValueError, match=r"huber.*NegativeLogLikelihood"):
        posterior.log_predictive_density(x, normal(5, 3))
    posterior = posterior_of(mlp(loss="mse"))
    with pytest.raises(ValueError, match="pass `y`"):
        posterior.log_predictive_density(x)
    with pytest.raises(ValueError, match="not broadcast"):
        posterior.log_predictive_density(x, normal(5))
    inputs = keras.Input((3,), dtype="int32")
    outputs = layers.Dense(2)(layers.Embedding(5, 2, mask_zero=True)(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(loss=LOGITS)
    with pytest.raises(ValueError, match="mask"):
        posterior_of(model).log_predictive_density(np.ones((4, 3), int), np.ones((4, 3), int))


@pytest.mark.parametrize("kind", ["softmax", "logits", "binary logits"])
def test_evaluate_a_classifier(kind):
    metrics, units = ["accuracy"], 3
    activation, loss, y = "softmax", "sparse_categorical_crossentropy", np.arange(50) % 3
    if kind == "logits":
        activation, loss = None, LOGITS
        metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]
    elif kind == "binary logits":
        activation, loss, units, y = None, losses.BinaryCrossentropy(from_logits=True), 1, y // 2
        metrics = [keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)]
    model = keras.Sequential([keras.Input((4,)), layers.Dense(units, activation=activation)])
    model.compile(loss=loss, metrics=metrics)
    posterior, x = posterior_of(model), normal(50, 4)
    p = posterior.predict(x)
    p = np.concatenate([1 - p, p], -1) if units == 1 else p
    nll = -np.log(p[range(50), y])
    got = posterior.evaluate(x, y, batch_size=16)
    assert got["loss"] == pytest.approx(nll.mean(), rel=1e-5)
    assert got["accuracy"] == pytest.approx(np.mean(p.argmax(-1) == y))
    np.testing.assert_allclose(posterior.log_predictive_density(x, y), -nll, rtol=1e-4)
    if kind == "logits":
        assert got["sparse_categorical_crossentropy"] == pytest.approx(nll.mean(), rel=1e-5)
    w = np.linspace(0, 2, 50)
    got = posterior.evaluate(x, y, sample_weight=w, batch_size=50)
    assert got["loss"] == pytest.approx(np.mean(w * nll), rel=1e-5)


def test_evaluate_a_regression():
    model = linear((3, 2), loss="mse", metrics=["mae"], weighted_metrics=["mse"])
    x, y, w = normal(40, 3), normal(40, 2, seed=9), np.linspace(0, 2, 40)
    draws = [[normal(3, 2, seed=s), normal(2, seed=s + 9)] for s in range(3)]
    posterior = Posterior(model, model.weights, draws, range(3), weights=[1, 1, 2])
    error = y - np.average([x @ k + b for k, b in draws], axis=0, weights=[1, 1, 2])
    row = np.mean(error**2, -1)
    data = tf.data.Dataset.from_tensor_slices((x, y, w)).batch(8)
    for got in (posterior.evaluate(x, y, 8, sample_weight=w), posterior.evaluate(data)):
        assert got["loss"] == pytest.approx(np.mean(w * row), rel=1e-5)
        assert got["mae"] == pytest.approx(np.abs(error).mean(), rel=1e-5)
        assert got["mse"] == pytest.approx(np.average(row, weights=w), rel=1e-5)


def test_evaluate_errors():
    x = normal(5, 4)
    uncompiled = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    with pytest.raises(ValueError, match=r"model.compile"):
        posterior_of(uncompiled).evaluate(x, np.zeros(5))
    with pytest.raises(ValueError, match="pass `y`"):
        posterior_of(mlp()).evaluate(x)
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros(5))).batch(2)
    with pytest.raises(ValueError, match="holds y"):
        posterior_of(mlp()).evaluate(data, np.zeros(5))


# The container.


def test_slicing_indexing_iteration():
    model = mlp()
    posterior = posterior_of(model, count=5, weights=[1, 2, 3, 4, 0])
    assert len(posterior) == 5
    np.testing.assert_array_equal(posterior.steps, [10, 20, 30, 40, 50])
    np.testing.assert_allclose(posterior.draw_weights, [0.1, 0.2, 0.3, 0.4, 0.0])
    assert len(list(posterior)) == 5
    for index, steps in (
        (slice(1, 3), [20, 30]),
        (slice(None, None, -2), [50, 30, 10]),
        (np.array([3, 0]), [40, 10]),
        ([True, False, False, True, False], [10, 40]),
        (posterior.steps > 25, [30, 40, 50]),
    ):
        part = posterior[index]
        assert isinstance(part, Posterior)
        assert part.steps.tolist() == steps
        assert part.draw_weights.sum() == pytest.approx(1)
        for i, step in enumerate(steps):
            for a, b in zip(part[i], posterior[step // 10 - 1], strict=True):
                np.testing.assert_array_equal(a, b)
    model.set_weights(posterior[-1])
    np.testing.assert_array_equal(model.get_weights()[0], posterior.weights(4)[0])
    with pytest.raises(IndexError):
        posterior[5]
    # A draw of weight 0 changes nothing, wherever it stands.
    x, reverse = normal(3, 4), posterior[::-1]
    np.testing.assert_allclose(reverse.predict(x), posterior[:4].predict(x), rtol=1e-6)
    y = np.zeros(3, int)
    np.testing.assert_allclose(
        reverse.log_predictive_density(x, y), posterior[:4].log_predictive_density(x, y), rtol=1e-5
    )


def test_weights_are_in_the_order_of_the_model_whatever_the_order_of_variables():
    model = stateful()
    variables = model.trainable_variables + [v for v in model.weights if not v.trainable]
    assert [v.path for v in variables] != [v.path for v in model.weights]
    draw = [np.full(v.shape, i, "float32") for i, v in enumerate(variables)]
    posterior = Posterior(model, variables, [draw], [1])
    model.set_weights(posterior.weights(0))
    for v, value in zip(variables, draw, strict=True):
        np.testing.assert_array_equal(v.numpy(), value)


def test_draws_by_path():
    model = mlp()
    posterior = posterior_of(model, count=3)
    assert list(posterior.draws) == [v.path for v in model.weights]
    for i, v in enumerate(model.weights):
        want = [draw[i] for draw in posterior]
        np.testing.assert_array_equal(posterior.draws[v.path], want)

    class Twins(keras.Model):
        def __init__(self):
            super().__init__(name="twins")
            self.first = layers.Dense(4, name="dense")
            self.second = layers.Dense(4, name="dense")

        def call(self, x):
            return self.second(self.first(x))

    twins = Twins()
    twins(np.zeros((1, 4)))
    posterior = posterior_of(twins, count=2)
    names = ["kernel", "bias", "kernel_1", "bias_1"]
    assert list(posterior.draws) == ["twins/dense/" + name for name in names]
    np.testing.assert_array_equal(posterior.draws["twins/dense/kernel_1"][1], posterior[1][2])


def test_no_memory_is_shared():
    # Case 40.
    model = mlp(optimizer=keras.optimizers.SGD(0.5))
    views = [np.asarray(v.value.read_value()) for v in model.weights]
    again = np.asarray(model.weights[0].value.read_value())
    assert np.shares_memory(views[0], again)  # they are what the model trains, and no copies
    mine = [np.zeros(v.shape, "float32") for v in model.weights]
    posterior = Posterior(model, model.weights, [views, mine], steps=[1, 2])
    before = posterior[0]
    for array, view in zip(posterior._draws[0], views, strict=True):
        assert not np.shares_memory(array, view)
    for value in mine:
        value += 1.0
    model.set_weights(posterior[1])
    model.fit(normal(40, 4), np.arange(40) % 3, verbose=0)
    for a, b in zip(posterior[0], before, strict=True):
        np.testing.assert_array_equal(a, b)
    for a in posterior[1]:
        np.testing.assert_array_equal(a, np.zeros_like(a))
    posterior[0][0][:] = 7.0
    posterior.draws[model.weights[0].path][:] = 7.0
    np.testing.assert_array_equal(posterior[0][0], before[0])
    # Read-only arrays that own their memory can't change any more: they are taken as they are.
    array = np.zeros((4, 5), "float32")
    array.setflags(write=False)
    posterior = Posterior(model, model.weights[:1], [[array]], steps=[1])
    assert posterior._draws[0][0] is array


def test_concatenate_chains_of_separate_models():
    first, second = mlp(), mlp()
    assert first.weights[0].path != second.weights[0].path
    a = posterior_of(first, 2, weights=[1, 1])
    b = posterior_of(second, 3, seed=1, weights=[2, 2, 2])
    both = Posterior.concatenate([a, b])
    assert len(both) == 5
    assert both.steps.tolist() == [10, 20, 10, 20, 30]
    np.testing.assert_allclose(both.draw_weights, np.array([1, 1, 2, 2, 2]) / 8)
    x = normal(5, 4)
    want = (2 * a.predict(x) + 6 * b.predict(x)) / 8
    np.testing.assert_allclose(both.predict(x), want, atol=1e-6)
    with pytest.raises(ValueError, match="all chains or none"):
        Posterior.concatenate([a, posterior_of(second)])
    with pytest.raises(ValueError, match=r"one architecture.*\(5, 3\).*\(5, 2\)"):
        Posterior.concatenate([a, posterior_of(mlp(2))])
    with pytest.raises(ValueError, match="at least one"):
        Posterior.concatenate([])


def test_concatenate_refuses_other_frozen_weights():
    chains = []
    for _ in range(2):
        model = mlp()
        last = model.layers[1].weights
        chains.append(Posterior(model, last, [[np.zeros(v.shape) for v in last]], [1]))
    with pytest.raises(ValueError, match=r"frozen variable .*kernel differs"):
        Posterior.concatenate(chains)


def test_empty_posterior():
    model = mlp()
    posterior = Posterior(model, model.weights, [], [])
    assert len(posterior) == 0
    assert "0 draws" in repr(posterior)
    assert posterior.draws[model.weights[0].path].shape == (0, 4, 5)
    for call in (posterior.predict, posterior.predict_moments, posterior.evaluate):
        with pytest.raises(ValueError, match=r"no draw.*burn_in"):
            call(normal(2, 4))


def test_repr():
    text = repr(posterior_of(mlp(), count=3))
    assert "3 draws, steps 10 to 30, each of 43 values in 4 variables" in text


def test_constructor_errors():
    model, other = mlp(), mlp()
    good = [np.zeros(v.shape) for v in model.weights]
    with pytest.raises(ValueError, match="variables of `model`"):
        Posterior(model, other.weights, [good], [1])
    with pytest.raises(ValueError, match=r"each of 4 variables.*3 arrays in draw 1"):
        Posterior(model, model.weights, [good, good[:3]], [1, 2])
    with pytest.raises(ValueError, match=r"kernel has shape \(4, 5\).*\(4, 6\)"):
        Posterior(model, model.weights, [[np.zeros((4, 6)), *good[1:]]], [1])
    with pytest.raises(ValueError, match=r"`steps`.*2 draws.*1 entries"):
        Posterior(model, model.weights, [good, good], [1])
    with pytest.raises(ValueError, match=r"`weights`.*1 draws.*2 entries"):
        Posterior(model, model.weights, [good], [1], [1.0, 2.0])
    for weights in ([-1.0, 2.0], [0.0, 0.0], [np.nan, 1.0]):
        with pytest.raises(ValueError, match="not negative, and not all zero"):
            Posterior(model, model.weights, [good, good], [1, 2], weights)


def test_input_errors():
    posterior, x = posterior_of(mlp()), normal(5, 4)
    with pytest.raises(ValueError, match="reduce='median'"):
        posterior.predict(x, reduce="median")
    with pytest.raises(ValueError, match=r"same number of rows.*\(5, 4\), \(4,\)"):
        posterior.log_predictive_density(x, np.zeros(4))
    with pytest.raises(ValueError, match="at least one"):
        posterior.predict(x[:0])
    data = tf.data.Dataset.from_tensor_slices(x).batch(2)
    with pytest.raises(ValueError, match="batch_size=0"):
        posterior.predict(x, batch_size=0)
    with pytest.raises(ValueError, match="infinite"):
        posterior.predict(data.repeat())
    with pytest.raises(ValueError, match="empty"):
        posterior.predict(data.take(0))


def test_progress_bar(capsys):
    posterior, x = posterior_of(mlp()), normal(5, 4)
    posterior.predict(x)  # "auto" follows Keras' switch, which the fixture turned off
    assert capsys.readouterr().out == ""
    keras.config.enable_interactive_logging()
    posterior.predict(x, verbose=1)
    assert "4/4" in capsys.readouterr().out
    posterior.predict(tf.data.Dataset.from_tensor_slices(x).batch(2), verbose=1)
    assert "4/Unknown" in capsys.readouterr().out
    posterior.predict(x, verbose=0)
    assert capsys.readouterr().out == ""
    posterior.predict(x)
    assert "4/4" in capsys.readouterr().out
