import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sgmcmc as sg
from keras_sgmcmc.callbacks.step_callback import StepCallback

pytestmark = pytest.mark.usefixtures("without_xla")

X = np.ones((20, 1), "float32")


def first_output(y_true, y_pred):
    return y_pred[:, 0]


def counting_model(optimizer=None, built=True, **compile_arguments):
    """One weight that every update lowers by exactly 1, so that it says how many there were."""
    layers = [keras.Input((1,))] if built else []
    layers.append(keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"))
    model = keras.Sequential(layers)
    optimizer = optimizer or sg.SGLD(1.0, temperature=0, jit_compile=False)
    model.compile(optimizer=optimizer, loss=first_output, **compile_arguments)
    return model


def fit(model, *callbacks, epochs=1, **arguments):
    arguments = {"batch_size": 2, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(X, X, epochs=epochs, callbacks=list(callbacks), **arguments)


class Recorder(StepCallback):
    """Wants to be called at the multiples of `every`."""

    def __init__(self, every=1):
        super().__init__()
        self.every = every
        self.begins, self.steps, self.updates = [], [], []

    def begin(self):
        self.begins.append((self.step, self.last_step(), len(self.model.trainable_variables)))

    def next_due(self):
        return (self.step // self.every + 1) * self.every

    def on_due(self, logs):
        self.steps.append(self.step)
        self.updates.append(-float(self.model.trainable_variables[0].numpy()[0, 0]))


class Interrupt(keras.callbacks.Callback):
    def __init__(self, batch, error=KeyboardInterrupt):
        super().__init__()
        self.batch, self.error = batch, error

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            raise self.error


@pytest.mark.parametrize(
    ("compile_arguments", "every", "expected"),
    [
        ({}, 7, [7, 14]),
        ({"run_eagerly": True}, 7, [7, 14]),
        ({"jit_compile": True}, 7, [7, 14]),
        # Ten batches in blocks of four: Keras calls back after steps 4, 8, 10, 14, 18 and 20.
        ({"steps_per_execution": 4}, 1, [4, 8, 10, 14, 18, 20]),
        ({"steps_per_execution": 4}, 7, [8, 14]),
        ({"steps_per_execution": 4}, 9, [10, 18]),
    ],
)
def test_steps_are_those_of_the_optimizer(compile_arguments, every, expected):
    recorder = Recorder(every)
    fit(counting_model(**compile_arguments), recorder, epochs=2)
    assert recorder.begins == [(0, 20, 1)]
    assert recorder.steps == recorder.updates == expected


def test_gradient_accumulation_counts_updates():
    optimizer = sg.SGLD(1.0, temperature=0, gradient_accumulation_steps=3, jit_compile=False)
    recorder = Recorder(2)
    fit(counting_model(optimizer), recorder, epochs=3)
    assert recorder.begins == [(0, 10, 1)]
    assert recorder.steps == [2, 4, 6, 8, 10]
    np.testing.assert_allclose(recorder.updates, recorder.steps, rtol=1e-5)


def test_a_step_of_the_users_own_that_updates_twice():
    class Twice(keras.Sequential):
        def train_step(self, data):
            super().train_step(data)
            return super().train_step(data)

    model = Twice(counting_model().layers)
    sampler = sg.SGLD(1.0, temperature=0, jit_compile=False)
    model.compile(sampler, first_output)
    recorder, samples = Recorder(2), sg.callbacks.PosteriorSamples(0, 4)
    fit(model, recorder, samples)
    assert recorder.steps == recorder.updates == list(range(2, 21, 2))
    assert list(samples.posterior.steps) == [4, 8, 12, 16, 20]


def test_a_step_that_loss_scaling_skips_does_not_count():
    optimizer = keras.optimizers.LossScaleOptimizer(
        sg.SGLD(1.0, temperature=0, jit_compile=False), initial_scale=2.0**127
    )
    model, recorder = counting_model(optimizer), Recorder(2)
    # The gradient is 2, which overflows when scaled at first: one step is skipped.
    model.fit(2 * X, X, batch_size=2, callbacks=[recorder], verbose=0)
    assert recorder.begins == [(0, 10, 1)]
    assert recorder.steps == [2, 4, 6, 8]
    assert recorder.updates == [4, 8, 12, 16]


def test_a_second_fit_goes_on_counting_also_after_an_interruption():
    model, recorder = counting_model(), Recorder(4)
    fit(model, recorder)
    with pytest.raises(KeyboardInterrupt):
        fit(model, recorder, Interrupt(4))
    fit(model, recorder)
    assert recorder.begins == [(0, 10, 1), (10, 20, 1), (15, 25, 1)]
    assert recorder.steps == recorder.updates == [4, 8, 12, 16, 20, 24]


def test_epochs_of_one_step_and_initial_epoch():
    recorder = Recorder(3)
    fit(counting_model(), recorder, epochs=8, initial_epoch=1, batch_size=20)
    assert recorder.begins == [(0, 7, 1)]
    assert recorder.steps == [3, 6]


@pytest.mark.parametrize("steps_per_epoch", [None, 10])
def test_data_of_unknown_length(steps_per_epoch):
    def batches():
        for _ in range(10 if steps_per_epoch is None else 1000):
            yield X[:2], X[:2]

    model, recorder = counting_model(), Recorder(4)
    model.fit(batches(), steps_per_epoch=steps_per_epoch, callbacks=[recorder], verbose=0)
    assert recorder.begins == [(0, steps_per_epoch, 1)]
    assert recorder.steps == [4, 8]


def test_infinite_dataset():
    data = tf.data.Dataset.from_tensors((X, X)).repeat()
    model, recorder = counting_model(), Recorder(4)
    model.fit(data, steps_per_epoch=5, epochs=2, shuffle=False, callbacks=[recorder], verbose=0)
    assert recorder.begins == [(0, 10, 1)]
    assert recorder.steps == [4, 8]


def test_a_model_that_its_first_batch_builds_begins_after_it():
    recorder = Recorder()
    fit(counting_model(built=False), recorder)
    assert recorder.begins == [(0, 10, 1)]
    assert recorder.steps == recorder.updates == list(range(1, 11))


def test_evaluate_and_predict_do_nothing():
    model, recorder = counting_model(), Recorder()
    model.evaluate(X, X, callbacks=[recorder], verbose=0)
    model.predict(X, callbacks=[recorder], verbose=0)
    assert recorder.begins == recorder.steps == []


def test_several_optimizers_are_refused_by_name():
    optimizer = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(sg.SGLD(1.0, temperature=0))
    )
    with pytest.raises(ValueError, match=r"`MultiOptimizer` has several.*one sampler for all"):
        fit(counting_model(optimizer), Recorder())


@pytest.mark.parametrize(
    ("interval", "accumulation", "message"),
    [
        (1, None, "runs 4 updates .* interval of 1 steps from `thinning` becomes 4"),
        (6, None, "interval of 6 steps from `thinning` varies, up to 8"),
        (1, 2, "runs 2 updates .* becomes 2"),
    ],
)
def test_warns_of_an_interval_that_blocks_coarsen(interval, accumulation, message):
    optimizer = sg.SGLD(1.0, temperature=0, gradient_accumulation_steps=accumulation)
    recorder = Recorder()
    recorder.set_model(counting_model(optimizer, steps_per_execution=4))
    with pytest.warns(UserWarning, match=message):
        recorder.warn_if_coarsened("thinning", interval)


@pytest.mark.parametrize(("interval", "accumulation"), [(8, None), (1, 4), (3, 8)])
def test_does_not_warn_of_an_interval_that_is_met(interval, accumulation):
    optimizer = sg.SGLD(1.0, temperature=0, gradient_accumulation_steps=accumulation)
    recorder = Recorder()
    recorder.set_model(counting_model(optimizer, steps_per_execution=4))
    recorder.warn_if_coarsened("thinning", interval)
