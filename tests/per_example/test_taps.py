"""What closed forms can't see is noticed, and nothing of the model is changed."""

import warnings

import fresh
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from per_example import zoo

from keras_sgmcmc.per_example import Outer, PerExampleGradients, Sum, register, rules

OUTSIDE = "it is used outside its layer's call"


def batch(*arrays):
    return tuple(tf.constant(array) for array in arrays)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def compiled(model, x, **arguments):
    model.compile(**{"optimizer": "sgd", "loss": "mse", **arguments})
    model(x)
    return model


def ways(estimator, data):
    """Reasons by the last two parts of the variables' paths."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reasons = estimator.plan(data).reasons
    return {"/".join(path.split("/")[-2:]): reason for path, reason in reasons.items()}


def assert_right(model, x, y, estimator=None, tolerance=1e-5):
    estimator = PerExampleGradients(model) if estimator is None else estimator
    gradients = zoo.loop(model, x, y)
    found = tf.function(estimator.moments, autograph=False)(batch(x, y))
    for sums, expected in ((found.first, gradients.sum(0)), (found.second, (gradients**2).sum(0))):
        flat = np.concatenate([np.ravel(tensor.numpy()) for tensor in sums])
        scale = max(np.abs(expected).max(), np.abs(gradients).max())
        assert np.abs(flat - expected).max() <= tolerance * scale
    return estimator


# Uses of a variable outside the calls that are recorded.


class Penalized(keras.Model):
    """A penalty that the model adds itself, on the kernel of a layer that has a closed form."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(3, activation="tanh", name="hidden")
        self.out = layers.Dense(2, name="out")

    def call(self, x):
        hidden = self.hidden(x)
        self.add_loss(0.1 * keras.ops.sum(self.hidden.kernel**2))
        return self.out(hidden)


class TiedToEmbedding(keras.Model):
    """The table of an embedding is the kernel of the output."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(6, 4, name="table")
        self.out = layers.Dense(4, name="out")

    def call(self, x):
        hidden = self.out(self.table(x))
        return keras.ops.matmul(hidden, keras.ops.transpose(self.table.embeddings))


class SharedKernel(keras.Model):
    """Two layers hold one kernel."""

    def __init__(self):
        super().__init__()
        self.one = layers.Dense(4, activation="tanh", name="one")
        self.two = layers.Dense(4, name="two")

    def build(self, shape):
        self.one.build(shape)
        self.two.build(shape)
        self.two._untrack_variable(self.two._kernel)
        self.two._tracker.unlock()
        self.two._kernel = self.one._kernel
        self.two._tracker.lock()

    def call(self, x):
        return self.two(self.one(x))


def test_a_penalty_of_the_model_itself_is_a_use_outside():
    x, y = numbers(6, 4), numbers(6, 2, seed=1)
    model = compiled(Penalized(), x)
    estimator = PerExampleGradients(model)
    assert ways(estimator, batch(x, y)) == {"hidden/kernel": OUTSIDE}
    assert_right(model, x, y, estimator)


def test_a_table_that_is_used_twice_is_a_use_outside():
    x = np.random.default_rng(0).integers(0, 6, (6, 3)).astype("int32")
    y = numbers(6, 3, 6)
    model = compiled(TiedToEmbedding(), x)
    estimator = PerExampleGradients(model)
    assert ways(estimator, batch(x, y)) == {"table/embeddings": OUTSIDE}
    assert_right(model, x, y, estimator)


def test_a_kernel_that_two_layers_hold_has_no_closed_form():
    x, y = numbers(6, 4), numbers(6, 4, seed=1)
    model = compiled(SharedKernel(), x)
    estimator = PerExampleGradients(model)
    reasons = ways(estimator, batch(x, y))
    assert set(reasons) == {"one/kernel"}
    assert_right(model, x, y, estimator)


def test_subclasses_and_layers_whose_call_was_replaced_have_no_closed_form():
    class Twice(layers.Dense):
        def call(self, inputs, training=None):
            return 2 * super().call(inputs)

    model = keras.Sequential(
        [keras.Input((4,)), Twice(3, name="twice"), layers.Dense(2, name="replaced")]
    )
    replaced = model.layers[1]
    original = replaced.call
    object.__setattr__(replaced, "call", lambda inputs, training=None: original(3 * inputs))
    x, y = numbers(6, 4), numbers(6, 2, seed=1)
    estimator = PerExampleGradients(compiled(model, x))
    reasons = ways(estimator, batch(x, y))
    assert set(reasons) == {"twice/kernel", "twice/bias", "replaced/kernel", "replaced/bias"}
    assert set(reasons.values()) == {"its layer has no closed form"}
    assert_right(model, x, y, estimator)
    assert vars(replaced)["call"] is not original


def test_a_layer_with_lora_has_no_closed_form():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="a"), layers.Dense(2)])
    model.layers[0].enable_lora(2)
    x, y = numbers(6, 4), numbers(6, 2, seed=1)
    estimator = PerExampleGradients(compiled(model, x))
    reasons = ways(estimator, batch(x, y))
    assert len(reasons) == 3
    assert all(path.startswith("a/") for path in reasons)
    assert_right(model, x, y, estimator)


# Calls that aren't part of the pass, or aren't on the batch.


def test_calls_in_a_function_are_not_relied_on():
    """Where the variable's gradients are cut in a function as well, the graph still tells."""
    model, x, y = zoo.make("in_function")
    inner = next(v for v in model.trainable_variables if "in_function" in v.path).path
    estimator = PerExampleGradients(model)
    data = batch(x, y)
    assert inner in estimator.plan(data).reasons
    assert_right(model, x, y, estimator)


