"""Iterate averages: means of plain lists of iterates in every mode, and their law."""

import functools
import logging
import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_sgmcmc as sg
from keras_sgmcmc import compilation, stability, theory

ROWS, BATCH = 60, 5


def data(**arguments):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 3)).astype("float32")
    y = (x @ [[1.0], [-1.0], [0.5]] + 0.3 * rng.standard_normal((ROWS, 1))).astype("float32")
    return sg.minibatches(x, y, BATCH, **{"seed": 1, "steps": 20, **arguments})


def make(optimizer=None, hidden=True, **arguments):
    keras.utils.set_random_seed(1)
    stack = [layers.Dense(4, "tanh")] if hidden else []
    model = keras.Sequential([keras.Input((3,)), *stack, layers.Dense(1)])
    optimizer = optimizer or keras.optimizers.SGD(0.05)
    model.compile(optimizer=optimizer, loss=sg.GaussianNegativeLogLikelihood(0.5), **arguments)
    return model


class Iterates(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.values = []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(self.model.get_weights())


def fit(model, batches, *callbacks, **arguments):
    arguments = {"epochs": 2, "verbose": 0, **arguments}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(short for windows|tr\\(A|takes those|`shuffle=True`)")
        return model.fit(batches, callbacks=list(callbacks), **arguments)


@functools.cache
def plain_iterates():
    iterates = Iterates()
    fit(make(), data(), iterates)
    return iterates.values


def means(iterates, burn_in, window):
    starts = range(burn_in, len(iterates) - window + 1, window)
    windows = [iterates[start : start + window] for start in starts]
    return [[np.mean(parts, axis=0) for parts in zip(*some, strict=True)] for some in windows]


def assert_draws(averages, expected, tolerance=1e-5):
    assert len(averages.posterior) == len(expected)
    for index, draw in enumerate(expected):
        for ours, theirs in zip(averages.posterior.weights(index), draw, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=tolerance)


@pytest.mark.parametrize(
    ("arguments", "window"),
    [
        ({}, 7),
        ({"run_eagerly": True}, 7),
        ({"jit_compile": True}, 7),
        ({"steps_per_execution": 10}, 7),
        ({"steps_per_execution": 20, "jit_compile": False}, 3),
    ],
    ids=["default", "eager", "jit", "fused", "several windows a block"],
)
def test_draws_are_the_means_of_all_iterates(arguments, window):
    averages = sg.callbacks.IterateAverages(burn_in=4, window=window)
    model = make(**arguments)
    history = fit(model, data(), averages).history
    expected = means(plain_iterates(), 4, window)
    assert_draws(averages, expected)
    assert list(averages.posterior.steps) == [4 + window * (i + 1) for i in range(len(expected))]
    assert history["draws"] == [(20 - 4) // window, len(expected)]
    assert history["burn_in_left"] == [0, 0]


def test_unfused_blocks_hold_several_windows():
    averages = sg.callbacks.IterateAverages(burn_in=4, window=3)
    fit(make(steps_per_execution=10), data(fuse=False), averages)
    assert_draws(averages, means(plain_iterates(), 4, 3))


def test_the_update_of_many_weights_is_compiled(monkeypatch):
    monkeypatch.setattr(compilation, "_COMPILED_FROM", 1)
    averages = sg.callbacks.IterateAverages(burn_in=4, window=7)
    fit(make(), data(), averages)
    assert_draws(averages, means(plain_iterates(), 4, 7))


def sampler(cls, **arguments):
    if cls in (sg.ConstantSGD, sg.SGFS):
        arguments = {"batch_size": BATCH, "warmup_steps": 8, **arguments}
    else:
        arguments = {"learning_rate": 0.01, **arguments}
    return cls(train_size=ROWS, prior=1.0, seed=3, **arguments)


@pytest.mark.parametrize(
    ("make_sampler", "arguments"),
    [
        (lambda: sampler(sg.pSGLD), {"steps_per_execution": 10}),
        (lambda: sampler(sg.pSGLD), {"run_eagerly": True}),
        (lambda: sampler(sg.pSGLD, jit_compile=False), {}),
        (lambda: sampler(sg.SGLD, gradient_accumulation_steps=2), {}),
        (lambda: sampler(sg.ConstantSGD, momentum=0.5, max_step=0.05), {}),
        (lambda: sampler(sg.SGFS, fisher="full"), {}),
    ],
    ids=["fused", "eager", "without XLA", "accumulated", "momentum", "full"],
)
def test_iterates_enter_as_a_sampler_moves_them(make_sampler, arguments, monkeypatch):
    later = []
    enter = sg.callbacks.IterateAverages._enter

    def spy(self, position, variable, number, counts):
        if counts is not True:
            later.append(position)
        enter(self, position, variable, number, counts)

    monkeypatch.setattr(sg.callbacks.IterateAverages, "_enter", spy)
    averages = sg.callbacks.IterateAverages(burn_in=3, window=4)
    full = getattr(make_sampler(), "noise_structure", None) == "full"
    noise = [sg.callbacks.GradientNoise()] if full else []
    small = functools.partial(make, hidden=False)
    model, plain, iterates = small(make_sampler(), **arguments), small(make_sampler()), Iterates()
    fit(model, data(), averages, *noise)
    fit(plain, data(), iterates, *noise)
    if arguments:
        plain = small(make_sampler(), **arguments)
        fit(plain, data(), sg.callbacks.ChainMonitor(), *noise)  # which lets steps be fused
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)  # the moves are what they were, bit for bit
    each = plain.optimizer.gradient_accumulation_steps or 1
    moves = iterates.values[each - 1 :: each]
    assert_draws(averages, means(moves, 3, 4))
    assert bool(later) == (not model.optimizer.jit_compile)


@pytest.mark.usefixtures("without_xla")
def test_iterates_that_a_sampler_does_not_move_enter_too(monkeypatch):
    """A constraint acts after the move; what the loss does not depend on has no gradient."""

    class Idle(layers.Layer):
        def build(self, shape):
            self.idle = self.add_weight(shape=(2,), initializer="ones", name="idle")

        def call(self, x):
            return x

    keras.utils.set_random_seed(1)
    constraint = keras.constraints.UnitNorm()
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, kernel_constraint=constraint), Idle(), layers.Dense(1)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = sampler(sg.SGLD)
        model.compile(optimizer=optimizer, loss=sg.GaussianNegativeLogLikelihood(0.5))
        averages, iterates = sg.callbacks.IterateAverages(burn_in=0, window=4), Iterates()
        fit(model, data(), averages, iterates, epochs=1)
    assert_draws(averages, means(iterates.values, 0, 4))


def test_the_window_is_a_pass_over_the_data():
    averages = sg.callbacks.IterateAverages(burn_in=0)
    optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
    fit(make(optimizer), data(), averages)
    assert list(averages.posterior.steps) == [6, 12, 18]
    averages = sg.callbacks.IterateAverages(burn_in=0)
    x = np.zeros((10, 3), "float32")
    with pytest.raises(ValueError, match=r"number of rows can't be told.*Pass `window=`"):
        make().fit(x, x[:, :1], callbacks=[averages], verbose=0)
    with pytest.raises(ValueError, match=r"batch size can't be told.*Pass `window=`"):
        make(sg.SGLD(train_size=10)).fit(x, x[:, :1], callbacks=[averages], verbose=0)


@pytest.mark.usefixtures("without_xla")
def test_a_chain_that_goes_on_drops_the_window_that_it_enters_in_the_middle():
    averages = sg.callbacks.IterateAverages(burn_in=5, window=10)
    model = make()
    fit(model, data(), averages)  # 40 steps: to 15, 25, 35
    fit(model, data(start_step=40), averages, epochs=1)  # the same callback: 45, 55
    assert list(averages.posterior.steps) == [15, 25, 35, 45, 55]
    fresh = sg.callbacks.IterateAverages(burn_in=5, window=10)
    fit(model, data(start_step=60), fresh, epochs=1)  # steps 61 to 80: 66 to 75 alone
    assert list(fresh.posterior.steps) == [75]


@pytest.mark.usefixtures("without_xla")
def test_a_cap_keeps_every_second_window():
    averages = sg.callbacks.IterateAverages(burn_in=0, window=3, max_samples=4)
    fit(make(), data(), averages)  # 13 windows
    assert list(averages.posterior.steps) == [3, 15, 27, 39]


@pytest.mark.usefixtures("without_xla")
def test_number_and_memory_of_what_is_to_come_are_logged(caplog):
    caplog.set_level(logging.INFO, "keras_sgmcmc")
    fit(make(), data(), sg.callbacks.IterateAverages(burn_in=5, window=10, max_samples=2))
    message = "means of 10 steps, from step 6 on, of 84 B, at most 2 of them (168 B) in memory"
    assert message in caplog.text


@pytest.mark.usefixtures("without_xla")
def test_steps_that_loss_scaling_skips_do_not_count():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make()
        model.optimizer.build(model.trainable_variables)
        model.optimizer.dynamic_scale.assign(2.0**24)
        averages = sg.callbacks.IterateAverages(burn_in=0, window=4)
        fit(model, data(), averages)
    finally:
        keras.config.set_dtype_policy("float32")
    steps = int(model.optimizer.inner_optimizer.iterations.numpy())
    assert steps < 40
    assert list(averages.posterior.steps) == list(range(4, steps + 1, 4))


@pytest.mark.usefixtures("without_xla")
def test_refusals():
    averages = sg.callbacks.IterateAverages(burn_in=30, window=20)
    with pytest.raises(ValueError, match=r"No window can be completed.*first ends at step 50"):
        fit(make(steps_per_execution=10), data(), averages)
    with pytest.raises(ValueError, match="No window is complete yet"):
        _ = averages.posterior
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"moving_mean.*LayerNormalization"):
        fit(model, data(), sg.callbacks.IterateAverages(burn_in=0))
    with pytest.raises(sg.DivergenceError, match="not finite"):
        fit(make(keras.optimizers.SGD(1e30)), data(), sg.callbacks.IterateAverages(0, window=5))
    for arguments in ({"burn_in": -1}, {"burn_in": 0, "window": 0}, {"burn_in": 0.5}):
        with pytest.raises(ValueError, match="should be an integer"):
            sg.callbacks.IterateAverages(**arguments)


