import copy
import pickle
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import keras_sgmcmc as sg
from keras_sgmcmc.fit_run import FitRun

pytestmark = pytest.mark.usefixtures("without_xla")

ROWS = 20
X = np.arange(ROWS, dtype="float32")[:, None]
Y = np.zeros((ROWS, 1), "float32")


class Sums(sg.callbacks.InGraphCallback):
    """Counts batches and updates, and adds up what the batches hold, inside the step."""

    def __init__(self):
        self.created, self.wrapped, self.traced = [], 0, 0

    def create_state(self):
        assert self.model.trainable_variables
        assert self.optimizer.built
        assert tf.executing_eagerly()
        self.created.append(self.model)
        self.batches, self.updates, self.total = (
            keras.Variable(0.0, trainable=False) for _ in range(3)
        )

    def wrap(self, step):
        self.wrapped += 1

        def wrapped(data):
            self.traced += 1
            before = tf.identity(ops.convert_to_tensor(self.optimizer.iterations))
            logs = step(data)
            moved = ops.convert_to_tensor(self.optimizer.iterations) - before
            self.updates.assign_add(ops.cast(moved, "float32"))
            self.batches.assign_add(1.0)
            self.total.assign_add(ops.sum(ops.cast(data[0], "float32")))
            return {**logs, "total": ops.convert_to_tensor(self.total)}

        return wrapped

    @property
    def counts(self):
        return tuple(float(v.numpy()) for v in (self.batches, self.updates, self.total))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")

    def call(self, inputs):
        return self.dense(inputs)


