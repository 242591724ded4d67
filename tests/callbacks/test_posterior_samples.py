import json
import logging

import fresh
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sgmcmc as sg
from keras_sgmcmc.callbacks import posterior_samples

pytestmark = pytest.mark.usefixtures("without_xla")

X = np.ones((20, 1), "float32")


def first_output(y_true, y_pred):
    return y_pred[:, 0]


def counting_model(optimizer=None, **compile_arguments):
    """One weight that every update lowers by exactly 1, so that a draw says when it was taken."""
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    optimizer = optimizer or sg.SGLD(1.0, temperature=0, jit_compile=False)
    model.compile(optimizer=optimizer, loss=first_output, **compile_arguments)
    return model


def fit(model, *callbacks, epochs=1, **arguments):
    """Ten batches an epoch."""
    arguments = {"batch_size": 2, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(X, X, epochs=epochs, callbacks=list(callbacks), **arguments)


def updates_before(posterior):
    (draws,) = posterior.draws.values()
    return list(-draws[:, 0, 0])


class LiveWeights(keras.callbacks.Callback):
    """The weights after every step, as Keras gives them."""

    def __init__(self):
        super().__init__()
        self.at = {}

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        self.at[step] = [np.array(weight) for weight in self.model.get_weights()]


class Interrupt(keras.callbacks.Callback):
    def __init__(self, step, error=KeyboardInterrupt):
        super().__init__()
        self.step, self.error = step, error

    def on_train_batch_begin(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step:
            raise self.error


# Which steps.


@pytest.mark.parametrize(
    ("burn_in", "thinning", "expected"),
    [
        (0, 1, range(1, 21)),
        (5, 4, [9, 13, 17]),
        (12, 8, [20]),
        (np.int64(8), 6.0, [14, 20]),
    ],
)
def test_steps_of_the_draws(burn_in, thinning, expected):
    samples = sg.callbacks.PosteriorSamples(burn_in, thinning)
    fit(counting_model(), samples, epochs=2)
    assert list(samples.posterior.steps) == list(expected)
    assert updates_before(samples.posterior) == list(expected)


def test_steps_per_execution():
    # Ten batches in blocks of four: Keras calls back after steps 4, 8, 10, 14, 18 and 20.
    samples = sg.callbacks.PosteriorSamples(3, 4)
    fit(counting_model(steps_per_execution=4), samples, epochs=2)
    assert list(samples.posterior.steps) == [8, 14, 18, 20]  # due at 7, 11, 15 and 19
    assert updates_before(samples.posterior) == [8, 14, 18, 20]


def test_steps_per_execution_warns_of_a_finer_interval():
    samples = sg.callbacks.PosteriorSamples(0, 3)
    with pytest.warns(UserWarning, match="interval of 3 steps from `thinning` becomes 4"):
        fit(counting_model(steps_per_execution=4), samples)
    assert list(samples.posterior.steps) == [4, 8, 10]


def test_gradient_accumulation():
    optimizer = sg.SGLD(1.0, temperature=0, gradient_accumulation_steps=3, jit_compile=False)
    samples = sg.callbacks.PosteriorSamples(2, 2)
    fit(counting_model(optimizer), samples, epochs=3)
    assert list(samples.posterior.steps) == [4, 6, 8, 10]
    np.testing.assert_allclose(updates_before(samples.posterior), [4, 6, 8, 10], rtol=1e-5)


@pytest.mark.parametrize(("skipped", "expected"), [(0, [5, 8]), (2, [5, 8])])
def test_mixed_float16_draws_at_the_steps_of_float32(skipped, expected):
    def model(policy):
        keras.config.set_dtype_policy(policy)
        try:
            return counting_model(sg.SGLD(1.0, temperature=0, jit_compile=False))
        finally:
            keras.config.set_dtype_policy("float32")

    mixed = model("mixed_float16")
    assert isinstance(mixed.optimizer, keras.optimizers.LossScaleOptimizer)
    # Gradients of 1 in float16: a scale of 2^17 overflows twice before it is halved to 2^15.
    mixed.optimizer.initial_scale = 2.0 ** (15 + skipped)
    samples, reference = (sg.callbacks.PosteriorSamples(2, 3) for _ in range(2))
    fit(mixed, samples)
    fit(model("float32"), reference)
    assert int(mixed.optimizer.iterations) == 10 - skipped
    assert list(samples.posterior.steps) == expected
    assert list(reference.posterior.steps) == [5, 8]
    assert updates_before(samples.posterior) == expected
    assert samples.posterior.draws.popitem()[1].dtype == np.float32


def test_a_second_fit_goes_on_also_after_an_interruption():
    model, samples = counting_model(), sg.callbacks.PosteriorSamples(4, 6)
    fit(model, samples)
    assert list(samples.posterior.steps) == [10]
    with pytest.raises(KeyboardInterrupt):
        fit(model, samples, Interrupt(17))
    fit(model, samples)
    assert list(samples.posterior.steps) == [10, 16, 22]
    assert updates_before(samples.posterior) == [10, 16, 22]


def test_a_fit_without_a_due_step_is_allowed_once_there_are_draws():
    model, samples = counting_model(), sg.callbacks.PosteriorSamples(0, 8)
    fit(model, samples)
    fit(model, samples, batch_size=20)
    assert list(samples.posterior.steps) == [8]


@pytest.mark.parametrize(
    ("burn_in", "thinning", "due"), [(10, 1, 11), (0, 11, 11), (9, 2, 11), (10**6, 1, 10**6 + 1)]
)
def test_a_fit_in_which_no_draw_can_come_is_refused(burn_in, thinning, due):
    model = counting_model()
    with pytest.raises(
        ValueError, match=f"training ends at step 10.*first draw is due at step {due}"
    ):
        fit(model, sg.callbacks.PosteriorSamples(burn_in, thinning))
    assert int(model.optimizer.iterations) == 0


def test_epochs_of_one_step_initial_epoch_and_validation():
    samples = sg.callbacks.PosteriorSamples(1, 2)
    history = fit(
        counting_model(),
        samples,
        epochs=8,
        initial_epoch=2,
        batch_size=20,
        validation_data=(X, X),
    )
    assert list(samples.posterior.steps) == [3, 5]
    assert history.history["draws"] == [0, 0, 1, 1, 2, 2]
    assert history.history["burn_in_left"] == [0, 0, 0, 0, 0, 0]
    assert len(history.history["val_loss"]) == 6


def test_steps_of_unknown_number():
    def batches():
        for _ in range(10):
            yield X[:2], X[:2]

    samples = sg.callbacks.PosteriorSamples(2, 3)
    counting_model().fit(batches(), callbacks=[samples], verbose=0)
    assert list(samples.posterior.steps) == [5, 8]


# What a draw holds.


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(3, activation="tanh")
        self.normalize = keras.layers.BatchNormalization()
        self.top = keras.layers.Dense(1)

    def call(self, inputs, training=False):
        return self.top(self.normalize(self.hidden(inputs), training=training))


class OwnTrainStep(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"mine": loss}


def sequential(built=True):
    return keras.Sequential(
        ([keras.Input((2,))] if built else [])
        + [
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1),
        ]
    )


def sgld(**arguments):
    arguments = {"train_size": 20, "prior": 1.0, "seed": 1, "jit_compile": False, **arguments}
    return sg.SGLD(0.05, **arguments)


def regression():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(20, 2)).astype("float32")
    return x, x[:, :1] + 1.0


