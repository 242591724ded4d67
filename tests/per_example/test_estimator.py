"""Groups, chunks, losses and weights, and what the estimator refuses."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import assert_close
from keras import layers
from per_example import zoo

from keras_sgmcmc.noise_covariance import estimate
from keras_sgmcmc.per_example import PerExampleGradients, sources


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def flat(tensors):
    return np.concatenate([np.ravel(tensor.numpy()) for tensor in tensors])


def constants(*data):
    return tf.nest.map_structure(tf.constant, data)


def moments(estimator, *data, verify=False):
    """`Moments` as a graph, by closed forms that `verify` has to find right, if asked for."""
    data = constants(*data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if verify:
            estimator.prepare(data)
        return tf.function(estimator.moments, autograph=False)(data)


def general(estimator):
    """The estimator, without closed forms."""
    estimator.reject(dict.fromkeys(range(len(estimator.variables)), "test"))
    return estimator


def assert_equal(found, expected, tolerance=1e-5):
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


# Groups.


@pytest.mark.parametrize(
    ("name", "group"),
    [("dense", 2), ("dense", 8), ("dense_positions", 3), ("convolution", 2), ("embedding", 3)],
)
def test_groups_of_closed_forms(name, group):
    """The last group is smaller."""
    model, x, y = zoo.make(name)
    sizes = np.array([min(group, 7 - start) for start in range(0, 7, group)])
    sums = zoo.loop(model, x, y, group=group) * sizes[:, None]
    found = moments(PerExampleGradients(model, microbatch_size=group), x, y)
    assert_equal(flat(found.first), sums.sum(0))
    assert_equal(flat(found.second), (sums**2 / sizes[:, None]).sum(0))
    assert set(map(int, found.examples)) == {7}
    assert set(map(int, found.groups)) == {len(sizes)}


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_groups_of_the_general_way_and_of_matrices(group, structure):
    """Whole groups only."""
    model, x, y = zoo.make("dense")
    whole = 7 // group * group
    sums = zoo.loop(model, x[:whole], y[:whole], group=group) * group
    for estimator in (
        general(PerExampleGradients(model, structure, group)),
        PerExampleGradients(model, "full", group),
    ):
        found = moments(estimator, x, y)
        assert_equal(flat(found.first), sums.sum(0))
        if estimator.structure == "full":
            assert_equal(found.second[0].numpy(), sums.T @ sums / group)
        else:
            assert_equal(flat(found.second), (sums**2).sum(0) / group)
        assert set(map(int, found.examples)) == {whole}
        assert set(map(int, found.groups)) == {whole // group}


def population(model, x, y):
    """Covariance of the gradient of a row drawn at random."""
    return zoo.loop(model, x, y).var(axis=0)


@pytest.mark.parametrize("group", [1, 3])
def test_the_estimate_is_unbiased(group):
    model, x, y = zoo.make("dense", rows=30)
    truth = population(model, x, y)
    estimator = PerExampleGradients(model, microbatch_size=group)
    run = tf.function(lambda x, y: estimate(estimator.moments((x, y)), None), autograph=False)
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(1500):
        rows = rng.integers(0, 30, 8)
        draws.append(flat(run(tf.constant(x[rows]), tf.constant(y[rows]))))
    draws = np.stack(draws)
    error = draws.std(0) / np.sqrt(len(draws))
    moving = truth > 1e-3 * truth.max()
    assert moving.sum() > 30
    assert_close(draws.mean(0)[moving], truth[moving], error[moving], "variance", 0.2)


def test_the_first_example_against_the_mean_of_its_batch():
    """Mandt et al. eq. 25, times S/(S-1): the same expectation, noisier."""
    model, x, y = zoo.make("dense", rows=30)
    gradients = zoo.loop(model, x, y)
    rng = np.random.default_rng(0)
    batches = rng.integers(0, 30, (20_000, 8))
    first = gradients[batches[:, 0]] - gradients[batches].mean(1)
    simple = 8 / 7 * first**2
    error = simple.std(0) / np.sqrt(len(simple))
    estimator = PerExampleGradients(model)
    run = tf.function(lambda x, y: estimate(estimator.moments((x, y)), None), autograph=False)
    ours = np.stack(
        [flat(run(tf.constant(x[rows]), tf.constant(y[rows]))) for rows in batches[:1500]]
    )
    both = np.sqrt(error**2 + ours.var(0) / len(ours))
    moving = population(model, x, y) > 1e-3 * population(model, x, y).max()
    assert_close(simple.mean(0)[moving], ours.mean(0)[moving], both[moving], "variance", 0.2)
    assert np.all(simple.var(0)[moving] > ours.var(0)[moving])


# Losses and weights.


def custom(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 1.5, axis=-1)


@pytest.mark.parametrize(
    ("loss", "closed"),
    [
        (keras.losses.Huber(reduction="sum_over_batch_size"), True),
        (keras.losses.MeanSquaredError(reduction="sum"), False),
        (keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), True),
        (custom, True),
    ],
    ids=["mean", "sum", "weighted_mean", "function"],
)
def test_any_reduction(loss, closed):
    """And the sums don't change where the data are split into batches."""
    model, x, y = zoo.make("dense", rows=8, loss=loss)
    gradients = zoo.loop(model, x, y)
    estimator = PerExampleGradients(model)
    estimator.prepare(constants(x, y))
    run = tf.function(estimator.moments, autograph=False)
    for size in (8, 1):
        parts = [run(constants(x[s : s + size], y[s : s + size])) for s in range(0, 8, size)]
        first, second = (
            sum(flat(part) for part in found)
            for found in ([p.first for p in parts], [p.second for p in parts])
        )
        assert_equal(first, gradients.sum(0), 2e-5)
        assert_equal(second, (gradients**2).sum(0))
    assert bool(estimator.plan(None).closed) == closed
    if closed:
        whole = zoo.loop(model, x, y, group=8)[0]
        assert_equal(gradients.mean(0), whole)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_sample_weights(reduction):
    model, x, y = zoo.make("dense", loss=keras.losses.MeanSquaredError(reduction=reduction))
    weights = np.array([0.0, 0.5, 1.0, 2.0, 3.0, 1.0, 0.1], "float32")
    gradients = zoo.loop(model, x, y, weights)
    estimator = PerExampleGradients(model)
    found = moments(estimator, x, y, weights, verify=True)
    assert_equal(flat(found.first), gradients.sum(0))
    assert_equal(flat(found.second), (gradients**2).sum(0))
    assert bool(estimator.plan(None).closed) == (reduction == "sum_over_batch_size")


