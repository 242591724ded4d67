"""What a fit with callbacks makes of its data: where they begin, and what they should be."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sgmcmc as sg
from keras_sgmcmc.fit_run import FitRun

pytestmark = pytest.mark.usefixtures("without_xla")

ROWS = 30
RNG = np.random.default_rng(1)
X = RNG.standard_normal((ROWS, 2)).astype("float32")
Y = RNG.standard_normal((ROWS, 1)).astype("float32")


def make(optimizer=None, **arguments):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    optimizer = optimizer or sg.SGLD(0.05, train_size=ROWS, seed=1, jit_compile=False, **arguments)
    model.compile(optimizer=optimizer, loss=sg.GaussianNegativeLogLikelihood())
    return model


def batches(steps=5, **arguments):
    return sg.minibatches(X, Y, 4, seed=3, steps=steps, **arguments)


def fit(model, data, *callbacks, epochs=1, **arguments):
    return model.fit(
        data, epochs=epochs, callbacks=list(callbacks), shuffle=False, verbose=0, **arguments
    )


class Break(keras.callbacks.Callback):
    """Ends a fit before batch number `at` of it."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def on_train_batch_begin(self, batch, logs=None):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1


monitors = pytest.mark.parametrize(
    "callback", [sg.callbacks.ChainMonitor, sg.callbacks.InGraphCallback]
)


def chain_of(steps, **arguments):
    """The weights of one uninterrupted fit."""
    model = make(**arguments)
    fit(model, batches(steps), sg.callbacks.ChainMonitor())
    return model.get_weights()


def assert_same(weights, others):
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(one, other)


# Step t sees batch t.


@monitors
@pytest.mark.parametrize(("fresh", "save_freq", "total"), [(True, 1, 17), (False, "epoch", 15)])
def test_a_restored_chain_is_the_uninterrupted_one(callback, fresh, save_freq, total, tmp_path):
    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=save_freq)

    data = batches()
    with pytest.raises(KeyboardInterrupt):
        fit(make(), data, backup(), callback(), Break(7), epochs=3)
    assert data.position == 7
    # Keras begins the broken epoch anew, with the weights of step 7 or of its begin.
    model = make()
    data = batches() if fresh else data
    fit(model, data, callback(), backup(), epochs=3)
    assert int(model.optimizer.iterations) == data.position == total
    assert_same(model.get_weights(), chain_of(total))


@monitors
def test_two_fits_are_one_long_fit(callback):
    model, data = make(), batches()
    fit(model, data, callback())
    model.evaluate(data, verbose=0)  # takes batches too
    assert data.position == 10
    fit(model, data, callback(), epochs=2)
    assert data.position == 15
    assert_same(model.get_weights(), chain_of(15))


@monitors
def test_a_fit_that_broke_off_goes_on(callback):
    model, data = make(), batches()
    with pytest.raises(KeyboardInterrupt):
        fit(model, data, callback(), Break(7), epochs=2)
    fit(model, batches(), callback())
    assert_same(model.get_weights(), chain_of(12))


def test_a_step_counts_the_batches_that_were_accumulated():
    model = make(gradient_accumulation_steps=3)
    fit(model, batches(7), sg.callbacks.ChainMonitor())
    assert int(model.optimizer.iterations) == 2
    data = batches(5)
    fit(model, data, sg.callbacks.ChainMonitor())
    assert data.position == 12
    assert_same(model.get_weights(), chain_of(12, gradient_accumulation_steps=3))


def test_under_loss_scaling():
    model = make(
        keras.optimizers.LossScaleOptimizer(
            sg.SGLD(0.05, train_size=ROWS, seed=1, jit_compile=False)
        )
    )
    for position in (5, 10):
        data = batches()
        fit(model, data, sg.callbacks.ChainMonitor())
        assert data.position == position


