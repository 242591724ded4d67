import copy
import pickle
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import keras_sgmcmc as sg
from keras_sgmcmc import guards
from keras_sgmcmc.fit_run import FitRun

pytestmark = pytest.mark.usefixtures("without_xla")

ROWS = 40
X = np.zeros((ROWS, 3), "float32")
Y = np.zeros((ROWS, 1), "float32")


def compiled(loss, outputs=(1,), loss_weights=None, kind="functional"):
    """A compiled model whose output has the shape (batch, *outputs)."""
    size = int(np.prod([n or 1 for n in outputs]))
    if None in outputs:
        inputs = keras.Input((None, 3))
        model = keras.Model(inputs, keras.layers.Dense(outputs[-1])(inputs))
    else:
        layers = [keras.layers.Dense(size), keras.layers.Reshape(outputs)]
        if kind == "sequential":
            model = keras.Sequential([keras.Input((3,)), *layers])
        elif kind == "subclassed":
            model = Subclassed(layers)
        else:
            inputs = keras.Input((3,))
            model = keras.Model(inputs, layers[1](layers[0](inputs)))
    optimizer = sg.SGLD(1e-3, train_size=ROWS, seed=1, jit_compile=False)
    model.compile(optimizer=optimizer, loss=loss, loss_weights=loss_weights)
    return model


class Subclassed(keras.Model):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def call(self, inputs):
        for part in self.parts:
            inputs = part(inputs)
        return inputs


def spec(*row):
    return tf.TensorSpec((None, *row))


def messages(model, targets=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guards.check_loss(model, targets)
    return [str(warning.message) for warning in caught]


def mean_function(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


def row_function(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred), axis=-1)


def sum_function(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


def labels_function(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


def gather_function(y_true, y_pred):
    return ops.take_along_axis(-ops.log_softmax(y_pred), ops.cast(y_true, "int32"), axis=-1)


class SumLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.sum(ops.square(y_true - y_pred))


class RowLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return row_function(y_true, y_pred)


# Compiled losses that are accepted without a word.


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        ("sparse_categorical_crossentropy", (5,), ()),
        ("categorical_crossentropy", (5,), (5,)),
        ("crossentropy", (5,), (1,)),
        ("binary_crossentropy", (1,), ()),
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), (5,), (1,)),
        (keras.losses.CategoricalCrossentropy(label_smoothing=0.1), (5,), (5,)),
        (keras.losses.BinaryCrossentropy(from_logits=True, reduction="mean"), (1,), (1,)),
        (keras.losses.sparse_categorical_crossentropy, (5,), ()),
        (sg.GaussianNegativeLogLikelihood(0.3), (4,), (4,)),
        (sg.GaussianNegativeLogLikelihood(0.3), (7, 4), (7, 4)),
        (sg.NegativeLogLikelihood(lambda y_pred: 1 / 0), (2,), (1,)),
        ("poisson", (1,), (1,)),
        (mean_function, (4,), (4,)),
        (row_function, (4,), (4,)),
        (labels_function, (4,), ()),
        (labels_function, (4,), (1,)),
        (gather_function, (4,), (1,)),
        (lambda y_true, y_pred: ops.square(y_true - y_pred), (1,), ()),
        (lambda y_true, y_pred: ops.square(y_true - y_pred), (1,), (1,)),
        (RowLoss(), (4,), (4,)),
        (lambda y_true, y_pred: {}["of no use on made-up numbers"], (4,), (4,)),
        (None, (4,), (4,)),
    ],
)
def test_accepted(loss, outputs, targets):
    model = compiled(loss, outputs)
    assert messages(model, spec(*targets)) == messages(model) == []


@pytest.mark.parametrize("kind", ["sequential", "subclassed"])
def test_accepted_in_other_models(kind):
    for loss, targets in [("ce", ()), (row_function, (4,)), (gather_function, (1,)), (None, (4,))]:
        assert messages(compiled(loss, (4,), kind=kind), spec(*targets)) == []


# Sums over rows.


@pytest.mark.parametrize("loss", [sum_function, SumLoss()], ids=["function", "object"])
@pytest.mark.parametrize("kind", ["functional", "subclassed"])
@pytest.mark.parametrize("targets", [None, spec(4)])
def test_a_sum_over_rows_is_refused(loss, kind, targets):
    with pytest.raises(ValueError, match="returns a sum over the rows of the batch"):
        guards.check_loss(compiled(loss, (4,), kind=kind), targets)


