"""Fused steps are the steps that Keras would have done, whatever their number in a program."""

import functools
import logging
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_sgmcmc as sg
from keras_sgmcmc import fused
from keras_sgmcmc.callbacks import posterior_samples
from keras_sgmcmc.callbacks.chain_monitor import DivergenceError
from keras_sgmcmc.fit_run import FitRun
from keras_sgmcmc.vectorized_chains import StackedChains

# What is fused is compiled all the same.
pytestmark = pytest.mark.usefixtures("without_xla")

ROWS, WIDTH, STEPS = 30, 3, 9
RNG = np.random.default_rng(1)
X = RNG.standard_normal((ROWS, WIDTH)).astype("float32")
Y = (RNG.uniform(size=(ROWS, 1)) < 0.5).astype("float32")
WEIGHTS = RNG.uniform(0.5, 2, ROWS).astype("float32")
# None of them divides the steps, and one is more.
SEVERAL = (7, 100)
# Where only what the steps hold is new: that their number in a program does not matter is seen with
# other steps.
ONE = (7,)


def sampler(kind=sg.SGLD, learning_rate=0.05, **arguments):
    return kind(learning_rate, train_size=ROWS, prior=1.0, seed=1, jit_compile=False, **arguments)


def loss():
    return keras.losses.BinaryCrossentropy(from_logits=True)


def small(*hidden):
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(1, name="out")])


def make(block, model=None, optimizer=None, **arguments):
    model = model or small()
    arguments = {"loss": loss(), **arguments}
    model.compile(optimizer=optimizer or sampler(), steps_per_execution=block, **arguments)
    return model


def batches(x=X, y=Y, steps=STEPS, **arguments):
    return sg.minibatches(x, y, 4, seed=3, steps=steps, **arguments)


def fit(model, data, *callbacks, **arguments):
    callbacks = callbacks or (sg.callbacks.ChainMonitor(),)
    arguments = {"shuffle": False, "verbose": 0, **arguments}
    return model.fit(data, callbacks=list(callbacks), **arguments).history


def outcome(model, data, *histories):
    return {
        "variables": [variable.numpy() for variable in model.variables],
        "state": [np.asarray(variable) for variable in model.optimizer.variables],
        "histories": histories,
        "iterations": int(model.optimizer.iterations),
        "position": data.position,
    }


def assert_equal(one, other):
    tf.nest.map_structure(np.testing.assert_array_equal, one, other)


def assert_close(one, other, tolerance=1e-5):
    def close(some, others):
        np.testing.assert_allclose(some, others, rtol=tolerance, atol=tolerance)

    tf.nest.map_structure(close, one, other)


@pytest.fixture
def log(caplog):
    """The reasons that are logged: one for each fit with several steps per execution."""
    caplog.set_level(logging.DEBUG, "keras_sgmcmc")

    def taken():
        messages = [r.message for r in caplog.records if "fused" in r.message]
        caplog.clear()
        return messages

    return taken


def in_blocks(run, log, several=SEVERAL, tolerance=1e-5, fuses=True):
    """Check `run(block, fuse)` for blocks of several sizes, and against Keras' own loop."""

    def once(block, fuse):
        keras.utils.set_random_seed(7)
        return run(block, fuse)

    plain = once(1, False)
    log()
    found = [once(block, True) for block in several]
    messages = log()
    assert any("are fused" in m for m in messages) == fuses, messages
    assert any("not fused" in m for m in messages) == (not fuses), messages
    for other in found[1:]:
        assert_equal(other, found[0])
    assert_close(found[0], plain, tolerance)
    return found[0]


# The same chain.


def test_several_fits_and_epochs(log):
    def run(block, fuse):
        model = make(block, small(layers.Dense(4, "tanh")), sampler(sg.pSGLD), metrics=["accuracy"])
        data = batches(fuse=fuse)
        histories = fit(model, data, epochs=2), fit(model, data, epochs=4, initial_epoch=1)
        return outcome(model, data, *histories)

    found = in_blocks(run, log)
    assert found["iterations"] == found["position"] == 5 * STEPS