@pytest.mark.parametrize(
    ("make", "compile_arguments"),
    [
        (sequential, {"run_eagerly": True}),
        (sequential, {"jit_compile": True}),
        (lambda: sequential(built=False), {}),
        (OwnTrainStep, {}),
    ],
    ids=["eager", "jit", "unbuilt", "own train_step"],
)
def test_draws_are_the_weights_and_statistics_of_their_step(make, compile_arguments):
    x, y = regression()
    model, live = make(), LiveWeights()
    samples = sg.callbacks.PosteriorSamples(3, 3)
    model.compile(optimizer=sgld(), loss=sg.GaussianNegativeLogLikelihood(), **compile_arguments)
    model.fit(x, y, batch_size=4, epochs=3, callbacks=[live, samples], verbose=0)
    posterior = samples.posterior
    assert list(posterior.steps) == [6, 9, 12, 15]
    for index, step in enumerate(posterior.steps):
        for drawn, weight in zip(posterior.weights(index), live.at[step], strict=True):
            np.testing.assert_array_equal(drawn, weight)
    # Two kernels, two biases, and four vectors of BatchNorm; no seeds, no metrics.
    assert len(posterior.draws) == 8


def test_predictive_of_a_draw_equals_predict_at_its_step():
    x, y = regression()
    model, live = sequential(), {}
    model.compile(optimizer=sgld(), loss=sg.GaussianNegativeLogLikelihood())

    class Predict(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            live[int(self.model.optimizer.iterations)] = self.model.predict(x, verbose=0)

    samples = sg.callbacks.PosteriorSamples(0, 2)
    model.fit(x, y, batch_size=4, epochs=2, callbacks=[samples, Predict()], verbose=0)
    predictions = samples.posterior.predict(x, reduce=None, verbose=0)
    assert list(samples.posterior.steps) == [2, 4, 6, 8, 10]
    expected = [live[step] for step in samples.posterior.steps]
    np.testing.assert_allclose(predictions, expected, atol=1e-5)
    # The moving statistics take part: with those of the end the first draw predicts otherwise.
    model.set_weights(
        [
            last if "moving" in weight.path else first
            for weight, first, last in zip(
                model.weights, samples.posterior.weights(0), model.get_weights(), strict=True
            )
        ]
    )
    assert np.abs(model.predict(x, verbose=0) - predictions[0]).max() > 1e-3


def test_draws_are_copies():
    model, samples = counting_model(), sg.callbacks.PosteriorSamples(0)
    fit(model, samples, batch_size=5)
    posterior = samples.posterior
    assert updates_before(posterior) == [1, 2, 3, 4]
    kernel = model.trainable_variables[0]
    live, again = (np.asarray(kernel.value.read_value()) for _ in range(2))
    assert np.shares_memory(live, again)  # it is what the model trains, and no copy
    for (array,) in samples._draws:
        assert not np.shares_memory(array, live)
    kernel.assign([[99.0]])
    assert updates_before(posterior) == updates_before(samples.posterior) == [1, 2, 3, 4]


def test_weights_are_copied_only_for_draws(monkeypatch):
    """Nor does anything else bring them to the host, with other callbacks about."""
    copied, read = [], []
    copy, tensor = posterior_samples.read_only_copy, type(tf.constant(0))
    convert = tensor.numpy

    def counting_convert(value):
        read.append(tuple(value.shape))
        return convert(value)

    monkeypatch.setattr(tensor, "numpy", counting_convert)

    def counting_copy(variable):
        copied.append(int(model.optimizer.iterations))
        before = len(read)
        array = copy(variable)
        del read[before:]
        return array

    monkeypatch.setattr(posterior_samples, "read_only_copy", counting_copy)
    model = counting_model()
    annealing = sg.callbacks.StepSizeAnnealing(sg.schedules.PowerDecay(1.0, 100.0, 0.5))
    others = [sg.callbacks.ChainMonitor(), annealing]
    samples = sg.callbacks.PosteriorSamples(2, 4)
    fit(model, samples, *others, epochs=2)
    # Held, they would make the next update copy all weights.
    assert samples._values_seen is None
    # Once at the start, for its size, and at the draws.
    assert copied == [0, 6, 10, 14, 18]
    assert () in read
    assert (1, 1) not in read


def test_the_posterior_is_made_once_for_the_same_draws():
    model, samples = counting_model(), sg.callbacks.PosteriorSamples(0)
    with pytest.raises(ValueError, match="no draw yet"):
        samples.posterior  # noqa: B018
    fit(model, samples)
    first = samples.posterior
    assert samples.posterior is first
    fit(model, samples)
    assert len(first) == 10
    assert len(samples.posterior) == 20


def test_frozen_layers_are_kept_once():
    x, y = regression()
    inputs = keras.Input((2,))
    backbone = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
    )
    backbone.trainable = False
    model = keras.Model(inputs, keras.layers.Dense(1, name="top")(backbone(inputs)))
    model.compile(optimizer=sgld(), loss=sg.GaussianNegativeLogLikelihood())
    samples = sg.callbacks.PosteriorSamples(0, 5)
    model.fit(x, y, batch_size=4, epochs=2, callbacks=[samples], verbose=0)
    assert sorted(samples.posterior.draws) == ["top/bias", "top/kernel"]
    before = backbone.get_weights()
    backbone.set_weights([2.0 + weight for weight in before])
    by_path = dict(zip([w.path for w in model.weights], samples.posterior.weights(1), strict=True))
    for weight, value in zip(backbone.weights, before, strict=True):
        np.testing.assert_array_equal(by_path[weight.path], value)