@pytest.mark.parametrize("reduction", ["sum", None, "none", "mean_with_sample_weight"])
@pytest.mark.parametrize(
    "make", [keras.losses.MeanSquaredError, keras.losses.SparseCategoricalCrossentropy, RowLoss]
)
def test_other_reductions_are_refused(reduction, make):
    loss = make(reduction=reduction)
    with pytest.raises(ValueError, match=f"`{loss.name}` has reduction="):
        guards.check_loss(compiled(loss, (4,)))


# Averages within a row.


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "terms"),
    [
        ("sparse_categorical_crossentropy", (7, 5), (7,), 7),
        (keras.losses.CategoricalCrossentropy(from_logits=True), (7, 5), (7, 5), 7),
        (keras.losses.CategoricalCrossentropy(label_smoothing=0.1), (7, 5), (7, 5), 7),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=0), (2, 3, 5), (2, 3), 6),
        ("binary_crossentropy", (4,), (4,), 4),
        (keras.losses.BinaryCrossentropy(), (3, 2), (3, 2), 6),
        (row_function, (7, 5), (7, 5), 7),
        (labels_function, (7, 5), (7,), 7),
        (gather_function, (7, 5), (7, 1), 7),
        (RowLoss(), (7, 5), (7, 5), 7),
    ],
)
def test_an_average_over_time_or_labels_is_refused_or_multiplied_back(
    loss, outputs, targets, terms
):
    targets = spec(*targets)
    with pytest.raises(ValueError, match=rf"multiply back with `loss_weights=\[{terms}\]`"):
        guards.check_loss(compiled(loss, outputs), targets)
    with pytest.raises(ValueError, match=r"tempers.*loss weight 2$"):
        guards.check_loss(compiled(loss, outputs, loss_weights=[2.0]), targets)
    assert messages(compiled(loss, outputs, loss_weights=[float(terms)]), targets) == []


def test_the_advice_is_taken():
    model = compiled("sparse_categorical_crossentropy", (7, 5), loss_weights=[7])
    targets = np.zeros((ROWS, 7))
    model.fit(X, targets, batch_size=10, callbacks=[sg.callbacks.ChainMonitor()], verbose=0)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [("sparse_categorical_crossentropy", (None,)), (row_function, (None, 5))],
)
def test_an_average_over_a_varying_number_of_steps_is_refused(loss, targets):
    model = compiled(loss, (None, 5), loss_weights=[7.0])
    with pytest.raises(ValueError, match=r"over \(None,\) time steps.*NegativeLogLikelihood"):
        guards.check_loss(model, spec(*targets))


def test_a_loss_weight_is_a_power_of_the_likelihood():
    (message,) = messages(compiled("sparse_categorical_crossentropy", (5,), loss_weights=[0.5]))
    assert "loss weight 0.5 of `sparse_categorical_crossentropy` raises the likelihood" in message


@pytest.mark.parametrize(
    ("loss", "outputs", "weight", "meaning"),
    [
        ("mse", (1,), None, "Gaussian noise of variance 0.5."),
        ("mean_squared_error", (4,), None, "Gaussian noise of variance 2."),
        (keras.losses.MeanSquaredError(), (3, 2), None, "Gaussian noise of variance 3."),
        (keras.losses.mean_squared_error, (1,), [50.0], "Gaussian noise of variance 0.01."),
        ("mae", (1,), None, "Laplace noise of scale 1."),
        (keras.losses.MeanAbsoluteError(), (4,), [2.0], "Laplace noise of scale 2."),
    ],
)
def test_squared_and_absolute_errors_say_which_noise_they_mean(loss, outputs, weight, meaning):
    (message,) = messages(compiled(loss, outputs, weight, "sequential"))
    assert meaning in message


def test_an_output_that_is_turned_off_is_not_checked():
    assert messages(compiled("mse", (4,), loss_weights=[0.0])) == []


@pytest.mark.parametrize(
    ("loss", "targets"),
    [({"nobody": "mse"}, None), (["mse", "mse", "mse"], None), (["mse", "mse"], [spec(1)] * 3)],
)
def test_what_does_not_match_is_left_to_keras(loss, targets):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])
    model.compile(optimizer="sgd", loss=loss)
    assert all("Gaussian noise" in message for message in messages(model, targets))