@pytest.mark.parametrize(
    ("several", "arguments"),
    [
        (SEVERAL, {"steps_per_epoch": STEPS + 4, "epochs": 1}),
        (SEVERAL, {"steps_per_epoch": 5, "epochs": 1}),
        # Epochs that share an iterator, which blocks of 2 seem to exhaust in the third.
        ((2, 3), {"steps_per_epoch": 3, "epochs": 4}),
    ],
)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_steps_per_epoch(several, arguments, log):
    def run(block, fuse):
        model, data = make(block), batches(fuse=fuse)
        return outcome(model, data, fit(model, data, **arguments))

    in_blocks(run, log, several)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_the_data_validate_too_while_an_iterator_is_open():
    """An iterator that has begun is not moved by others."""

    def run(fuse):
        keras.utils.set_random_seed(7)
        model, data = make(2), batches(fuse=fuse)
        arguments = {"validation_data": data, "validation_steps": 2, "steps_per_epoch": 4}
        return outcome(model, data, fit(model, data, epochs=2, **arguments))

    assert_close(run(True), run(False))


def test_validation(log):
    def run(block, fuse):
        model, data = make(block, metrics=["accuracy"]), batches(fuse=fuse)
        return outcome(model, data, fit(model, data, epochs=2, validation_data=(X, Y)))

    assert "val_accuracy" in in_blocks(run, log, ONE)["histories"][0]


def test_metrics_and_sample_weights(log):
    def run(block, fuse):
        model = make(block, metrics=["auc"], weighted_metrics=["accuracy"])
        data = batches(sample_weight=WEIGHTS, fuse=fuse)
        return outcome(model, data, fit(model, data, epochs=2))

    in_blocks(run, log, ONE)


def test_class_weights_are_not_fused_and_right(log):
    def run(block, fuse):
        y = np.arange(ROWS) % 2
        model, data = make(block), batches(y=y, steps=8, fuse=fuse)
        return outcome(model, data, fit(model, data, class_weight={0: 1.0, 1: 3.0}))

    in_blocks(run, log, (4,), fuses=False)


def test_several_inputs_and_outputs(log):
    def run(block, fuse):
        inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((1,), name="b")}
        both = layers.Concatenate()([inputs["a"], inputs["b"]])
        outputs = {"u": layers.Dense(1, name="u")(both), "v": layers.Dense(1, name="v")(both)}
        model = keras.Model(inputs, outputs)
        model = make(block, model, loss={"u": loss(), "v": sg.GaussianNegativeLogLikelihood()})
        data = batches({"a": X[:, :2], "b": X[:, 2:]}, {"u": Y, "v": X[:, :1]}, fuse=fuse)
        return outcome(model, data, fit(model, data))

    assert {"u_loss", "v_loss"} <= set(in_blocks(run, log, ONE)["histories"][0])


@pytest.mark.parametrize(
    "hidden",
    [
        lambda: [layers.Dropout(0.5)],
        lambda: [layers.BatchNormalization(), layers.Dense(2, "relu")],
    ],
    ids=["Dropout", "BatchNormalization"],
)
def test_layers_with_a_state(hidden, log):
    def run(block, fuse):
        # XLA draws other masks for dropout, in Keras' own loop too.
        model = make(block, small(*hidden()), jit_compile=not fuse)
        data = batches(fuse=fuse)
        return outcome(model, data, fit(model, data))

    in_blocks(run, log, ONE)


def test_gradient_accumulation_and_a_schedule(log):
    def run(block, fuse):
        schedule = sg.schedules.PowerDecay(0.1, 2.0, 0.55)
        model = make(
            block, optimizer=sampler(learning_rate=schedule, gradient_accumulation_steps=4)
        )
        data = batches(fuse=fuse)
        samples = sg.callbacks.PosteriorSamples(1, thinning=2)
        result = outcome(model, data, fit(model, data, samples, epochs=3))
        draws = [samples.posterior.weights(i) for i in range(len(samples.posterior.steps))]
        return result | {"steps": list(samples.posterior.steps), "draws": draws}

    assert in_blocks(run, log, (2, 7))["steps"] == [3, 5]