def test_masked_steps_contribute_nothing():
    model, x, y = zoo.make("masked_sequence")
    assert (x == 0).any()
    # Keras takes weights of rows only without a mask.
    weights = np.random.default_rng(0).uniform(0, 2, (7, 5)).astype("float32")
    gradients = zoo.loop(model, x, y, weights)
    estimator = PerExampleGradients(model)
    run = tf.function(estimator.moments, autograph=False)
    found = run(constants(x, y, weights))
    assert_equal(flat(found.second), (gradients**2).sum(0))
    elsewhere = np.where((x == 0)[..., None], 100.0, y).astype("float32")
    again = run(constants(x, elsewhere, weights))
    np.testing.assert_allclose(flat(again.second), flat(found.second), rtol=1e-5)


def test_a_loss_of_the_models_own():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = layers.Dense(2)

        def call(self, x):
            return self.out(x)

        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            return keras.ops.mean(keras.ops.cosh(y - y_pred))

    model, x, y = Own(), numbers(6, 4), numbers(6, 2, seed=1)
    model.compile("sgd")
    model(x)
    estimator = PerExampleGradients(model)
    gradients = zoo.loop(model, x, y)
    assert_equal(flat(moments(estimator, x, y).second), (gradients**2).sum(0))
    assert estimator.plan(None).general == []


def test_penalties_are_left_out_once():
    found = []
    for regularizer in (None, "l2"):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(3, "tanh", kernel_regularizer=regularizer)]
        )
        model.compile("sgd", "mse")
        found.append(moments(PerExampleGradients(model), numbers(6, 4), numbers(6, 3, seed=1)))
    for plain, penalized in zip(*found, strict=True):
        np.testing.assert_allclose(flat(penalized), flat(plain), rtol=1e-5)


# Chunks.


@pytest.mark.parametrize("structure", ["diagonal", "full"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_chunks_of_the_general_way(structure, known):
    """23 examples in chunks of 4, with a last short one; and all at once."""
    model, x, y = zoo.make("dense", rows=23)
    gradients = zoo.loop(model, x, y)
    found = []
    for chunk in (4, None):
        estimator = general(PerExampleGradients(model, structure))
        plan = estimator.plan(constants(x, y))
        if chunk is not None:
            matrix = 0 if structure == "diagonal" else 8 * gradients.shape[1]
            estimator.memory_budget = 8 * chunk * (plan.example_bytes + matrix)
        length = 23 if known else None
        specs = [tf.TensorSpec([length, 4]), tf.TensorSpec([length, 2])]
        run = tf.function(lambda x, y, e=estimator: e.moments((x, y)), specs, autograph=False)
        found.append(run(x, y))
    for one in found:
        assert_equal(flat(one.first), gradients.sum(0))
        second = (gradients**2).sum(0) if structure == "diagonal" else gradients.T @ gradients
        assert_equal(flat(one.second), second.ravel())


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("dense_positions", True),
        ("convolution", True),
        ("dense_positions", False),
        ("convolution", False),
        ("embedding", False),
        ("shared_layer", False),
    ],
)
def test_chunks_of_closed_forms(monkeypatch, name, known):
    model, x, y = zoo.make(name, rows=11)
    gradients = zoo.loop(model, x, y)
    # Some four examples of the widest kernels.
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 4 * 4 * 30)
    estimator = PerExampleGradients(model)
    data = constants(x, y)
    if known:
        found = tf.function(estimator.moments, autograph=False)(data)
    else:
        specs = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), data)
        found = tf.function(estimator.moments, [specs], autograph=False)(data)
    assert estimator.plan(None).general == []
    assert_equal(flat(found.second), (gradients**2).sum(0))