def test_a_layer_that_is_called_on_half_of_the_batch():
    class Halves(layers.Layer):
        def build(self, shape):
            self.dense = layers.Dense(3, name="inner")
            self.dense.build(shape)

        def call(self, x):
            first, second = x[::2], x[1::2]
            rest = keras.ops.zeros((keras.ops.shape(second)[0], 3), x.dtype)
            return keras.ops.concatenate([self.dense(first), rest], 0)

    model = keras.Sequential([keras.Input((4,)), Halves(), layers.Dense(2, name="out")])
    x, y = numbers(6, 4), numbers(6, 2, seed=1)
    estimator = PerExampleGradients(compiled(model, x))
    reasons = ways(estimator, batch(x, y))
    assert set(reasons) == {"inner/kernel", "inner/bias"}
    assert all("isn't the batch" in reason for reason in reasons.values())


class Reversed(layers.Layer):
    """Calls its layer on the batch in another order: shapes can't tell."""

    def build(self, shape):
        self.dense = layers.Dense(3, activation="tanh", name="inner")
        self.dense.build(shape)

    def call(self, x):
        return keras.ops.flip(self.dense(keras.ops.flip(x, 0)), 0)


def test_a_batch_in_another_order_is_caught_by_numbers():
    model = keras.Sequential([keras.Input((4,)), Reversed(), layers.Dense(2, name="out")])
    x, y = numbers(6, 4), numbers(6, 2, seed=1)
    estimator = PerExampleGradients(compiled(model, x))
    data = batch(x, y)
    assert ways(estimator, data) == {}
    reasons = estimator.prepare(data)
    assert {path.split("/")[-1] for path in reasons} == {"kernel", "bias"}
    assert all("inner" in path and "off by" in reason for path, reason in reasons.items())
    assert_right(model, x, y, estimator)


def test_a_layer_called_with_more_than_one_tensor():
    class Called(layers.Layer):
        def build(self, shape):
            self.norm = layers.LayerNormalization(name="inner")
            self.norm.build(shape)

        def call(self, x):
            return self.norm(inputs=x)

    model = keras.Sequential([keras.Input((4,)), Called(), layers.Dense(2)])
    x, y = numbers(6, 4), numbers(6, 2, seed=1)
    assert_right(compiled(model, x), x, y)


# Rules.


class Slope(layers.Layer):
    def build(self, shape):
        self.slope = self.add_weight(shape=(shape[-1],), initializer="ones", name="slope")

    def call(self, x):
        return x * self.slope


def right_rule(layer, calls):
    return [Sum(layer.slope, [((c.inputs * c.delta)[:, None, None],) for c in calls])]


def wrong_rule(layer, calls):
    return [Sum(layer.slope, [((1.5 * c.inputs * c.delta)[:, None, None],) for c in calls])]


@pytest.fixture
def registered(monkeypatch):
    """Registers rules that are gone after the test."""
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))
    return register


@pytest.fixture
def slope_model():
    x, y = numbers(6, 4), numbers(6, 2, seed=1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), Slope(), layers.Dense(2)])
    return compiled(model, x), x, y


def test_a_rule_of_the_user(registered, slope_model):
    model, x, y = slope_model
    assert list(PerExampleGradients(model).plan(batch(x, y)).reasons) == [
        model.trainable_variables[2].path
    ]
    registered(Slope, right_rule)
    estimator = assert_right(model, x, y)
    assert estimator.plan(batch(x, y)).general == []
    errors = estimator.verify(batch(x, y)).numpy()
    assert errors.max() < 1e-5