def two_layers():
    layers = [
        keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name)
        for name in ("first", "second")
    ]
    model = keras.Sequential([keras.Input((1,)), *layers])
    model.compile(optimizer=sgld(), loss=sg.GaussianNegativeLogLikelihood())
    return model


def test_freeze_and_recompile_with_the_same_optimizer():
    model = two_layers()
    fit(model)
    model.layers[0].trainable = False
    model.compile(optimizer=model.optimizer, loss=sg.GaussianNegativeLogLikelihood())
    frozen = model.layers[0].get_weights()[0]
    samples = sg.callbacks.PosteriorSamples(10, 2)
    fit(model, samples)
    posterior = samples.posterior
    np.testing.assert_array_equal(model.layers[0].get_weights()[0], frozen)
    assert list(posterior.steps) == [12, 14, 16, 18, 20]
    ((path, draws),) = posterior.draws.items()
    assert path.endswith("second/kernel")
    assert len(np.unique(draws)) == 5
    for weights in posterior:
        np.testing.assert_array_equal(weights[0], frozen)


@pytest.mark.filterwarnings("ignore:A layer's `trainable` state has changed")
def test_freezing_without_recompiling_warns_once_that_the_layer_still_moves():
    model = two_layers()
    fit(model)
    model.layers[0].trainable = False
    samples = sg.callbacks.PosteriorSamples(0, 2)
    with pytest.warns(UserWarning, match="first/kernel'] are frozen, but the compiled") as caught:
        fit(model, samples)
    ours = [w for w in caught if "are frozen" in str(w.message)]
    assert len(ours) == 1