@pytest.mark.parametrize("way", ["start_step", "position"])
def test_a_chosen_beginning_stays(way):
    model = make()
    fit(model, batches(), sg.callbacks.ChainMonitor())
    data = batches(start_step=100 if way == "start_step" else 0)
    if way == "position":
        data.position = 100
    for end in (105, 110):
        fit(model, data, sg.callbacks.ChainMonitor())
        assert data.position == end


@pytest.mark.parametrize("arguments", [{}, {"class_weight": {0: 1.0}}])
def test_batches_that_are_passed_on_one_by_one_begin_there_too(arguments):
    def passed_on():
        data = sg.minibatches(X, np.zeros(ROWS, int), 4, seed=3, steps=5)
        return data, data.map(lambda x, y: (x, y), num_parallel_calls=2).prefetch(3)

    model, once = make(), make()
    data, derived = passed_on()
    with pytest.raises(KeyboardInterrupt):
        fit(model, derived, sg.callbacks.ChainMonitor(), Break(3), **arguments)
    for fresh in (False, True):
        data, derived = passed_on() if fresh else (data, derived)
        fit(model, derived, sg.callbacks.ChainMonitor(), **arguments)
    assert data.position == 13
    fit(once, passed_on()[1].repeat(3), sg.callbacks.ChainMonitor(), steps_per_epoch=13)
    assert_same(model.get_weights(), once.get_weights())


def test_batches_that_are_regrouped_are_left_alone():
    model, data = make(), batches()
    for position in (5, 10):
        fit(model, data.unbatch().batch(2), sg.callbacks.ChainMonitor())
        assert data.position == position


def test_a_first_fit_goes_on_where_other_consumers_stopped():
    data = batches()
    list(data)
    fit(make(), data, sg.callbacks.ChainMonitor())
    assert data.position == 10


def test_without_these_callbacks_data_are_left_alone():
    model = make()
    fit(model, batches(), sg.callbacks.ChainMonitor())
    data = batches()
    fit(model, data)
    assert data.position == 5


# What is fed against the arguments of the sampler.


class UsesBatchNoise(sg.SGLD):
    uses_batch_noise = True

    def __init__(self, *args, batch_size=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.batch_size = batch_size


def noisy(batch_size=None, train_size=ROWS, **arguments):
    optimizer = UsesBatchNoise(
        0.05, train_size=train_size, batch_size=batch_size, jit_compile=False, **arguments
    )
    return make(optimizer)


def fit_warnings(model, data, *callbacks, **arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        fit(model, data, *callbacks, **arguments)
    return [str(w.message) for w in caught if "keras_sgmcmc" in w.filename]


def upstream():
    return batches().map(lambda x, y: (x + 0.0, y)).prefetch(2)


@monitors
@pytest.mark.parametrize("data", [batches, upstream])
def test_independent_batches_of_the_right_size_are_accepted(callback, data):
    assert fit_warnings(noisy(4), data(), callback(), epochs=2) == []
    model = noisy(12, gradient_accumulation_steps=3)
    assert fit_warnings(model, data(), callback()) == []


def rows_of_a_dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS).batch(5)


def test_reshuffled_data_are_found_for_a_method_that_uses_batch_noise():
    for _ in range(2):
        callbacks = [sg.callbacks.ChainMonitor(), sg.callbacks.InGraphCallback()]
        (found,) = fit_warnings(noisy(), rows_of_a_dataset(), *callbacks, epochs=2)
        assert "`UsesBatchNoise` turns the noise of the batches" in found
        assert "0.41 to 0.49 measured, where 1 is right" in found
        assert "`keras_sgmcmc.minibatches(x, y, batch_size)`" in found
    model = noisy()
    with pytest.warns(UserWarning, match="drawn independently"):
        model.fit(X, Y, batch_size=5, verbose=0, callbacks=[sg.callbacks.InGraphCallback()])


@monitors
def test_other_methods_may_be_fed_anything(callback):
    assert fit_warnings(make(), rows_of_a_dataset(), callback()) == []


@monitors
@pytest.mark.parametrize("data", [batches, upstream])
@pytest.mark.parametrize(
    ("accumulation", "message"),
    [
        (None, "`batch_size=5` .* is not the 4 rows .* Pass `batch_size=4`"),
        (3, "is not the 12 rows .* update, in 3 batches of 4: .* Pass `batch_size=12`"),
    ],
)
def test_another_batch_size_is_found(callback, data, accumulation, message):
    model = noisy(5, gradient_accumulation_steps=accumulation)
    with pytest.warns(UserWarning, match=message) as caught:
        fit(model, data(), callback(), epochs=2)
    assert len([w for w in caught if "batch_size=" in str(w.message)]) == 1


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (lambda: batches().unbatch().batch(5, drop_remainder=True), 0),
        (lambda: batches().unbatch().batch(5), 0),  # how many rows isn't known
        (lambda: batches().unbatch().batch(4, drop_remainder=True), 1),
    ],
)
def test_the_size_of_batches_that_are_regrouped(data, found):
    assert len(fit_warnings(noisy(5), data(), sg.callbacks.InGraphCallback())) == found