class OwnStep(keras.Model):
    traces = 0

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        type(self).traces += 1
        logs = super().train_step(data)
        return {**logs, "largest": ops.max(data[0]), "rows": ops.max(data[0], axis=1), "one": 1}


def test_an_unbuilt_model_with_a_step_of_its_own(log):
    def run(block, fuse):
        model, data = make(block, OwnStep()), batches(fuse=fuse)
        samples = sg.callbacks.PosteriorSamples(0, thinning=4)
        result = outcome(model, data, fit(model, data, samples))
        return result | {"steps": list(samples.posterior.steps)}

    found = in_blocks(run, log)
    assert found["steps"] == [4, 8]
    last = batches().batches(STEPS - 1, 1)[0][0]
    (history,) = found["histories"]
    assert history["largest"] == [np.max(last)]
    assert history["one"] == [1]


def test_mixed_precision(log):
    def run(block, fuse):
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = make(block, small(layers.Dense(4, "tanh")))
        finally:
            keras.config.set_dtype_policy(before)
        # The first steps overflow, and are skipped: draws come later than their batches.
        model.optimizer.build(model.trainable_variables)
        model.optimizer.dynamic_scale.assign(2.0**20)
        model.optimizer.initial_scale = 2.0**20
        data, samples = batches(fuse=fuse), sg.callbacks.PosteriorSamples(0, thinning=2)
        result = outcome(model, data, fit(model, data, samples, epochs=2))
        return result | {"steps": list(samples.posterior.steps)}

    # Other roundings of the half type may come out of other fusions.
    in_blocks(run, log, (2, 7), tolerance=2e-2)


# Callbacks.


def test_draws_come_at_their_steps(log, recwarn):
    def run(block, fuse):
        model, data = make(block), batches(fuse=fuse)
        samples = sg.callbacks.PosteriorSamples(4, thinning=3)
        others = sg.callbacks.ChainMonitor(), sg.callbacks.PosteriorSamples(0, thinning=5)
        fit(model, data, samples, *others, epochs=2)
        fit(model, data, samples, epochs=1)
        found = {}
        for name, kept in (("first", samples), ("second", others[1])):
            steps = list(kept.posterior.steps)
            found[name] = steps, [kept.posterior.weights(i) for i in range(len(steps))]
        return found

    found = in_blocks(run, log)
    assert found["first"][0] == [7, 10, 13, 16, 19, 22, 25]
    assert found["second"][0] == [5, 10, 15]
    assert not [w for w in recwarn if "steps_per_execution" in str(w.message)]


def steps_and_draws(samples):
    posterior = samples.posterior
    return list(posterior.steps), [posterior.weights(i) for i in range(len(posterior))]


def drawn(block, *callbacks, thinning=2, epochs=1, **arguments):
    """What `PosteriorSamples` of a fit has."""
    keras.utils.set_random_seed(7)
    samples = sg.callbacks.PosteriorSamples(1, thinning, **arguments)
    fit(make(block), batches(), samples, *callbacks, epochs=epochs)
    return samples


@pytest.fixture
def programs(monkeypatch):
    """The numbers of steps that programs were asked to run."""
    numbers, run = [], fused.FusedSteps.__call__

    def counted(self, stream, count):
        numbers.append(count)
        return run(self, stream, count)

    monkeypatch.setattr(fused.FusedSteps, "__call__", counted)
    return numbers