@pytest.mark.filterwarnings("ignore:A layer's `trainable` state has changed")
def test_freezing_before_the_first_step_without_recompiling_does_not_warn():
    # The step is traced with the layer frozen already, and doesn't update it.
    model = two_layers()
    model.optimizer.build(model.trainable_variables)
    model.layers[0].trainable = False
    fit(model, sg.callbacks.PosteriorSamples(0, 2))
    np.testing.assert_array_equal(model.layers[0].get_weights()[0], [[1.0]])


def test_layers_may_be_frozen_after_a_fit_that_was_refused():
    model, samples = two_layers(), sg.callbacks.PosteriorSamples(10)
    with pytest.raises(ValueError, match="No draw can come"):
        fit(model, samples)
    fit(model)
    model.layers[0].trainable = False
    model.compile(optimizer=model.optimizer, loss=sg.GaussianNegativeLogLikelihood())
    fit(model, samples)
    assert len(samples.posterior.draws) == 1


def test_draws_of_other_variables_are_refused():
    model, samples = two_layers(), sg.callbacks.PosteriorSamples(0)
    fit(model, samples)
    model.layers[0].trainable = False
    model.compile(optimizer=model.optimizer, loss=sg.GaussianNegativeLogLikelihood())
    with pytest.raises(ValueError, match="not those of the draws taken before"):
        fit(model, samples)
    assert int(model.optimizer.iterations) == 10