def test_a_rule_as_a_decorator(registered):
    @registered(Slope)
    def rule(layer, calls):
        return right_rule(layer, calls)

    assert rules.rule_of(Slope()) is rule
    assert registered(Slope, right_rule) is right_rule


def test_a_wrong_rule_is_caught(registered, slope_model):
    model, x, y = slope_model
    registered(Slope, wrong_rule)
    estimator = PerExampleGradients(model)
    data = batch(x, y)
    errors = estimator.verify(data).numpy()
    assert errors[2] == pytest.approx(0.5, rel=1e-4)
    assert np.delete(errors, 2).max() < 1e-5
    reasons = estimator.prepare(data)
    assert list(reasons) == [model.trainable_variables[2].path]
    assert "off by 0.5 from a plain loop" in reasons[model.trainable_variables[2].path]
    assert estimator.prepare(data) == reasons
    assert_right(model, x, y, estimator)


def test_a_rule_that_gives_not_a_number_is_caught(registered, slope_model):
    model, x, y = slope_model
    nan = np.float32(np.nan)
    registered(Slope, lambda layer, calls: [right_rule(layer, calls)[0].scaled(tf.constant(nan))])
    assert len(PerExampleGradients(model).prepare(batch(x, y))) == 1


def test_a_rule_may_leave_variables_out(registered):
    registered(layers.Dense, lambda layer, calls: rules.dense(layer, calls)[1:])
    x, y = numbers(6, 4), numbers(6, 2, seed=1)
    model = compiled(keras.Sequential([keras.Input((4,)), layers.Dense(2, name="a")]), x)
    estimator = PerExampleGradients(model)
    assert ways(estimator, batch(x, y)) == {"a/kernel": "its layer's rule gives no source for it"}
    assert_right(model, x, y, estimator)


@pytest.mark.parametrize("equation", ["abc,cd->ad", "abc,bcd->ad"])
def test_a_rule_that_does_not_apply_says_why(equation):
    shape = {"abc,cd->ad": 3, "abc,bcd->ad": 3}[equation]
    layer = layers.EinsumDense(equation, shape, bias_axes="d", name="a")
    model = keras.Sequential([keras.Input((5, 4)), layer, layers.Dense(2, name="b")])
    x, y = numbers(6, 5, 4), numbers(6, 2, seed=1)
    estimator = PerExampleGradients(compiled(model, x))
    reasons = ways(estimator, batch(x, y))
    if equation == "abc,cd->ad":
        assert set(reasons) == {"a/kernel", "a/bias"}
        assert all("sums over an axis" in reason for reason in reasons.values())
    else:
        assert reasons == {}
    assert_right(model, x, y, estimator)


def test_a_convolution_over_an_unknown_length():
    model = keras.Sequential(
        [
            keras.Input((None, 3)),
            layers.Conv1D(2, 2, name="a"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2, name="b"),
        ]
    )
    x, y = numbers(6, 5, 3), numbers(6, 2, seed=1)
    estimator = PerExampleGradients(compiled(model, x))
    spec = [tf.TensorSpec([None, None, 3]), tf.TensorSpec([None, 2])]
    run = tf.function(lambda x, y: estimator.moments((x, y)), spec, autograph=False)
    found = run(x, y)
    reasons = estimator.plan(None).reasons
    assert all("the lengths of the inputs are not known" in r for r in reasons.values())
    assert len(reasons) == 2
    gradients = zoo.loop(model, x, y)
    flat = np.concatenate([np.ravel(tensor.numpy()) for tensor in found.second])
    np.testing.assert_allclose(flat, (gradients**2).sum(0), rtol=1e-4, atol=1e-6)