class OwnStep(Subclassed):
    """Its own train_step, which logs something of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"mine": loss}


class WithoutCall(OwnStep):
    """Trains its layer without being a function itself."""

    call = keras.Model.call

    def __init__(self):
        super().__init__()
        self.dense.build((None, 1))

    def __call__(self, inputs, training=None):
        return self.dense(inputs)


def make(kind="functional", optimizer=None, **compile_arguments):
    dense = keras.layers.Dense(1, kernel_initializer="zeros")
    if kind == "functional":
        inputs = keras.Input((1,))
        model = keras.Model(inputs, dense(inputs))
    elif kind == "sequential":
        model = keras.Sequential([keras.Input((1,)), dense])
    elif kind == "unbuilt":
        model = keras.Sequential([dense])
    else:
        model = {"subclassed": Subclassed, "own step": OwnStep, "without call": WithoutCall}[kind]()
    optimizer = optimizer or sg.SGLD(1e-3, train_size=ROWS, seed=1, jit_compile=False)
    model.compile(optimizer=optimizer, loss=sg.GaussianNegativeLogLikelihood(), **compile_arguments)
    return model


def fit(model, *callbacks, **arguments):
    arguments = {"batch_size": 2, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(X, Y, callbacks=list(callbacks), **arguments)


def is_plain(model):
    return "train_step" not in vars(model) and not isinstance(model.train_function, FitRun)


# Every batch, in every mode.


@pytest.mark.parametrize(
    ("kind", "compile_arguments"),
    [
        ("functional", {}),
        ("functional", {"steps_per_execution": 5, "jit_compile": True}),
        ("functional", {"steps_per_execution": 4, "run_eagerly": True}),
        ("sequential", {"steps_per_execution": 4}),
        ("unbuilt", {}),
        ("unbuilt", {"jit_compile": True, "steps_per_execution": 4}),
        ("unbuilt", {"run_eagerly": True}),
        ("subclassed", {}),
        ("own step", {"jit_compile": True}),
        ("own step", {"steps_per_execution": 4}),
        ("own step", {"run_eagerly": True}),
        ("without call", {}),
    ],
    ids=str,
)
def test_every_batch_is_seen_and_the_chain_is_that_of_the_plain_step(kind, compile_arguments):
    plain, model, sums = make(kind, **compile_arguments), make(kind, **compile_arguments), Sums()
    expected = fit(plain, epochs=2).history
    history = fit(model, sums, epochs=2).history
    assert sums.counts == (20, 20, 2 * X.sum())
    assert sums.created == [model]
    assert sums.wrapped == 1
    if not compile_arguments.get("run_eagerly"):
        assert sums.traced == 1
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert history.pop("total") == [X.sum(), 2 * X.sum()]
    assert history == expected
    assert is_plain(model)


def test_logs_reach_the_progress_bar(capsys):
    fit(make(), Sums(), verbose=2)
    assert "total: 190" in capsys.readouterr().out


def test_uneven_batches_validation_and_weights():
    model, sums = make(), Sums()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = fit(
            model, sums, batch_size=3, validation_data=(X, Y), epochs=2, sample_weight=np.ones(ROWS)
        )
    assert sums.counts == (14, 14, 2 * X.sum())
    assert len(history.history["val_loss"]) == 2
    assert "val_total" not in history.history


def test_structures_of_data_reach_the_callback_and_build_the_model():
    class Several(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs["a"] + inputs["b"])

    class Look(sg.callbacks.InGraphCallback):
        def wrap(self, step):
            def wrapped(data):
                self.structure = tf.nest.map_structure(lambda t: t.shape.rank, data)
                return step(data)

            return wrapped

    model, look = Several(), Look()
    model.compile("sgd", "mse")
    data = ({"a": X, "b": X}, Y)
    model.fit(*data, sample_weight=np.ones(ROWS), callbacks=[look], verbose=0)
    assert look.structure == ({"a": 2, "b": 2}, 2, 1)


def test_gradient_accumulation():
    optimizer = sg.SGLD(
        1e-3, train_size=ROWS, gradient_accumulation_steps=3, seed=1, jit_compile=False
    )
    sums = Sums()
    fit(make(optimizer=optimizer), sums, epochs=2)
    assert sums.counts == (20, 6, 2 * X.sum())


@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_skipped_step_is_seen(jit_compile):
    inner = sg.SGLD(1e-3, train_size=ROWS, seed=1, jit_compile=False)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**127)
    model, sums = make(optimizer=optimizer, jit_compile=jit_compile), Sums()
    model.fit(X + 1, Y + 100, batch_size=2, callbacks=[sums], verbose=0)
    batches, updates, _ = sums.counts
    assert batches == 10
    assert updates == int(optimizer.iterations) < 10


def test_mixed_float16():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model, sums = make(), Sums()
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        fit(model, sums)
    finally:
        keras.config.set_dtype_policy(policy)
    assert sums.counts[:2] == (10, int(model.optimizer.iterations))


def test_a_plain_optimizer():
    sums = Sums()
    fit(make(optimizer=keras.optimizers.Adam()), sums)
    assert sums.counts == (10, 10, X.sum())


def test_several_optimizers_are_refused_by_name():
    optimizer = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD())
    )
    with pytest.raises(ValueError, match=r"`MultiOptimizer` has several.*one sampler for all"):
        fit(make(optimizer=optimizer), Sums())


# Several callbacks, one trace.


class Logged(sg.callbacks.InGraphCallback):
    """Writes down in which order the steps are entered while they are traced."""

    entered = ()

    def __init__(self, name, entered):
        self.name, self.entered = name, entered
        self.wrapped = 0

    def wrap(self, step):
        self.wrapped += 1

        def wrapped(data):
            self.entered.append(self.name)
            return step(data)

        return wrapped


def test_several_callbacks_share_a_trace_and_the_first_is_the_innermost():
    entered = []
    a, b = Logged("a", entered), Logged("b", entered)
    model, monitor = make(), sg.callbacks.ChainMonitor()
    fit(model, a, monitor, b, epochs=2)
    assert entered == ["b", "a"]


def test_a_set_of_callbacks_is_traced_once():
    entered = []
    a, b = Logged("a", entered), Logged("b", entered)
    model = make()
    plain = None
    for callbacks in ([], [a], [a, b], [a], [], [b], [a, b], [a], [b]):
        fit(model, *callbacks)
        plain = plain or model.train_function
        assert model.train_function is plain
    assert sorted(entered) == ["a", "a", "b", "b"]  # [a], [b], and both in [a, b]
    assert (a.wrapped, b.wrapped) == (2, 2)


def test_few_traces_are_kept():
    a, model = Sums(), make()
    for _ in range(6):
        fit(model, a, Sums(), batch_size=20)
    assert len(a.compositions) == 4


def test_compile_makes_a_new_trace_and_keeps_the_state():
    model, sums = make(), Sums()
    fit(model, sums)
    model.compile(
        optimizer=sg.SGLD(1e-3, train_size=ROWS, jit_compile=False),
        loss=sg.GaussianNegativeLogLikelihood(),
    )
    fit(model, sums)
    assert (sums.wrapped, sums.traced) == (2, 2)
    assert sums.created == [model]
    assert sums.counts[:2] == (20, 20)
    assert len(sums.compositions) == 1


def test_another_model_gets_a_state_of_its_own():
    one, other, sums = make(), make(), Sums()
    for model in (one, other, one):
        fit(model, sums)
        assert sums.counts == (10, 10, X.sum())
    assert sums.created == [one, other, one]
    assert sums.wrapped == 3


def test_retrace():
    class Switch(sg.callbacks.InGraphCallback):
        value = 0.0
        wrapped = 0

        def wrap(self, step):
            self.wrapped += 1
            value = self.value
            return lambda data: {**step(data), "value": tf.constant(value)}

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append(float(logs["value"]))
            if batch == 3:
                self.value = 7.0
                self.retrace()

    model, switch, sums = make(), Switch(), Sums()
    switch.seen = []
    fit(model, sums, switch)
    assert switch.seen == 4 * [0.0] + 6 * [7.0]
    assert (switch.wrapped, sums.wrapped) == (2, 2)
    assert sums.counts == (10, 10, X.sum())


# Nothing stays on the model.


class Break(keras.callbacks.Callback):
    def __init__(self, at, error=KeyboardInterrupt):
        super().__init__()
        self.at, self.error = at, error

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.at:
            raise self.error


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_the_plain_step(at, error):
    model, sums = make(), Sums()
    fit(model)
    plain = model.train_function
    with pytest.raises(error):
        fit(model, sums, Break(at, error))
    assert "train_step" not in vars(model)
    before = sums.counts if at else None
    model.train_on_batch(X, Y)
    fit(model)
    assert model.train_function is plain
    assert is_plain(model)
    if at:
        assert sums.counts == before == (3, 3, X[:6].sum())
    fit(model, sums)
    assert sums.counts[0] == at + 10
    assert sums.traced == 1


class Faulty(sg.callbacks.InGraphCallback):
    def __init__(self, where):
        self.where = where

    def create_state(self):
        if self.where == "create_state":
            raise ArithmeticError("mine")

    def wrap(self, step):
        if self.where == "wrap":
            raise ArithmeticError("mine")

        def wrapped(data):
            if self.where == "step":
                raise ArithmeticError("mine")
            return step(data)

        return wrapped


@pytest.mark.parametrize("where", ["create_state", "wrap", "step"])
def test_errors_of_a_callback_come_out_of_fit_and_leave_nothing(where):
    model, faulty = make(run_eagerly=True), Faulty(where)
    with pytest.raises(ArithmeticError, match="mine"):
        fit(model, faulty)
    assert "train_step" not in vars(model)
    fit(model)
    assert is_plain(model)
    faulty.where = None
    fit(model, faulty)
    assert int(model.optimizer.iterations) == 20


def test_wrap_has_to_return_a_step():
    class Forgetful(sg.callbacks.InGraphCallback):
        def wrap(self, step):
            pass

    with pytest.raises(TypeError, match=r"`Forgetful.wrap` should return a function.*None"):
        fit(make(), Forgetful())


def test_train_on_batch_is_plain_also_in_a_fit():
    class TrainOnBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.train_on_batch(X, Y)

    model, sums = make(), Sums()
    fit(model, sums, TrainOnBatch())
    assert sums.counts == (10, 10, X.sum())
    assert int(model.optimizer.iterations) == 20


def test_evaluate_and_predict_leave_nothing():
    model, sums = make(), Sums()
    fit(model)
    model.evaluate(X, Y, callbacks=[sums], verbose=0)
    model.predict(X, callbacks=[sums], verbose=0)
    fit(model)
    assert is_plain(model)
    assert sums.wrapped == 0


def test_a_step_of_the_users_own_on_the_model_is_wrapped_and_stays():
    model, sums, called = make(), Sums(), []
    inherited = model.train_step

    def own(data):
        called.append(1)
        return inherited(data)

    model.train_step = own
    fit(model, sums)
    assert model.train_step is own
    assert called == [1]
    assert sums.counts == (10, 10, X.sum())


def test_no_batch_no_trace():
    model, sums = make(), Sums()
    fit(model, sums, initial_epoch=1)
    assert sums.wrapped == 0
    assert is_plain(model)


def test_a_loop_of_the_users_own_has_the_plain_step():
    model, sums = make(), Sums()
    for _ in range(2):
        callbacks = keras.callbacks.CallbackList([sums], model=model)
        callbacks.on_train_begin()
        model.train_on_batch(X, Y)
        callbacks.on_train_end()
        assert is_plain(model)
    assert sums.wrapped == 0


def test_the_callbacks_of_an_interrupted_fit_again():
    model, sums = make(), Sums()
    stop = Break(3)
    callbacks = keras.callbacks.CallbackList([sums, stop], add_history=True, model=model)
    for at in (3, None):
        stop.at = at
        try:
            model.fit(X, Y, batch_size=2, verbose=0, callbacks=callbacks)
        except KeyboardInterrupt:
            assert at == 3
    assert sums.counts[:2] == (13, 13)
    assert sums.traced == 1
    assert is_plain(model)


@pytest.mark.parametrize(
    ("when", "way"),
    [("during", way) for way in ("save", "pickle", "copy", "clone", "weights")]
    + [("after", "save")],
)
def test_files_and_copies_carry_nothing(when, way, tmp_path):
    model, sums, made = make(), Sums(), []

    def duplicate():
        if way == "pickle":
            return pickle.loads(pickle.dumps(model))
        if way == "copy":
            return copy.deepcopy(model)
        if way == "clone":
            clone = keras.models.clone_model(model)
            clone.compile(optimizer="sgd", loss="mse")
            return clone
        if way == "weights":
            model.save_weights(tmp_path / "model.weights.h5")
            again = make()
            again.load_weights(tmp_path / "model.weights.h5")
            return again
        model.save(tmp_path / "model.keras")
        return keras.saving.load_model(tmp_path / "model.keras")

    class Duplicate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                made.append(duplicate())

    fit(model, sums, *([Duplicate()] if when == "during" else []))
    if when == "after":
        made.append(duplicate())
    (again,) = made
    assert is_plain(again)
    fit(again)
    assert sums.counts == (10, 10, X.sum())


@pytest.mark.parametrize("way", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_callback_can_be_copied_after_a_fit(way):
    entered = []
    callback = Logged("a", entered)
    fit(make(), callback)
    again = way(callback)
    assert again.compositions == ()
    fit(make(), again)
    assert again.wrapped == 2


# Building.


@pytest.mark.filterwarnings("ignore:.build.* was called on layer 'auxiliary'")
def test_what_only_training_uses_is_built_and_nothing_else_moves():
    class Auxiliary(keras.Model):
        def __init__(self):
            super().__init__()
            self.normalize = keras.layers.BatchNormalization()
            self.drop = keras.layers.Dropout(0.5, seed=1)
            self.dense = keras.layers.Dense(1, kernel_initializer="zeros")
            self.auxiliary = keras.layers.Dense(1, kernel_initializer="zeros")

        def call(self, inputs, training=False):
            hidden = self.drop(self.normalize(inputs), training=training)
            return self.dense(hidden) + (self.auxiliary(inputs) if training else 0.0)

    models = Auxiliary(), Auxiliary()
    for model, callbacks in zip(models, ([Sums()], []), strict=True):
        model.compile(
            optimizer=sg.SGLD(1e-3, train_size=ROWS, seed=1, jit_compile=False),
            loss=sg.GaussianNegativeLogLikelihood(),
        )
        fit(model, *callbacks)
    for one, other in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:Layer 'untraceable'", "ignore:.build.* was called on layer")
def test_a_model_that_shapes_alone_do_not_build():
    class Untraceable(Subclassed):
        def call(self, inputs):
            return self.dense(tf.constant(inputs.numpy()))

    with pytest.raises(ValueError, match=r"could not be built from the shapes.*`model\(x\[:1\]\)`"):
        fit(_compiled(Untraceable()), Sums())
    model = Untraceable()
    model(X[:1])
    sums = Sums()
    fit(_compiled(model), sums)
    assert sums.counts == (10, 10, X.sum())


def _compiled(model):
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    return model


# Replicas.


@pytest.mark.filterwarnings("error::UserWarning")
def test_two_replicas(mirrored):
    x, y = np.arange(20.0)[:, None], np.zeros((20, 1))

    class Totals(sg.callbacks.InGraphCallback):
        def create_state(self):
            assert tf.distribute.get_strategy() is mirrored
            assert tf.distribute.in_cross_replica_context()
            self.steps = tf.Variable(
                0.0,
                trainable=False,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
            self.total = tf.Variable(
                0.0,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

        def wrap(self, step):
            def wrapped(data):
                self.steps.assign_add(1.0)
                self.total.assign_add(tf.reduce_sum(data[0]))
                return {**step(data), "rows": tf.shape(data[0])[0]}

            return wrapped

    def make(**arguments):
        with mirrored.scope():
            model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")])
            model.compile(
                optimizer=sg.SGLD(1e-3, train_size=20, seed=1, jit_compile=False),
                loss=sg.GaussianNegativeLogLikelihood(),
                **arguments,
            )
        return model

    def fit(model, *callbacks, data=(x, y), **arguments):
        if len(data) == 2:
            arguments["batch_size"] = 4
        return model.fit(*data, shuffle=False, verbose=0, callbacks=callbacks, **arguments)

    sums, model, plain = Totals(), make(), make()
    rows = fit(model, sums).history["rows"]
    fit(plain)
    assert rows == [2], rows
    assert float(sums.steps.numpy()) == 5
    assert float(sums.total.numpy()) == 190
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    fit(model)
    assert float(sums.steps.numpy()) == 5
    assert "train_step" not in vars(model)

    data = sg.minibatches(x, y, 4, seed=1, steps=5)
    fit(model, sums, data=(data,))  # ten updates were before
    assert data.position == 15, data.position

    for name, value in (("steps_per_execution", 2), ("jit_compile", True)):
        for callback in (Totals(), sg.callbacks.ChainMonitor()):
            model = make(**{name: value})
            with pytest.raises(ValueError, match=f"`{name}={value}` on 2 replicas"):
                fit(model, callback)