# How many draws.


def test_max_samples_spaces_evenly_over_the_run_and_doubles_after_it():
    model, samples = counting_model(), sg.callbacks.PosteriorSamples(4, 2, max_samples=8)
    fit(model, samples, epochs=5)
    # 23 draws could come by step 50; every third makes 7.
    assert list(samples.posterior.steps) == [10, 16, 22, 28, 34, 40, 46]
    fit(model, samples)
    assert list(samples.posterior.steps) == [16, 28, 40, 52]
    fit(model, samples)
    assert (
        list(samples.posterior.steps) == updates_before(samples.posterior) == [16, 28, 40, 52, 64]
    )


@pytest.mark.parametrize("most", [1, 5])
def test_max_samples_where_the_number_of_steps_is_unknown(most):
    def batches():
        for _ in range(77):
            yield X[:2], X[:2]

    samples = sg.callbacks.PosteriorSamples(3, 1, max_samples=most)
    counting_model().fit(batches(), callbacks=[samples], verbose=0)
    steps = samples.posterior.steps
    assert most / 2 <= len(steps) <= most
    interval = steps[0] - 3
    assert list(steps) == list(range(3 + interval, 78, interval))
    assert updates_before(samples.posterior) == list(steps)


@pytest.mark.parametrize(("most", "expected"), [(2, [14]), (3, [8, 18]), (5, [4, 8, 14, 18, 20])])
def test_max_samples_under_steps_per_execution(most, expected):
    # Callbacks come after 4, 8, 10, 14, 18 and 20. Draws are due every 12, 8 and 4 steps.
    samples = sg.callbacks.PosteriorSamples(0, 4, max_samples=most)
    fit(counting_model(steps_per_execution=4), samples, epochs=2)
    assert list(samples.posterior.steps) == expected