def test_squared_error_of_a_subclassed_model():
    (message,) = messages(compiled("mse", (4,), kind="subclassed"))
    assert "Gaussian noise of variance d / 2 for d outputs" in message


# Several outputs, and none.


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        (["sparse_categorical_crossentropy", "mse"], None),
        ({"a": "sparse_categorical_crossentropy", "b": "mse"}, None),
        ({"b": "mse", "a": "sparse_categorical_crossentropy"}, {"b": 1.0, "a": 1.0}),
        ({"b": "mse"}, None),
        ([None, "mse"], [0.5, 1.0]),
    ],
)
@pytest.mark.parametrize("structure", [list, dict])
def test_several_outputs(loss, weights, structure):
    inputs = keras.Input((3,))
    a = keras.layers.Dense(5, name="a")(inputs)
    b = keras.layers.Dense(2, name="b")(inputs)
    if structure is dict and isinstance(loss, list):
        pytest.skip("Keras wants a dict of losses for a dict of outputs")
    model = keras.Model(inputs, [a, b] if structure is list else {"a": a, "b": b})
    model.compile(optimizer="sgd", loss=loss, loss_weights=weights)
    targets = [spec(), spec(2)] if structure is list else {"b": spec(2), "a": spec()}
    (message,) = messages(model, targets)
    assert messages(model) == [message]
    assert "`mean_squared_error`" in message
    assert "variance 1." in message


def test_a_fault_of_one_output_is_found():
    inputs = keras.Input((3,))
    outputs = [keras.layers.Dense(5, name=name)(inputs) for name in ("a", "b")]
    model = keras.Model(inputs, outputs)
    model.compile(optimizer="sgd", loss={"a": row_function, "b": sum_function})
    with pytest.raises(ValueError, match="`sum_function` returns a sum"):
        guards.check_loss(model, [spec(5), spec(5)])


