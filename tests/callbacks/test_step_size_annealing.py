import keras
import numpy as np
import pytest

import keras_sgmcmc as sg

pytestmark = pytest.mark.usefixtures("without_xla")

X = np.ones((20, 1), "float32")


def first_output(y_true, y_pred):
    return y_pred[:, 0]


@keras.saving.register_keras_serializable(package="test_step_size_annealing")
def hyperbola(step):
    return 1 / (1 + step)


def moving_model(optimizer=None, **compile_arguments):
    """One weight that an update lowers by the learning rate."""
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    optimizer = optimizer or sg.SGLD(7.0, temperature=0, jit_compile=False)
    model.compile(optimizer=optimizer, loss=first_output, **compile_arguments)
    return model


def fit(model, *callbacks, epochs=1):
    history = model.fit(X, X, batch_size=2, epochs=epochs, callbacks=list(callbacks), verbose=0)
    return history.history


class Rates(keras.callbacks.Callback):
    """The rate of every update: what it moved the weight by, and what was logged."""

    def on_train_begin(self, logs=None):
        self.moved, self.logged = [], []
        self.weight = self.model.trainable_variables[0]
        self.before = self.weight.numpy()[0, 0]

    def on_train_batch_end(self, batch, logs=None):
        after = self.weight.numpy()[0, 0]
        self.moved.append(self.before - after)
        self.logged.append(logs["learning_rate"])
        self.before = after


@pytest.mark.parametrize(
    "schedule",
    [sg.schedules.PowerDecay(1.0, 1.0, 1.0), hyperbola, lambda step: np.float64(1 / (1 + step))],
    ids=["schedule", "registered function", "lambda"],
)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_every_update_has_the_rate_of_its_step(schedule, run_eagerly):
    rates = Rates()
    model = moving_model(run_eagerly=run_eagerly)
    history = fit(model, sg.callbacks.StepSizeAnnealing(schedule), rates, epochs=2)
    expected = 1 / np.arange(1, 21)
    np.testing.assert_allclose(rates.moved, expected, rtol=1e-5)
    np.testing.assert_allclose(rates.logged, expected, rtol=1e-6)
    np.testing.assert_allclose(history["learning_rate"], [1 / 10, 1 / 20], rtol=1e-6)


def test_steps_per_execution_changes_it_once_a_block_and_warns():
    rates = Rates()
    with pytest.warns(UserWarning, match="changes the step once in 4 updates"):
        fit(
            moving_model(steps_per_execution=4),
            sg.callbacks.StepSizeAnnealing(hyperbola),
            rates,
            epochs=2,
        )
    # Ten batches an epoch: blocks of 4, 4 and 2 that begin at steps 0, 4, 8, 10, 14 and 18.
    expected = [4 / 1, 4 / 5, 2 / 9, 4 / 11, 4 / 15, 2 / 19]
    np.testing.assert_allclose(rates.moved, expected, rtol=1e-5)


def test_gradient_accumulation_anneals_by_updates():
    optimizer = sg.SGLD(7.0, temperature=0, gradient_accumulation_steps=5, jit_compile=False)
    rates = Rates()
    schedule = sg.schedules.PowerDecay(1.0, 1.0, 1.0)
    fit(moving_model(optimizer), sg.callbacks.StepSizeAnnealing(schedule), rates, epochs=2)
    expected = np.zeros(20)
    expected[[4, 9, 14, 19]] = 1, 1 / 2, 1 / 3, 1 / 4
    np.testing.assert_allclose(rates.moved, expected, rtol=1e-5, atol=1e-7)


def test_mixed_float16_anneals_the_inner_optimizer():
    optimizer = sg.SGLD(7.0, temperature=0, jit_compile=False)
    wrapped = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**4)
    rates = Rates()
    fit(moving_model(wrapped), sg.callbacks.StepSizeAnnealing(hyperbola), rates)
    np.testing.assert_allclose(rates.moved, 1 / np.arange(1, 11), rtol=1e-5)
    assert float(optimizer.learning_rate) == pytest.approx(1 / 10)


def test_a_second_fit_and_a_loaded_model_go_on(tmp_path):
    model = moving_model()
    model.compile(optimizer=model.optimizer, loss=sg.GaussianNegativeLogLikelihood())
    model.fit(X, X, batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for continued in (model, loaded):
        annealing = sg.callbacks.StepSizeAnnealing(hyperbola)
        history = continued.fit(X, X, batch_size=20, epochs=3, callbacks=[annealing], verbose=0)
        expected = [1 / 11, 1 / 12, 1 / 13]
        np.testing.assert_allclose(history.history["learning_rate"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "learning_rate",
    [sg.schedules.BlockDecay(1.0, every=10), lambda: 0.1],
    ids=["schedule", "callable"],
)
@pytest.mark.parametrize("wrap", [False, True])
def test_refuses_an_optimizer_with_a_schedule_before_the_first_batch(learning_rate, wrap):
    optimizer = sg.SGLD(learning_rate, temperature=0)
    if wrap:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model = moving_model(optimizer)
    with pytest.raises(
        ValueError, match=r"a number with this callback, or the schedule alone.*learning_rate="
    ):
        fit(model, sg.callbacks.StepSizeAnnealing(hyperbola))
    assert int(optimizer.iterations) == 0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_refuses_what_is_no_rate(value):
    annealing = sg.callbacks.StepSizeAnnealing(lambda step: value if step == 3 else 0.1)
    with pytest.raises(ValueError, match=rf"number >= 0\. Received: schedule\(3\) = {value}"):
        fit(moving_model(), annealing)


@pytest.mark.parametrize("schedule", [0.1, None, "cosine"])
def test_refuses_what_is_no_schedule(schedule):
    with pytest.raises(ValueError, match="`schedule` should be a LearningRateSchedule"):
        sg.callbacks.StepSizeAnnealing(schedule)


@pytest.mark.parametrize("schedule", [sg.schedules.PowerDecay(0.1, 10.0, 0.6), hyperbola])
def test_serialization(schedule):
    config = keras.saving.serialize_keras_object(sg.callbacks.StepSizeAnnealing(schedule))
    again = keras.saving.deserialize_keras_object(config)
    assert isinstance(again, sg.callbacks.StepSizeAnnealing)
    assert float(again.schedule(17)) == float(schedule(17))