class Announced(keras.callbacks.Callback):
    """What had been announced when the first update began."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            self.text = self.read()


def test_number_and_memory_are_printed_before_the_first_update(capsys):
    announced = Announced(lambda: capsys.readouterr().out)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1000)])
    model.compile(optimizer=sgld(), loss=sg.GaussianNegativeLogLikelihood())
    samples = sg.callbacks.PosteriorSamples(2, 2)
    model.fit(X, np.zeros((20, 1000)), batch_size=2, callbacks=[samples, announced], verbose=2)
    # 2000 weights of 4 bytes; 4 draws at steps 4, 6, 8 and 10.
    assert (
        "PosteriorSamples: draws of 7.81 KiB at step 4 and every 2 from there, at most 4 draws "
        "(31.2 KiB) in memory\n"
    ) in announced.text


@pytest.mark.parametrize(
    ("max_samples", "message"),
    [
        (None, "draws of 4 B at step 1 and every 1 from there, at most 10 draws (40 B) in memory"),
        (3, "draws of 4 B at step 4 and every 4 from there, at most 2 draws (8 B) in memory"),
    ],
)
def test_they_are_logged_where_fit_is_silent(caplog, max_samples, message):
    caplog.set_level(logging.INFO, "keras_sgmcmc")
    samples = sg.callbacks.PosteriorSamples(0, max_samples=max_samples)
    fit(counting_model(), samples)
    ours = [r.getMessage() for r in caplog.records if r.name == "keras_sgmcmc"]
    assert ours == [f"PosteriorSamples: {message}"]


def test_draws_and_burn_in_are_logged(capsys):
    batch_logs = []

    class Logs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batch_logs.append((logs["draws"], logs["burn_in_left"]))

    history = fit(
        counting_model(steps_per_execution=4),
        sg.callbacks.PosteriorSamples(13, 4),
        Logs(),
        epochs=3,
        verbose=2,
    ).history
    # Keras calls back after steps 4, 8, 10; 14, 18, 20; 24, 28, 30; draws are due at 17, 21, ...
    assert batch_logs == [
        *[(0, 9), (0, 5), (0, 3)],
        *[(0, 0), (1, 0), (1, 0)],
        *[(2, 0), (3, 0), (4, 0)],
    ]
    assert history["draws"] == [0, 1, 4]
    assert history["burn_in_left"] == [3, 0, 0]
    assert "draws: 4.0000" in capsys.readouterr().out


# Weights of draws.


@pytest.mark.parametrize("first", [True, False], ids=["before annealing", "after annealing"])
def test_step_weights_are_the_step_sizes(first):
    samples = sg.callbacks.PosteriorSamples(0, 2, step_weights=True)
    annealing = sg.callbacks.StepSizeAnnealing(lambda step: 1 / (1 + step))
    callbacks = [samples, annealing] if first else [annealing, samples]
    fit(counting_model(), *callbacks)
    expected = 1 / np.array([2, 4, 6, 8, 10])
    weights = samples.posterior.draw_weights
    np.testing.assert_allclose(weights, expected / expected.sum(), rtol=1e-6)


def test_step_weights_make_averages_right_under_a_decreasing_step():
    # y_ij ~ N(theta_j, 1/2), theta_j ~ N(0, 1/4), N rows: precision 2 N + 4 and mean 2 N y / that.
    rows, columns, steps = 50, 4000, 400
    x = np.ones((rows, 1), "float32")
    y = np.random.default_rng(1).normal(1.0, 0.7, size=(rows, columns)).astype("float32")
    precision = 2 * rows + 4
    mean = 2 * y.sum(axis=0) / precision
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(columns, use_bias=False)])
    # Times the curvature of 2.1 it falls from 0.2, at the first draw, to 0.03.
    schedule = sg.schedules.PowerDecay(1.0, 5.0, 0.7)
    model.compile(
        optimizer=sg.SGLD(schedule, train_size=rows, prior=4.0, seed=1),
        loss=sg.GaussianNegativeLogLikelihood(noise_std=np.sqrt(0.5)),
    )
    samples = sg.callbacks.PosteriorSamples(20, 1, step_weights=True)
    batches = tf.data.Dataset.from_tensors((x, y)).repeat()
    model.fit(batches, steps_per_epoch=steps, shuffle=False, callbacks=[samples], verbose=0)
    posterior = samples.posterior
    rates = np.array([float(schedule(step)) for step in posterior.steps])
    np.testing.assert_allclose(posterior.draw_weights, rates / rates.sum(), rtol=1e-5)
    (draws,) = posterior.draws.values()
    z = (draws[:, 0, :] - mean) * np.sqrt(precision)
    # Over columns a single draw has standard errors of 0.016 (mean) and 0.022 (variance); the
    # discretisation makes the variance 5 % larger.
    assert abs(posterior.draw_weights @ z.mean(axis=1)) < 0.05
    assert abs(posterior.draw_weights @ np.square(z).mean(axis=1) - 1) < 0.1


# Stops and resumed runs.


def diverging(**arguments):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3, use_bias=False)])
    optimizer = sg.SGLD(0.1, train_size=20, seed=1, jit_compile=False)
    model.compile(optimizer=optimizer, loss=sg.GaussianNegativeLogLikelihood(), **arguments)
    return model


def test_draws_of_a_diverging_chain_are_taken_back_and_earlier_ones_kept():
    model, samples = diverging(), sg.callbacks.PosteriorSamples(0)
    data = {"x": X, "y": np.zeros((20, 3)), "batch_size": 20, "verbose": 0}
    model.fit(**data, epochs=40, callbacks=[samples])
    model.optimizer.learning_rate = 2.5
    with pytest.raises(sg.DivergenceError, match="grows without bound, since step") as raised:
        model.fit(**data, epochs=100, callbacks=[samples])
    posterior = samples.posterior
    assert list(posterior.steps)[:40] == list(range(1, 41))
    assert len(posterior) <= 51 < raised.value.step <= 90
    (draws,) = posterior.draws.values()
    assert np.abs(draws).max() < 100


@pytest.mark.parametrize("bad", ["weight", "statistic"])
def test_what_is_not_finite_is_never_drawn(bad):
    x, y = regression()
    model, samples = sequential(), sg.callbacks.PosteriorSamples(0)
    model.compile(optimizer=sgld(), loss=sg.GaussianNegativeLogLikelihood())

    class Poison(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 7:
                if bad == "weight":
                    variable = self.model.trainable_variables[0]
                else:
                    variable = self.model.get_layer(index=1).moving_variance
                variable.assign(np.nan * variable.numpy())

    with pytest.raises(sg.DivergenceError, match=r"at step 7 variable .* is not finite"):
        model.fit(x, y, batch_size=4, epochs=3, callbacks=[Poison(), samples], verbose=0)
    assert list(samples.posterior.steps) == [1, 2, 3, 4, 5, 6]
    assert all(np.all(np.isfinite(draws)) for draws in samples.posterior.draws.values())


def test_resumed_from_a_saved_model(tmp_path):
    def callbacks():
        samples = sg.callbacks.PosteriorSamples(5, 7)
        return samples, sg.callbacks.StepSizeAnnealing(sg.schedules.PowerDecay(0.1, 10.0, 0.6))

    def model():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
        optimizer = sg.pSGLD(0.05, train_size=20, seed=1, jit_compile=False)
        model.compile(optimizer=optimizer, loss=sg.GaussianNegativeLogLikelihood())
        return model

    y = np.zeros((20, 2))
    arguments = {"x": X, "y": y, "batch_size": 2, "shuffle": False, "verbose": 0}
    whole, interrupted = callbacks(), callbacks()
    keras.utils.set_random_seed(1)
    uninterrupted = model()
    uninterrupted.fit(**arguments, epochs=4, callbacks=whole)
    keras.utils.set_random_seed(1)
    first = model()
    first.fit(**arguments, epochs=2, callbacks=interrupted)
    first.save(tmp_path / "model.keras")
    resumed = callbacks()
    history = keras.saving.load_model(tmp_path / "model.keras").fit(
        **arguments, epochs=2, callbacks=resumed
    )
    assert list(whole[0].posterior.steps) == [12, 19, 26, 33, 40]
    assert list(interrupted[0].posterior.steps) == [12, 19]
    assert list(resumed[0].posterior.steps) == [26, 33, 40]
    for index in range(3):
        for ours, theirs in zip(
            resumed[0].posterior[index], whole[0].posterior[index + 2], strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    expected = [float(sg.schedules.PowerDecay(0.1, 10.0, 0.6)(step)) for step in (29, 39)]
    np.testing.assert_allclose(history.history["learning_rate"], expected, rtol=1e-6)
    assert history.history["burn_in_left"] == [0, 0]


RUN = """
import sys
import keras, numpy as np
import keras_sgmcmc as sg