# Positions and shapes.


def test_variables_that_nothing_depends_on_keep_their_place():
    class Unused(keras.Model):
        def __init__(self):
            super().__init__()
            self.unused = layers.Dense(3, name="unused")
            self.out = layers.Dense(2, name="out")

        def build(self, shape):
            self.unused.build(shape)
            self.out.build(shape)

        def call(self, x):
            return self.out(x)

    model, x, y = Unused(), numbers(6, 4), numbers(6, 2, seed=1)
    model.compile("sgd", "mse")
    model(x)
    gradients = zoo.loop(model, x, y)
    for estimator in (PerExampleGradients(model), general(PerExampleGradients(model))):
        found = moments(estimator, x, y)
        assert [s.shape for s in found.second] == [v.shape for v in model.trainable_variables]
        assert_equal(flat(found.second), (gradients**2).sum(0))
        unused = [
            "unused/" in variable.path.split("/", 1)[1] for variable in model.trainable_variables
        ]
        assert [not np.any(second) for second in found.second] == unused


def test_frozen_layers_have_no_part():
    model, x, y = zoo.make("dense")
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    gradients = zoo.loop(model, x, y)
    found = moments(PerExampleGradients(model), x, y)
    assert len(found.second) == 2
    assert_equal(flat(found.second), (gradients**2).sum(0))


def test_batch_normalization_uses_and_keeps_its_moving_statistics():
    model, x, y = zoo.make("batch_normalization")
    normalization = model.layers[1]
    normalization.moving_mean.assign(normalization.moving_mean + 0.5)
    normalization.moving_variance.assign(normalization.moving_variance * 3)
    kept = [v.numpy() for v in model.non_trainable_variables]
    gradients = zoo.loop(model, x, y)
    for estimator in (PerExampleGradients(model), general(PerExampleGradients(model))):
        found = moments(estimator, x, y)
        assert_equal(flat(found.second), (gradients**2).sum(0))
        assert np.all(np.any(found.second[0].numpy() > 0, axis=0))
    for old, variable in zip(kept, model.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)


@pytest.mark.parametrize("name", ["dense", "convolution", "own_weight"])
def test_eagerly(name):
    model, x, y = zoo.make(name)
    gradients = zoo.loop(model, x, y)
    found = PerExampleGradients(model).moments(constants(x, y))
    assert_equal(flat(found.second), (gradients**2).sum(0))


def test_compiled_by_xla():
    model, x, y = zoo.make("two_outputs")
    gradients = zoo.loop(model, x, y)
    estimator = PerExampleGradients(model)
    run = tf.function(estimator.moments, jit_compile=True, autograph=False)
    assert_equal(flat(run(constants(x, y)).second), (gradients**2).sum(0))


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"structure": "kronecker"}, "structure='kronecker'"),
        ({"microbatch_size": 0}, "microbatch_size=0"),
        ({"memory_budget": 0}, "memory_budget=0"),
        ({"structure": "full", "memory_budget": 1000}, "GiB"),
    ],
)
def test_bad_arguments(arguments, message):
    model, _, _ = zoo.make("dense")
    with pytest.raises(ValueError, match=message):
        PerExampleGradients(model, **arguments)


def test_memory_is_checked_before_anything_is_made():
    model = keras.Sequential([keras.Input((1000,)), layers.Dense(1000)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"1001000 parameters needs 1.12e\+04 GiB.*diagonal"):
        PerExampleGradients(model, "full")
    with pytest.raises(ValueError, match=r"raise `memory_budget`"):
        PerExampleGradients(model, "block")
    PerExampleGradients(model)


def test_a_model_without_a_loss():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    with pytest.raises(ValueError, match="`compile` it with `loss=`"):
        PerExampleGradients(model)
    model.compile("sgd")
    with pytest.raises(ValueError, match="`compile` it with `loss=`"):
        PerExampleGradients(model)


def test_batches_that_are_not_dense():
    model, _, y = zoo.make("dense")
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
    with pytest.raises(ValueError, match="RaggedTensor"):
        PerExampleGradients(model).moments((ragged, tf.constant(y)))