def test_sources_of_a_kernel_written_down():
    """sum over positions of a' d, its square, in groups and scaled."""
    variable = keras.Variable(np.zeros((3, 2), "float32"))
    a, d = numbers(5, 9, 1, 3), numbers(5, 9, 1, 2, seed=1)

    def factors(part):
        yield tuple(tf.reshape(t, [len(t), -1, 1, t.shape[-1]]) for t in part)

    parts = [(tf.constant(a[:, None]), tf.constant(d[:, None]))]
    source = Outer(variable, parts, factors, lambda blocks: blocks[0][..., 0, :, :])
    expected = np.einsum("bpgi,bpgo->bio", a, d)
    np.testing.assert_allclose(source.gradients(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(source.squares(), (expected**2).sum(0), rtol=1e-5)
    scaled = source.scaled(tf.constant([1.0, 2.0, 3.0, 4.0, 5.0]))
    weights = np.arange(1, 6)[:, None, None]
    np.testing.assert_allclose(scaled.gradients(), weights * expected, rtol=1e-5, atol=1e-4)
    groups = np.stack([expected[:2].sum(0), expected[2:4].sum(0), expected[4]])
    np.testing.assert_allclose(source.grouped(2).gradients(), groups, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(source.rows(1, 3).gradients(), expected[1:4], rtol=1e-5, atol=1e-5)


# Slow ways.


def test_one_warning_names_the_layers_that_cannot_be_vectorized():
    model, x, y = zoo.make("depthwise")
    estimator = PerExampleGradients(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = tf.function(estimator.moments, autograph=False)
        for rows in (x, x[:3]):
            run(batch(rows, y[: len(rows)]))
        estimator.moments(batch(x, y))
    ours = [str(w.message) for w in caught if "per-example" in str(w.message)]
    assert len(ours) == 1
    assert "depthwise_conv2d" in ours[0]
    assert "separable_conv2d" in ours[0]
    assert "dense" not in ours[0].split("The reason")[0]


ATTENTION = """
import numpy as np, tensorflow as tf
from per_example import zoo
from keras_sgmcmc.per_example import PerExampleGradients

model, x, y = zoo.make("attention")
estimator = PerExampleGradients(model)
estimator.reject(dict.fromkeys(range(len(model.trainable_variables)), "test"))
run = tf.function(estimator.moments, autograph=False)
gradients = zoo.loop(model, x, y)
for _ in range(3):
    found = run((tf.constant(x), tf.constant(y)))
    flat = np.concatenate([np.ravel(t.numpy()) for t in found.second])
    expected = (gradients**2).sum(0)
    assert np.abs(flat - expected).max() < 1e-5 * expected.max()
assert estimator.plan(None).closed == []
print("attention: all right")
"""


def test_attention_on_the_general_way_does_not_kill_the_process():
    assert "attention: all right" in fresh.run(ATTENTION)


# Nothing is changed.


def attributes(model):
    owners = [*model._flatten_layers(), model.optimizer]
    return [dict(vars(owner)) for owner in owners]


def assert_untouched(before, after):
    differences = [set(old) ^ set(new) for old, new in zip(before, after, strict=True)]
    assert not any(differences), differences
    for old, new in zip(before, after, strict=True):
        for name in set(old) & {"call", "activation", "apply_gradients", "train_step"}:
            assert new[name] is old[name]


def state(model):
    values = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.array(variable.numpy()) for variable in values]


@pytest.mark.parametrize("name", ["regularized", "attention_dropout", "batch_normalization"])
def test_nothing_of_the_model_is_changed(name):
    model, x, y = zoo.make(name, metrics=["mae"])
    model.train_on_batch(x, y)
    regularizers = [variable.regularizer for variable in model.trainable_variables]
    before, values = attributes(model), state(model)
    estimator = PerExampleGradients(model)
    data = batch(x, y)
    estimator.prepare(data)
    estimator.moments(data)
    tf.function(estimator.moments, autograph=False)(data)
    assert_untouched(before, attributes(model))
    for old, new in zip(values, state(model), strict=True):
        np.testing.assert_array_equal(old, new)
    assert [variable.regularizer for variable in model.trainable_variables] == regularizers
    assert model.losses == [] or name == "regularized"


class Breaks(layers.Layer):
    broken = False

    def call(self, x):
        if self.broken:
            raise ArithmeticError("in the middle")
        return x


def test_nothing_is_left_after_an_exception(monkeypatch):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, "tanh", kernel_regularizer="l2"),
            Breaks(),
            layers.Dense(2),
        ]
    )
    x, y = numbers(6, 4), numbers(6, 2, seed=1)
    compiled(model, x)
    estimator = PerExampleGradients(model)
    data = batch(x, y)
    estimator.prepare(data)
    before = attributes(model)
    monkeypatch.setattr(Breaks, "broken", True)
    with pytest.raises(ArithmeticError):
        estimator.moments(data)
    with pytest.raises(ArithmeticError), estimator.recording(data):
        model(x)
    assert_untouched(before, attributes(model))
    assert model.trainable_variables[0].regularizer is not None
    monkeypatch.undo()
    assert_right(model, x, y, estimator)