class OwnLoss(keras.Model):
    """Compiled without a loss: `compute_loss` or `add_loss` make it."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        outputs = self.dense(inputs)
        if self.way == "add_loss":
            self.add_loss(ops.mean(ops.square(outputs)))
        return outputs

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if self.way == "compute_loss":
            return ops.mean(ops.square(y_pred))
        return super().compute_loss(x, y, y_pred, sample_weight, training)


@pytest.mark.parametrize("way", ["add_loss", "compute_loss"])
def test_models_with_a_loss_of_their_own(way):
    model = OwnLoss(way)
    model.compile(optimizer=sg.SGLD(1e-3, train_size=ROWS, seed=1, jit_compile=False))
    samples = sg.callbacks.PosteriorSamples(0)
    model.fit(X, Y, batch_size=10, callbacks=[samples], verbose=0)
    assert list(samples.posterior.steps) == [1, 2, 3, 4]


# In `fit`.


def fit_warnings(model, *data, callbacks=None, **arguments):
    callbacks = callbacks or [sg.callbacks.ChainMonitor()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(*data, callbacks=callbacks, verbose=0, **arguments)
    return [str(w.message) for w in caught if "keras_sgmcmc" in w.filename]


def gaussian():
    return compiled(sg.GaussianNegativeLogLikelihood())


@pytest.mark.parametrize("kind", ["functional", "sequential"])
def test_a_refused_loss_is_refused_before_the_first_update(kind):
    model = compiled(row_function, (7, 5), kind=kind)
    with pytest.raises(ValueError, match="tempers the likelihood"):
        model.fit(
            X, np.zeros((ROWS, 7, 5)), callbacks=[sg.callbacks.PosteriorSamples(0)], verbose=0
        )
    assert int(model.optimizer.iterations) == 0


def test_the_loss_of_a_model_that_its_first_batch_builds_is_checked_after_it():
    model = keras.Sequential([keras.layers.Dense(35), keras.layers.Reshape((7, 5))])
    model.compile(
        optimizer=sg.SGLD(1e-3, train_size=ROWS, jit_compile=False),
        loss="sparse_categorical_crossentropy",
    )
    with pytest.raises(ValueError, match="tempers the likelihood"):
        model.fit(X, np.zeros((ROWS, 7)), callbacks=[sg.callbacks.ChainMonitor()], verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_each_warning_comes_once_a_fit_however_many_callbacks_watch():
    model = compiled("mse")
    callbacks = [
        sg.callbacks.PosteriorSamples(0),
        sg.callbacks.ChainMonitor(),
        sg.callbacks.PosteriorSamples(0, 2),
    ]
    for _ in range(2):
        found = fit_warnings(model, X, Y, batch_size=12, epochs=2, callbacks=callbacks)
        assert len(found) == 2
        assert "variance 0.5" in found[0]
        assert "uneven (12 rows at first, 40 in 4 batches)" in found[1]


def test_other_optimizers_are_not_checked():
    model = compiled("mse")
    model.compile(optimizer="sgd", loss=sum_function)
    assert fit_warnings(model, X, Y, batch_size=12) == []


def even_arrays():
    return gaussian(), (X, Y), {"batch_size": 10}


def rows_that_a_split_leaves():
    model = gaussian()
    model.optimizer.train_size = 30
    return model, (X, Y), {"batch_size": 10, "validation_split": 0.25}


def even_blocks():
    model = gaussian()
    model.compile(
        optimizer=model.optimizer, loss=sg.GaussianNegativeLogLikelihood(), steps_per_execution=3
    )
    return model, (X, Y), {"batch_size": 10, "epochs": 2}


def validation_data():
    return gaussian(), (X, Y), {"batch_size": 10, "validation_data": (X[:7], Y[:7]), "epochs": 2}


def weights():
    return gaussian(), (X, Y), {"batch_size": 10, "sample_weight": np.linspace(0, 1, ROWS)}


def parts_of_an_infinite_dataset():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(10)
    return gaussian(), (data,), {"steps_per_epoch": 2, "epochs": 3}


def parts_of_a_dataset():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    return gaussian(), (data,), {"steps_per_epoch": 2, "epochs": 2}


def generator():
    return gaussian(), (((X[:10], Y[:10]) for _ in range(9)),), {}


def a_few_rows_off():
    model = gaussian()
    model.optimizer.train_size = 39
    return model, (X, Y), {"batch_size": 10}


def minibatches():
    return gaussian(), (sg.minibatches(X, Y, 7, steps=3, seed=1),), {}


def mapped_minibatches():
    data = sg.minibatches(X, Y, 7, steps=3, seed=1).map(lambda x, y: (x + 1, y)).prefetch(2)
    return gaussian(), (data,), {}


def no_train_size():
    model = gaussian()
    loss = sg.GaussianNegativeLogLikelihood()
    model.compile(optimizer=sg.SGLD(1e-3, temperature=0, jit_compile=False), loss=loss)
    return model, (X, Y), {"batch_size": 12}


class OwnStep(Subclassed):
    """The loop of Keras' guides: a loss tracker that counts batches."""

    def __init__(self, tracker):
        super().__init__([keras.layers.Dense(1)])
        self.tracker = tracker

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def own_step(name="loss"):
    model = OwnStep(keras.metrics.Mean(name=name))
    model.compile(
        optimizer=sg.SGLD(1e-3, train_size=ROWS, seed=1, jit_compile=False),
        loss=sg.GaussianNegativeLogLikelihood(),
    )
    return model, (X, Y), {"batch_size": 12}


def own_step_and_metric():
    return own_step("mine")


@pytest.mark.parametrize(
    "case",
    [
        even_arrays,
        rows_that_a_split_leaves,
        even_blocks,
        validation_data,
        weights,
        parts_of_an_infinite_dataset,
        parts_of_a_dataset,
        generator,
        a_few_rows_off,
        minibatches,
        mapped_minibatches,
        no_train_size,
        own_step,
        own_step_and_metric,
    ],
)
def test_no_warning(case):
    model, data, arguments = case()
    assert fit_warnings(model, *data, **arguments) == []


def validation_split():
    return gaussian(), (X, Y), {"batch_size": 10, "validation_split": 0.25}, "feeds 30 rows"


def train_size_of_other_data():
    model = gaussian()
    model.optimizer.train_size = 400
    return model, (X, Y), {"batch_size": 10, "epochs": 2}, "train_size=400.* pass `train_size=40`"