def run(directory, interrupt=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
    optimizer = sg.pSGLD(0.05, train_size=20, seed=1, jit_compile=False)
    model.compile(optimizer=optimizer, loss=sg.GaussianNegativeLogLikelihood())
    samples = sg.callbacks.PosteriorSamples(15, 4)
    callbacks = [
        samples,
        keras.callbacks.BackupAndRestore(directory),
        sg.callbacks.StepSizeAnnealing(sg.schedules.PowerDecay(0.1, 10.0, 0.6)),
    ]
    if interrupt is not None:
        callbacks.append(interrupt)
    x = np.ones((20, 1), "float32")
    y = np.linspace(0, 1, 40).reshape(20, 2)
    history = model.fit(
        x, y, batch_size=2, epochs=5, shuffle=False, callbacks=callbacks, verbose=0
    )
    return {
        "iterations": int(optimizer.iterations),
        "steps": samples.posterior.steps.tolist(),
        "draws": [[w.tolist() for w in draw] for draw in samples.posterior],
        "optimizer": [np.asarray(v).tolist() for v in optimizer.variables],
        "history": history.history,
    }

if __name__ == "__main__":
    import json
    print(json.dumps(run(sys.argv[1])))
"""


def test_backup_and_restore_in_a_new_process(tmp_path):
    namespace = {"__name__": "run"}
    exec(RUN, namespace)
    whole = namespace["run"](tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        namespace["run"](tmp_path / "backup", Interrupt(24))
    resumed = json.loads(fresh.run(RUN, tmp_path / "backup").splitlines()[-1])
    # Epoch 3 begins anew at step 20, after the burn-in, and takes the draws from there on.
    assert whole["steps"] == [19, 23, 27, 31, 35, 39, 43, 47]
    assert resumed["steps"] == whole["steps"][1:]
    assert resumed["draws"] == whole["draws"][1:]
    assert resumed["iterations"] == whole["iterations"] == 50
    assert resumed["optimizer"] == whole["optimizer"]
    assert resumed["history"]["learning_rate"] == whole["history"]["learning_rate"][2:]
    assert resumed["history"]["burn_in_left"] == [0, 0, 0]
    assert resumed["history"]["draws"] == [2, 5, 7]


@pytest.mark.filterwarnings("error::UserWarning")
def test_two_replicas(mirrored):
    with mirrored.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
        model.compile(
            optimizer=sg.SGLD(1.0, train_size=20, seed=1, jit_compile=False),
            loss=sg.GaussianNegativeLogLikelihood(),
        )
    live = {}

    class Live(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            step = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
            live[step] = self.model.get_weights()

    samples = sg.callbacks.PosteriorSamples(1, 2)
    annealing = sg.callbacks.StepSizeAnnealing(sg.schedules.BlockDecay(0.5, every=2))
    data = {"x": np.ones((20, 1)), "y": np.zeros((20, 2)), "batch_size": 4, "verbose": 0}
    history = model.fit(**data, epochs=2, callbacks=[samples, Live(), annealing])
    for index, step in enumerate(samples.posterior.steps):
        for drawn, weight in zip(samples.posterior[index], live[step], strict=True):
            np.testing.assert_array_equal(drawn, weight)
    assert history.history["learning_rate"] == [0.125, 0.03125]
    model.optimizer.learning_rate = 3.0
    with pytest.raises(sg.DivergenceError):
        model.fit(**data, epochs=20, callbacks=[samples])
    # The draws of the fit that diverged are taken back.
    assert samples.posterior.steps.tolist()[:5] == [3, 5, 7, 9]


# Arguments.


def test_other_optimizers_are_named_in_a_warning():
    model = counting_model(keras.optimizers.SGD(1.0))
    samples = sg.callbacks.PosteriorSamples(0, 5)
    with pytest.warns(UserWarning, match="`SGD` is not a sampler"):
        fit(model, samples)
    assert updates_before(samples.posterior) == [5, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"burn_in": -1}, "`burn_in` should be an integer >= 0. Received: burn_in=-1"),
        ({"burn_in": 1.5}, "`burn_in` should be an integer >= 0. Received: burn_in=1.5"),
        ({"burn_in": None}, "`burn_in` should be"),
        ({"burn_in": True}, "`burn_in` should be"),
        ({"burn_in": 0, "thinning": 0}, "`thinning` should be an integer >= 1. Received: thinning"),
        ({"burn_in": 0, "max_samples": 0}, "`max_samples` should be an integer >= 1. Received"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        sg.callbacks.PosteriorSamples(**arguments)


def test_serialization():
    samples = sg.callbacks.PosteriorSamples(np.int64(3), 2, max_samples=5, step_weights=True)
    config = keras.saving.serialize_keras_object(samples)
    json.dumps(config)
    again = keras.saving.deserialize_keras_object(config)
    assert isinstance(again, sg.callbacks.PosteriorSamples)
    assert again.get_config() == samples.get_config()
    assert again.get_config() == {
        "burn_in": 3,
        "thinning": 2,
        "max_samples": 5,
        "directory": None,
        "step_weights": True,
    }