def test_programs_write_draws_down_instead_of_stopping(programs, monkeypatch):
    found = steps_and_draws(drawn(100, epochs=2))
    assert programs == [STEPS, STEPS]
    assert found[0] == [3, 5, 7, 9, 11, 13, 15, 17]
    programs.clear()
    # Nothing is to be written that costs more than a stop.
    monkeypatch.setattr(posterior_samples, "_WORTH_A_STOP", 2 * 4 * (WIDTH + 1) - 1)
    assert_equal(found, steps_and_draws(drawn(100, epochs=2)))
    assert programs == [3, 2, 2, 2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize(
    ("expected", "others", "arguments"),
    [
        ([3, 2, 2, 2], [sg.callbacks.PosteriorSamples(0, 5)], {}),
        # At most one in a block.
        ([9, 2, 7], [], {"thinning": 10, "epochs": 2}),
    ],
)
def test_programs_stop_for_other_draws(expected, others, arguments, programs):
    drawn(STEPS, *others, **arguments)
    assert programs == expected


@pytest.mark.parametrize("kind", ["schedule", "number", "function"])
def test_draws_have_the_weights_of_their_steps(kind, programs):
    def run(block):
        schedule = sg.schedules.PowerDecay(0.1, 2.0, 0.55)
        model = make(block, small(), sampler(learning_rate=schedule))
        if kind != "schedule":
            rate = 0.1 if kind == "number" else (lambda: schedule(model.optimizer.iterations))
            model = make(block, model, sampler(learning_rate=rate))
        samples = sg.callbacks.PosteriorSamples(1, 2, step_weights=True)
        fit(model, batches(), samples)
        return list(samples.posterior.draw_weights)

    expected = run(1)
    assert run(9) == expected
    assert programs == ([3, 2, 2, 2] if kind == "function" else [9])
    assert len(set(expected)) == (1 if kind == "number" else 4)


def test_fewer_draws_are_kept_of_those_written_down():
    keras.utils.set_random_seed(7)
    samples = sg.callbacks.PosteriorSamples(0, max_samples=3)
    model, data = make(100), batches(steps=20)
    # Keras knows no end, so that the interval is doubled on the way.
    samples.last_step = lambda: None
    fit(model, data, samples)
    steps, draws = steps_and_draws(samples)
    assert steps == [8, 16]
    every = sg.callbacks.PosteriorSamples(0)
    keras.utils.set_random_seed(7)
    fit(make(100), batches(steps=20), every)
    assert_equal(draws, [every.posterior.weights(step - 1) for step in steps])


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_long_last_call_of_a_shared_iterator_writes_all_draws_down():
    """Keras' calls of 4 and 3 steps, of which the seventh runs 7."""
    samples = sg.callbacks.PosteriorSamples(0)
    fit(make(4), batches(steps=28), samples, steps_per_epoch=7, epochs=4)
    np.testing.assert_array_equal(samples.posterior.steps, np.arange(1, 29))


def test_an_interrupted_program_loses_no_draw(monkeypatch):
    expected = steps_and_draws(drawn(100, epochs=2))
    keras.utils.set_random_seed(7)
    model, data, samples = make(100), batches(), sg.callbacks.PosteriorSamples(1, 2)
    run = fused.FusedSteps.__call__

    def interrupted(self, stream, count):
        run(self, stream, count)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fused.FusedSteps, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(model, data, samples)
    assert list(samples.posterior.steps) == [3, 5, 7, 9]
    fit(model, data, samples)
    assert_equal(steps_and_draws(samples), expected)


def test_an_interrupt_while_draws_are_taken_loses_one_at_most(monkeypatch):
    expected = steps_and_draws(drawn(100, epochs=2))
    keras.utils.set_random_seed(7)
    model, data, samples = make(100), batches(), sg.callbacks.PosteriorSamples(1, 2)
    draw = samples._draw

    def interrupted():
        if samples.step == 5:
            raise KeyboardInterrupt
        draw()

    with monkeypatch.context() as patch:
        patch.setattr(samples, "_draw", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(model, data, samples)
    fit(model, data, samples)
    steps, draws = steps_and_draws(samples)
    assert steps == [3, 7, 9, 11, 13, 15, 17]
    assert_equal(draws, [expected[1][0], *expected[1][2:]])


@pytest.mark.parametrize("block", [10, 100])
def test_the_time_of_draws_is_that_of_their_programs(block):
    samples = sg.callbacks.PosteriorSamples(0, 2)
    begin = time.perf_counter()
    fit(make(block), batches(steps=100), samples)
    assert 0 < samples.posterior.seconds < time.perf_counter() - begin


def test_a_divergent_chain_is_stopped_at_the_draw_that_shows_it():
    model, data = make(100, optimizer=sampler(learning_rate=50.0)), batches(steps=1000)
    model.compile(model.optimizer, sg.GaussianNegativeLogLikelihood(), steps_per_execution=100)
    samples = sg.callbacks.PosteriorSamples(0)
    with pytest.raises(DivergenceError) as raised:
        fit(model, data, samples)
    assert int(model.optimizer.iterations) == 100 > raised.value.step
    kept = samples.posterior.steps
    np.testing.assert_array_equal(kept, np.arange(1, len(kept) + 1))
    assert len(kept) < raised.value.step


def test_the_interval_is_coarsened_with_a_warning_if_not_fused():
    samples = sg.callbacks.PosteriorSamples(0, thinning=3)
    with pytest.warns(UserWarning, match="steps_per_execution=4"):
        fit(make(4), batches(steps=8, fuse=False), samples)
    assert list(samples.posterior.steps) == [4, 8]


def test_a_divergent_chain_is_stopped():
    model = make(20, optimizer=sampler(learning_rate=50.0))
    model.compile(model.optimizer, sg.GaussianNegativeLogLikelihood(), steps_per_execution=20)
    with pytest.raises(DivergenceError):
        fit(model, batches(steps=1000), epochs=5)
    assert int(model.optimizer.iterations) < 1000
    assert int(model.optimizer.iterations) % 20 == 0


@pytest.mark.parametrize(
    "schedule", [sg.schedules.PowerDecay(0.1, 2.0, 0.55), lambda t: 0.1 / (1 + t)]
)
def test_annealing_goes_by_blocks_and_warns(schedule):
    def run(fuse):
        keras.utils.set_random_seed(7)
        model, data = make(3), batches(fuse=fuse)
        annealing = sg.callbacks.StepSizeAnnealing(schedule)
        with pytest.warns(UserWarning, match="once in 3 updates"):
            history = fit(model, data, annealing, sg.callbacks.ChainMonitor(), epochs=2)
        assert history["learning_rate"][-1] == pytest.approx(float(schedule(15)))
        return outcome(model, data, history)

    assert_close(run(True), run(False))


class Reversed(layers.Layer):
    """Reverses the rows, which closed forms of per-example gradients can't see."""

    def build(self, shape):
        self.dense = layers.Dense(3, activation="tanh", name="inner")
        self.dense.build(shape)

    def call(self, x):
        return ops.flip(self.dense(ops.flip(x, 0)), 0)


def noise_of(block, fuse, *hidden):
    keras.utils.set_random_seed(7)
    model, data, noise = (
        make(block, small(*hidden)),
        batches(fuse=fuse),
        sg.callbacks.GradientNoise(),
    )
    history = fit(model, data, noise)
    return noise, outcome(model, data, history) | {"covariance": list(noise.covariance.values())}


def test_gradient_noise_is_measured_in_fused_steps(log):
    in_blocks(lambda block, fuse: noise_of(block, fuse)[1], log, (2, 7))


@pytest.mark.filterwarnings("ignore:The per-example gradients")
def test_a_closed_form_that_is_wrong_is_dropped(log):
    noise, found = noise_of(4, True, Reversed())
    messages = log()
    # The step is composed anew after the first call, in which its check failed.
    assert len([m for m in messages if "are fused" in m]) == 2
    assert any("off by" in way for way in noise.ways.values())
    plain, expected = noise_of(4, False, Reversed())
    assert list(noise.ways.values()) == list(plain.ways.values())
    assert noise.examples == plain.examples == 4 * (STEPS - 4)
    assert_close(found, expected)


def test_other_callbacks():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert isinstance(logs["loss"], float)
            self.model.stop_training = batch >= 3

    model, data = make(2), batches()
    fit(model, data, sg.callbacks.ChainMonitor(), Stop(), epochs=3)
    assert int(model.optimizer.iterations) == data.position == 4
    early = keras.callbacks.EarlyStopping("loss", min_delta=100.0, patience=1)
    fit(model, data, sg.callbacks.ChainMonitor(), early, epochs=8)
    assert int(model.optimizer.iterations) == data.position == 4 + 2 * STEPS


class Break(keras.callbacks.Callback):
    """Ends a fit at call number `at` of it."""

    def __init__(self, at, error=KeyboardInterrupt):
        super().__init__()
        self.left, self.error = at, error

    def on_train_batch_begin(self, batch, logs=None):
        if self.left == 0:
            raise self.error
        self.left -= 1


@functools.cache
def chain_of(steps):
    keras.utils.set_random_seed(7)
    model, data = make(2), batches(steps=steps)
    fit(model, data)
    return model.get_weights()


@pytest.mark.parametrize(("save_freq", "total"), [("epoch", 18), (2, 22)])
def test_a_restored_chain_is_the_uninterrupted_one(save_freq, total, tmp_path):
    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=save_freq)

    keras.utils.set_random_seed(7)
    with pytest.raises(KeyboardInterrupt):
        # In the second epoch, after 9 + 4 steps.
        fit(make(2), batches(), sg.callbacks.ChainMonitor(), backup(), Break(7), epochs=2)
    model, data = make(2), batches()
    fit(model, data, sg.callbacks.ChainMonitor(), backup(), epochs=2)
    assert int(model.optimizer.iterations) == data.position == total
    assert_equal(model.get_weights(), chain_of(total))


# Nothing stale.


def test_consumers_between_fits_and_positions_that_are_chosen():
    def run(fuse):
        keras.utils.set_random_seed(7)
        model, data = make(4), batches(steps=8, fuse=fuse)
        seen = []
        for change in (
            lambda: None,
            lambda: model.evaluate(data, verbose=0),
            lambda: model.predict(data, verbose=0),
            lambda: model.train_on_batch(X[:4], Y[:4]),
            lambda: setattr(data, "position", 3),
            lambda: setattr(data, "position", 13),
        ):
            change()
            fit(model, data)
            seen.append(outcome(model, data))
        assert data.position == 13 + 8
        return seen

    assert_close(run(True), run(False))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_fit_that_broke_off_goes_on(error):
    keras.utils.set_random_seed(7)
    model, data = make(2), batches()
    with pytest.raises(error):
        fit(model, data, sg.callbacks.ChainMonitor(), Break(7, error), epochs=2)
    assert int(model.optimizer.iterations) == data.position == 13
    model.evaluate(data, verbose=0)
    fit(model, data)
    assert not isinstance(model.train_function, FitRun)
    assert_equal(model.get_weights(), chain_of(13 + STEPS))


def test_other_data_and_another_compilation():
    def run(fuse):
        keras.utils.set_random_seed(7)
        model, data = make(4), batches(steps=8, fuse=fuse)
        fit(model, data)
        other = sg.minibatches(-X, Y, 4, seed=5, steps=8, fuse=fuse)  # the same shapes
        fit(model, other)
        fit(model, sg.minibatches(X, Y, 3, seed=5, steps=8, fuse=fuse))
        fit(model, data)
        model.compile(
            sampler(learning_rate=0.01), sg.GaussianNegativeLogLikelihood(), steps_per_execution=2
        )
        return outcome(model, data, fit(model, data))

    assert_close(run(True), run(False))


def test_one_trace_for_all_fits(log):
    OwnStep.traces = 0
    model, data = make(4, OwnStep()), batches()
    callbacks = sg.callbacks.ChainMonitor(), sg.callbacks.InGraphCallback()
    for _ in range(2):
        fit(model, data, *callbacks, epochs=2)
        fit(model, batches(), *callbacks)  # other data of the same shapes
        assert OwnStep.traces == 1
    assert len(log()) == 1
    fit(model, data)  # another step
    assert OwnStep.traces == 2
    fit(model, data, *callbacks)
    assert OwnStep.traces == 2
    assert "fused" not in str(vars(model))


def test_a_loop_of_the_users_own_ends_with_the_data():
    model, data = make(4), batches()
    monitor = sg.callbacks.ChainMonitor()
    callbacks = keras.callbacks.CallbackList([monitor], model=model)
    model.make_train_function()
    callbacks.on_train_begin()
    iterator = iter(data)
    for call in range(3):
        callbacks.on_train_batch_begin(call)
        logs = model.train_function(iterator)
        callbacks.on_train_batch_end(call, logs)
    with pytest.raises(StopIteration):
        model.train_function(iterator)
    assert int(model.optimizer.iterations) == data.position == STEPS


# Where steps are fused.


def compiled(**arguments):
    return make(4, **arguments)


def passed_on(fuse=True):
    return batches(fuse=fuse, steps=8).map(lambda x, y: (x, y))


class NoJit(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_jit = False

    def call(self, x):
        return x


class Recurrent(keras.layers.SimpleRNN):
    pass


class Folding(keras.layers.Conv1D):
    pass


def of_series(layer):
    return small(layers.Reshape((WIDTH, 1)), layer, layers.Flatten())


@pytest.mark.parametrize(
    ("model", "data", "reason"),
    [
        (lambda: compiled(run_eagerly=True), batches, "run_eagerly=True"),
        (compiled, lambda: batches(fuse=False), "`minibatches(fuse=False)`"),
        (compiled, passed_on, "the data are not `minibatches` themselves"),
        (
            compiled,
            lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(5),
            "the data are not `minibatches` themselves",
        ),
        (lambda: compiled(model=small(NoJit(name="no"))), batches, "XLA can't compile ['no']"),
        (
            lambda: compiled(model=of_series(Folding(2, 2, name="fold"))),
            batches,
            "on a CPU a loop inside XLA makes ['fold'] slow",
        ),
        (
            lambda: compiled(model=of_series(Recurrent(2, name="recur"))),
            batches,
            "on a CPU a loop inside XLA makes ['recur'] slow",
        ),
        (
            # Unbuilt: how large it is comes out at the first batch.
            lambda: compiled(
                model=keras.Sequential([layers.Dense(2100), layers.Dense(2000), layers.Dense(1)])
            ),
            lambda: batches(steps=1),
            "on a CPU a loop inside XLA makes large products slow",
        ),
    ],
)
def test_reasons_against(model, data, reason, log, recwarn):
    if tf.config.list_logical_devices("GPU") and "CPU" in reason:
        pytest.skip("on a GPU that is fused")
    model = model()
    fit(model, data())
    assert log() == [f"Steps of `{model.name}` are not fused: {reason}"]
    assert not [str(w.message) for w in recwarn if w.category is UserWarning]


def test_nothing_is_logged_of_single_steps(log):
    fit(make(1), batches())
    assert log() == []


def test_one_reason_against_a_strategy(log):
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = make(4)
    fit(model, batches(steps=8))
    assert log() == [f"Steps of `{model.name}` are not fused: a distribution strategy"]


class OfPython(layers.Layer):
    """What XLA can't compile, though nothing says so."""

    def call(self, x):
        same = tf.py_function(lambda value: value, [tf.stop_gradient(x)], x.dtype)
        return x + 0.0 * tf.ensure_shape(same, x.shape)


@pytest.mark.parametrize("callback", [sg.callbacks.ChainMonitor, sg.callbacks.InGraphCallback])
def test_what_xla_cannot_compile_runs_unfused(callback, log, recwarn):
    model, data = make(4, small(OfPython())), batches()
    for fits in (1, 2):
        fit(model, data, callback(), sg.callbacks.PosteriorSamples(0, thinning=4))
        assert int(model.optimizer.iterations) == data.position == fits * STEPS
        found = log()
        if fits == 1:
            assert len(found) == 1
            assert "are not fused, since they can't be compiled: " in found[0]
    assert not [str(w.message) for w in recwarn if w.category is UserWarning]


def test_errors_of_the_users_own_step_come_out():
    class Wrong(OwnStep):
        def train_step(self, data):
            raise ZeroDivisionError("of the user")

    model = make(4, Wrong())
    with pytest.raises(ZeroDivisionError, match="of the user"):
        fit(model, batches())
    model = make(4, loss=lambda y, out: ops.matmul(y, out))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        fit(model, batches())


# Memory, and the end of an epoch.


@pytest.fixture
def resident(monkeypatch):
    """Programs gather their batches themselves."""
    monkeypatch.setattr(fused, "_LARGE_BATCH_BYTES", 0)


@pytest.mark.usefixtures("resident")
def test_resident_data_of_several_parts(log):
    def run(block, fuse):
        inputs = keras.Input((WIDTH,), name="a"), keras.Input((2, 1), dtype="uint8", name="b")
        hidden = [inputs[0], layers.Flatten()(layers.Rescaling(0.1)(inputs[1]))]
        outputs = layers.Dense(1)(layers.Concatenate()(hidden))
        model = make(block, keras.Model(inputs, outputs))
        images = (np.arange(2 * ROWS) % 256).astype("uint8").reshape(ROWS, 2, 1)
        data = batches({"a": X, "b": images}, sample_weight=WEIGHTS, fuse=fuse)
        return outcome(model, data, fit(model, data, epochs=2))

    in_blocks(run, log, ONE)


@pytest.mark.usefixtures("resident")
@pytest.mark.filterwarnings("ignore:`train_size=30` of the optimizer")
def test_resident_data_of_other_lengths_in_one_model():
    def run(fuse):
        keras.utils.set_random_seed(7)
        model, histories = make(4), []
        for rows, seed in ((ROWS, 3), (20, 3), (20, 4)):
            data = sg.minibatches(X[-rows:], Y[-rows:], 4, seed=seed, steps=8, fuse=fuse)
            histories.append(fit(model, data))
        return outcome(model, data, *histories)

    assert_close(run(True), run(False))


@pytest.mark.parametrize(
    ("width", "large"),
    [(40, 0), (43, 0), (100, 0), (40, 2**18)],
)
def test_batches_of_stacked_chains(width, large, log, monkeypatch):
    """Their rows are gathered chain by chain, and long ones at once."""
    monkeypatch.setattr(fused, "_LARGE_BATCH_BYTES", large)
    chains = 3
    x = RNG.standard_normal((ROWS, width)).astype("float32")

    def run(block, fuse):
        models = []
        for _ in range(chains):
            models.append(keras.Sequential([keras.Input((width,)), layers.Dense(1, name="out")]))
            models[-1].compile(sampler(), loss(), steps_per_execution=block)
        model = StackedChains(models, seed=1)
        data = sg.minibatches(x, Y, 4, steps=STEPS, fuse=fuse).reseeded(3, chains)
        return outcome(model, data, fit(model, data))

    in_blocks(run, log, ONE)


@pytest.mark.parametrize("budget", [0, 2**30])
def test_data_reside_on_an_accelerator_if_they_fit(budget, log, monkeypatch):
    monkeypatch.setattr(fused, "has_accelerator", lambda: True)
    monkeypatch.setattr(fused, "_RESIDENT_BYTES", budget)
    stream = fused.Stream(batches(), 5)
    assert stream.resident == (budget > 0)
    _, block = stream.block()
    expected = [(ROWS, WIDTH), (ROWS, 1)] if budget else [(5, 4, WIDTH), (5, 4, 1)]
    assert [tuple(part.shape) for part in block[-2:]] == expected

    def run(block, fuse):
        model, data = make(block), batches(fuse=fuse)
        return outcome(model, data, fit(model, data))

    in_blocks(run, log, ONE)


def test_blocks_are_limited(monkeypatch):
    asked = []
    gather = sg.data.Minibatches.batches

    def recorded(self, first, count):
        asked.append(count)
        return gather(self, first, count)

    model, data = make(10**6), batches(steps=10**4)
    monkeypatch.setattr(sg.data.Minibatches, "batches", recorded)
    fit(model, data, steps_per_epoch=10)
    assert int(model.optimizer.iterations) == data.position == 10
    assert max(asked) == 1000
    monkeypatch.setattr(fused, "_BLOCK_BYTES", 5 * 4 * 4 * (WIDTH + 1))
    fit(make(10**6), batches(steps=10**4), steps_per_epoch=12)
    assert asked[-1] == 5