def repeated_dataset():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).repeat(3).batch(10)
    return gaussian(), (data,), {}, "An epoch feeds 120 rows"


def minibatches_of_other_data():
    data = sg.minibatches(X[:30], Y[:30], 10, seed=1)
    return gaussian(), (data,), {}, "`train_size=40` .* is not the 30 rows of `minibatches`"


def mapped_minibatches_of_other_data():
    data = sg.minibatches(X[:39], Y[:39], 10, seed=1).map(lambda x, y: (x + 1, y))
    return gaussian(), (data,), {}, "`train_size=40` .* is not the 39 rows of `minibatches`"


def uneven_arrays():
    return gaussian(), (X, Y), {"batch_size": 39, "epochs": 2}, "uneven .39 rows at first, 40 in 2"


def uneven_blocks():
    model, data, arguments = even_blocks()
    return model, data, {**arguments, "batch_size": 9}, "uneven .9 rows at first, 40 in 5"


def uneven_parts():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12).repeat()
    return gaussian(), (data,), {"steps_per_epoch": 8}, "uneven .12 rows at first, 80 in 8"


@pytest.mark.parametrize(
    "case",
    [
        validation_split,
        train_size_of_other_data,
        repeated_dataset,
        minibatches_of_other_data,
        mapped_minibatches_of_other_data,
        uneven_arrays,
        uneven_blocks,
        uneven_parts,
    ],
)
def test_one_warning(case):
    model, data, arguments, message = case()
    train_size = model.optimizer.train_size
    (found,) = fit_warnings(model, *data, **arguments)
    assert re.search(message, found)
    assert model.optimizer.train_size == train_size  # what the user said stays


# Nothing stays on the model.


class Stop(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        raise KeyboardInterrupt


def is_guarded(model):
    return isinstance(model.train_function, FitRun)


def test_the_look_at_the_data_leaves_nothing_on_the_model():
    model = gaussian()
    model.fit(X, Y, batch_size=10, verbose=0)
    plain = model.train_function
    model.fit(X, Y, batch_size=10, callbacks=[sg.callbacks.ChainMonitor()], verbose=0)
    assert model.train_function is plain


@pytest.mark.parametrize("then", ["fit", "guarded fit", "train_on_batch", "pickle", "copy", "save"])
def test_an_interruption_before_the_first_batch_does_no_harm(then, tmp_path):
    model = gaussian()
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, callbacks=[sg.callbacks.ChainMonitor(), Stop()], verbose=0)
    assert is_guarded(model)
    if then == "fit":
        assert (
            fit_warnings(model, X, Y, batch_size=12, callbacks=[keras.callbacks.Callback()]) == []
        )
    elif then == "guarded fit":
        assert len(fit_warnings(model, X, Y, batch_size=12)) == 1
    elif then == "train_on_batch":
        model.train_on_batch(X, Y)
        assert int(model.optimizer.iterations) == 1
        return
    else:
        if then == "pickle":
            again = pickle.loads(pickle.dumps(model))
        elif then == "copy":
            again = copy.deepcopy(model)
        else:
            model.save(tmp_path / "model.keras")
            again = keras.saving.load_model(tmp_path / "model.keras")
        assert not is_guarded(again)
        again.fit(X, Y, batch_size=10, verbose=0)
        assert int(again.optimizer.iterations) == 4
        return
    assert not is_guarded(model)


def test_checkpoints_of_a_guarded_fit_are_plain(tmp_path):
    model = gaussian()
    save = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    model.fit(X, Y, batch_size=10, callbacks=[sg.callbacks.PosteriorSamples(0), save], verbose=0)
    again = keras.saving.load_model(tmp_path / "1.keras")
    assert int(again.optimizer.iterations) == 4


def test_a_loop_of_the_users_own():
    model = gaussian()
    samples = sg.callbacks.PosteriorSamples(0)
    callbacks = keras.callbacks.CallbackList([samples], model=model)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for batch in range(3):
        callbacks.on_train_batch_begin(batch)
        logs = model.train_on_batch(X[:10], Y[:10], return_dict=True)
        callbacks.on_train_batch_end(batch, logs)
    callbacks.on_epoch_end(0)
    callbacks.on_train_end()
    assert list(samples.posterior.steps) == [1, 2, 3]
    assert fit_warnings(model, X, Y, batch_size=10) == []