def test_serialization():
    averages = sg.callbacks.IterateAverages(burn_in=3, window=5, max_samples=7)
    config = keras.saving.serialize_keras_object(averages)
    again = keras.saving.deserialize_keras_object(config)
    assert again.get_config() == averages.get_config()


# The law of the means.


def mean_model(columns, rate):
    """Per-example gradients theta - y_n: A = 1, C the covariance of y, at every theta."""
    model = keras.Sequential([keras.Input((1,)), layers.Dense(columns, use_bias=False)])
    model.compile(
        keras.optimizers.SGD(rate), sg.GaussianNegativeLogLikelihood(), steps_per_execution=1000
    )
    return model


@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_variances_are_those_of_theory(rate):
    """N = 500, S = 10, window 50: at the short step the means are correlated and vary less."""
    N, S, D = 500, 10, 100
    y = np.random.default_rng(0).standard_normal((N, D))
    basis, _ = np.linalg.qr(y - y.mean(0))
    y = (np.sqrt(N) * basis).astype("float32")  # covariance 1, exactly
    model = mean_model(D, rate)
    averages = sg.callbacks.IterateAverages(burn_in=1000)
    batches = sg.minibatches(np.ones((N, 1), "float32"), y, S, seed=2, steps=16_000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(batches, callbacks=[averages], verbose=0)
    (draws,) = averages.posterior.draws.values()
    assert draws.shape == (300, 1, D)
    eye = np.eye(1)
    expected = theory.iterate_average_covariance(eye, eye, rate, window=50, S=S)[0, 0]
    ratios = np.mean(draws.astype("float64") ** 2, axis=(1, 2)) / expected
    blocks = ratios.reshape(20, -1).mean(1)
    error = blocks.std(ddof=1) / np.sqrt(20)
    assert error < 0.02
    assert abs(blocks.mean() - 1) < 4 * error, (blocks.mean(), error)
    # The posterior's variance is 1 / N.
    assert abs(expected * N - (1.0 if rate == 0.5 else 0.37)) < 0.06
    messages = " ".join(str(w.message) for w in caught)
    assert ("step x smallest curvature x window is 1" in messages) == (rate == 0.02)


@pytest.mark.usefixtures("without_xla")
def test_curvature_and_noise_of_a_linear_model():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 3)).astype("float32")
    y = rng.standard_normal((200, 1)).astype("float32")
    kernel = layers.Dense(1, use_bias=False, kernel_regularizer=keras.regularizers.L2(0.05))
    model = keras.Sequential([keras.Input((3,)), kernel])
    optimizer = sg.SGLD(1e-3, train_size=200, prior=4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.build(model.trainable_variables)
    model.compile(optimizer, sg.GaussianNegativeLogLikelihood())
    batches = sg.minibatches(x, y, 50, seed=1)
    A, C = stability.curvature_and_noise(model, optimizer, batches)
    x, y = (part.numpy().reshape(200, -1) for part in batches.batches(0, 4))
    np.testing.assert_allclose(A, x.T @ x / 200 + (4 / 200 + 0.1) * np.eye(3), rtol=1e-4, atol=1e-5)
    gradients = x * (x @ model.get_weights()[0] - y)
    np.testing.assert_allclose(C, np.cov(gradients.T), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize(("scale", "rate"), [(1.0, 1.7), (2.0, 0.6)])
def test_warnings_about_the_step_and_the_noise(scale, rate):
    """A = 1; the targets' covariance is C."""
    y = scale * np.random.default_rng(0).standard_normal((400, 5)).astype("float32")
    batches = sg.minibatches(np.ones((400, 1), "float32"), y, 10, seed=2, steps=100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mean_model(5, rate).fit(batches, callbacks=[sg.callbacks.IterateAverages(0)], verbose=0)
    messages = " ".join(str(w.message) for w in caught)
    assert ("Step x largest curvature is 1.7, and 2 is" in messages) == (rate == 1.7)
    assert ("sandwich covariance" in messages) == (scale == 2.0)
    assert "short for windows" not in messages