@monitors
def test_another_train_size_is_found_at_the_first_batch(callback):
    model = noisy(4, train_size=ROWS + 1)
    warned = pytest.warns(UserWarning, match="`train_size=31` .* is not the 30 rows")
    with warned, pytest.raises(KeyboardInterrupt):
        fit(model, batches(), callback(), Break(1))


def test_the_loss_of_an_unbuilt_model_is_checked_before_the_first_update():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(
        optimizer=sg.SGLD(1e-3, train_size=ROWS, jit_compile=False),
        loss=keras.losses.MeanSquaredError(reduction="sum"),
    )
    callbacks = sg.callbacks.ChainMonitor(), sg.callbacks.InGraphCallback()
    with pytest.raises(ValueError, match="reduction='sum'"):
        fit(model, batches(), *callbacks)
    assert int(model.optimizer.iterations) == 0


# The wrapper.


def test_steps_aside_after_the_first_batch_without_in_graph_callbacks():
    class Look(keras.callbacks.Callback):
        seen = ()

        def on_train_batch_end(self, batch, logs=None):
            self.seen = (*self.seen, isinstance(self.model.train_function, FitRun))

    for callback, expected in (
        (sg.callbacks.ChainMonitor, False),
        (sg.callbacks.InGraphCallback, True),
    ):
        look = Look()
        fit(make(), batches(), callback(), look)
        assert look.seen == 5 * (expected,)


def test_one_wrapper_for_all():
    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                self.run = self.model.train_function

    look = Look()
    callbacks = [
        sg.callbacks.ChainMonitor(),
        sg.callbacks.InGraphCallback(),
        sg.callbacks.PosteriorSamples(0),
        look,
    ]
    fit(make(), batches(), *callbacks)
    assert look.run.members == callbacks[:3]
    assert look.run.in_graph == callbacks[1:2]
    assert not isinstance(look.run.plain, FitRun)


def test_a_fit_without_batches_leaves_the_plain_function():
    model = make()
    fit(model, batches(), sg.callbacks.ChainMonitor(), initial_epoch=1)
    assert not isinstance(model.train_function, FitRun)


@monitors
def test_the_variables_of_a_method_do_not_have_the_step_traced_twice(callback):
    traces = []

    class Counted(keras.layers.Layer):
        def call(self, x):
            traces.append(x)
            return x

    model = keras.Sequential([keras.Input((2,)), Counted(), keras.layers.Dense(1)])
    sampler = sg.pSGLD(1e-3, train_size=ROWS, prior=1.0, jit_compile=False)
    model.compile(optimizer=sampler, loss=sg.GaussianNegativeLogLikelihood())
    traces.clear()
    fit(model, batches(), callback())
    assert len(traces) == 1
