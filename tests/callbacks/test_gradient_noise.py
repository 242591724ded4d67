"""GradientNoise in `fit` is the covariance of a plain loop's gradients, in every mode."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from per_example import zoo

import keras_sgmcmc as sg
from keras_sgmcmc.callbacks import GradientNoise

STILL = 1e-12  # a learning rate at which gradients don't change


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def make(name="dense", rows=12, learning_rate=STILL, optimizer=None, **arguments):
    optimizer = optimizer or keras.optimizers.SGD(learning_rate)
    return zoo.make(name, rows=rows, optimizer=optimizer, **arguments)


def fit(model, x, y, *callbacks, **arguments):
    arguments = {"batch_size": 12, "shuffle": False, "verbose": 0, **arguments}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.fit(x, y, callbacks=list(callbacks), **arguments)


def variances(noise):
    return np.concatenate([np.ravel(entry) for entry in noise.covariance.values()])


def assert_close(found, expected, tolerance=1e-5):
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def exact(gradients):
    return gradients.var(axis=0, ddof=1)


# Modes of training.


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("dense", {}),
        ("own_weight", {"run_eagerly": True}),
        ("dense", {"jit_compile": True}),
        ("own_weight", {"jit_compile": True}),
        ("own_weight", {"steps_per_execution": 3}),
    ],
    ids=str,
)
def test_every_mode_equals_numpy(name, arguments):
    model, x, y = make(name, **arguments)
    gradients = zoo.loop(model, x, y)
    noise = GradientNoise()
    fit(model, x, y, noise, epochs=3, batch_size=12)
    assert_close(variances(noise), exact(gradients))
    assert noise.examples == 36
    assert list(noise.covariance) == [variable.path for variable in model.trainable_variables]
    slow = [way for way in noise.ways.values() if way != "closed form"]
    assert len(slow) == (name == "own_weight")


@pytest.mark.parametrize("name", ["regularized", "own_weight", "dropout"])
def test_gradients_are_those_at_the_weights_that_the_batch_finds(name):
    """Also where the step is long."""
    model, x, y = make(name, learning_rate=0.3)
    gradients = zoo.loop(model, x, y)
    noise = GradientNoise()
    fit(model, x, y, noise)
    assert_close(variances(noise), exact(gradients))
    assert "off by" not in str(noise.ways)
    mean = gradients.mean(0)
    square = mean @ mean - exact(gradients).sum() / 12
    if square > 0:
        assert noise.gradient_noise_scale == pytest.approx(
            exact(gradients).sum() / square, rel=1e-3
        )


def test_gradient_accumulation_measures_the_batch_of_the_update():
    model, x, y = make(
        rows=24, optimizer=keras.optimizers.SGD(STILL, gradient_accumulation_steps=3)
    )
    gradients = zoo.loop(model, x, y)
    noise = GradientNoise()
    fit(model, x, y, noise, batch_size=8, epochs=2)
    assert noise.examples == 16
    assert_close(variances(noise), exact(gradients[16:]))


def test_sample_weights_multiply_gradients():
    model, x, y = make()
    weights = np.random.default_rng(0).uniform(0, 2, 12).astype("float32")
    gradients = zoo.loop(model, x, y, weights)
    noise = GradientNoise()
    fit(model, x, y, noise, sample_weight=weights)
    assert_close(variances(noise), exact(gradients))


@pytest.mark.parametrize("name", ["two_outputs", "shared_layer"])
def test_structures_of_data(name):
    model, x, y = make(name)
    gradients = zoo.loop(model, x, y)
    noise = GradientNoise()
    fit(model, x, y, noise)
    assert_close(variances(noise), exact(gradients))


def test_a_generator_loses_no_batch():
    """Case 38: what the callback needs to know of the data is not had by taking some."""
    sampler = sg.SGLD(STILL, train_size=12, temperature=0, jit_compile=False)
    model, x, y = make(optimizer=sampler)
    gradients = zoo.loop(model, x, y)
    taken = []

    def batches():
        for start in range(0, 12, 4):
            taken.append(start)
            yield x[start : start + 4], y[start : start + 4]

    noise = GradientNoise()
    fit(model, batches(), None, noise, batch_size=None)
    assert taken == [0, 4, 8]
    assert int(model.optimizer.iterations) == 3
    assert noise.examples == 12
    within = np.mean([exact(gradients[start : start + 4]) for start in taken], axis=0)
    assert_close(variances(noise), within)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ["dense"])
def test_mixed_precision(name, policy):
    model, x, y = make(name)
    gradients = zoo.loop(model, x, y)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        half, _, _ = make(name)
    finally:
        keras.config.set_dtype_policy(before)
    half.set_weights(model.get_weights())
    scaled = isinstance(half.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    if scaled:
        half.optimizer.build(half.trainable_variables)
        # The first steps overflow, and are skipped.
        half.optimizer.dynamic_scale.assign(2.0**25)
        half.optimizer.initial_scale = 2.0**25
    noise = GradientNoise()
    fit(half, x, y, noise, epochs=20)
    assert 0 < noise.examples <= 20 * 12
    assert set(noise.ways.values()) == {"closed form"}
    assert_close(variances(noise), exact(gradients), 0.03)
    assert np.isfinite(noise.gradient_noise_scale)


@pytest.mark.parametrize(("name", "rate"), [("regularized", 0.1), ("tied_weights", 1e-12)])
@pytest.mark.filterwarnings("ignore")
def test_two_replicas(name, rate, mirrored):
    with mirrored.scope():
        model, x, y = make(name, rows=12, optimizer=keras.optimizers.SGD(rate))
    expected = zoo.loop(model, x, y).var(axis=0, ddof=1)

    def check(noise, examples, epochs):
        model.fit(x, y, batch_size=12, epochs=epochs, callbacks=[noise], verbose=0, shuffle=False)
        assert noise.examples == examples
        found = np.concatenate([np.ravel(entry) for entry in noise.covariance.values()])
        assert np.abs(found - expected).max() < 1e-5 * expected.max(), name

    check(GradientNoise(), 12, 1)
    if rate < 1e-6:
        check(GradientNoise(every=2), 24, 4)


def test_a_last_batch_of_another_size():
    model, x, y = make(rows=19)
    gradients = zoo.loop(model, x, y)
    noise = GradientNoise()
    fit(model, x, y, noise)
    first, last = exact(gradients[:12]), exact(gradients[12:])
    assert noise.examples == 19
    assert_close(variances(noise), (12 * first + 7 * last) / 19)


@pytest.mark.parametrize("name", ["dense", "own_weight"])
@pytest.mark.parametrize("structure", ["block", "full"])
def test_matrices(name, structure):
    model, x, y = make(name)
    expected = np.cov(zoo.loop(model, x, y).T)
    noise = GradientNoise(structure=structure)
    fit(model, x, y, noise, epochs=2)
    if structure == "full":
        assert_close(noise.covariance, expected)
        rank = np.trace(expected) ** 2 / np.sum(expected**2)
    else:
        start, squares = 0, 0
        paths = [v.path.rsplit("/", 1)[0] for v in model.trainable_variables]
        assert list(noise.covariance) == list(dict.fromkeys(paths))
        for matrix in noise.covariance.values():
            stop = start + len(matrix)
            assert_close(matrix, expected[start:stop, start:stop])
            squares += np.sum(expected[start:stop, start:stop] ** 2)
            start = stop
        rank = np.trace(expected) ** 2 / squares
    assert noise.trace == pytest.approx(np.trace(expected), rel=1e-5)
    assert noise.effective_rank == pytest.approx(rank, rel=1e-4)


@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_microbatches(structure):
    model, x, y = make(rows=12)
    means = zoo.loop(model, x, y, group=3)
    noise = GradientNoise(microbatch_size=3, structure=structure)
    fit(model, x, y, noise)
    if structure == "full":
        assert_close(noise.covariance, 3 * np.cov(means.T))
    else:
        assert_close(variances(noise), 3 * exact(means))


# The average.


def test_every_and_decay():
    model, x, y = make(rows=60)
    gradients = zoo.loop(model, x, y)
    batches = [exact(gradients[start : start + 12]) for start in range(0, 60, 12)]
    all_steps = GradientNoise(decay=0.6)
    fit(model, x, y, all_steps)
    average = np.zeros_like(batches[0])
    for step, found in enumerate(batches, 1):
        average += max(1 / step, 0.4) * (found - average)
    assert_close(variances(all_steps), average)
    # Step 5 is the last: now steps 6 to 10.
    second = GradientNoise(every=2)
    fit(model, x, y, second)
    assert second.examples == 36
    assert_close(variances(second), (batches[0] + batches[2] + batches[4]) / 3)


def test_a_second_fit_goes_on_also_with_another_batch_size():
    model, x, y = make(rows=24)
    gradients = zoo.loop(model, x, y)
    noise = GradientNoise()
    fit(model, x, y, noise)
    halves = [exact(gradients[:12]), exact(gradients[12:])]
    assert_close(variances(noise), sum(halves) / 2)
    fit(model, x, y, noise)
    assert noise.examples == 48
    assert_close(variances(noise), sum(halves) / 2)
    fit(model, x, y, noise, batch_size=8)
    thirds = [exact(gradients[start : start + 8]) for start in (0, 8, 16)]
    assert noise.examples == 72
    assert_close(variances(noise), (24 * sum(halves) + 8 * sum(thirds)) / 72)
    # Another model begins anew.
    other, _, _ = make(rows=24)
    fit(other, x, y, noise)
    assert noise.examples == 24


@keras.saving.register_keras_serializable(package="test_gradient_noise")
class Fed(keras.optimizers.SGD):
    """Takes the covariance, and says what it wants."""

    warmup_steps = None
    noise_structure = "diagonal"
    train_size = 36

    def build(self, variables):
        super().build(variables)
        self.fed = self.add_variable((), name="fed")
        self.calls = self.add_variable((), dtype="int32", name="calls")
        self.received = [self.add_variable(self.size(variables), name="received")]

    def size(self, variables):
        total = sum(int(np.prod(v.shape)) for v in variables)
        return (total,) if self.noise_structure == "diagonal" else (total, total)

    def update_noise_covariance(self, covariance, examples):
        self.fed.assign(examples)
        self.calls.assign_add(1)
        if self.noise_structure == "diagonal":
            covariance = [tf.concat([tf.reshape(entry, [-1]) for entry in covariance], 0)]
        self.received[0].assign(covariance[0])


@pytest.mark.parametrize("arguments", [{}, {"steps_per_execution": 2}])
def test_the_optimizer_is_fed_after_one_expected_pass_over_the_data(arguments):
    optimizer = Fed(STILL)
    model, x, y = make(optimizer=optimizer, **arguments)
    gradients = zoo.loop(model, x, y)
    noise = GradientNoise()
    fit(model, x, y, noise, epochs=2)
    assert optimizer.calls.numpy() == 0
    fit(model, x, y, noise, epochs=4)
    assert noise.examples == 72
    assert optimizer.calls.numpy() == 4
    assert optimizer.fed.numpy() == 72
    assert_close(optimizer.received[0].numpy(), exact(gradients))


def test_a_matrix_is_fed_after_fifty_examples_for_each_row():
    optimizer = Fed(STILL)
    optimizer.noise_structure = "full"
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile(optimizer, "mse")
    x, y = numbers(40, 2), numbers(40, 1, seed=1)
    noise = GradientNoise()
    fit(model, x, y, noise, epochs=3, batch_size=40)
    assert optimizer.calls.numpy() == 0
    fit(model, x, y, noise, epochs=1, batch_size=40)
    assert optimizer.calls.numpy() == 1  # 160 examples, of 150
    assert optimizer.fed.numpy() == 160
    np.testing.assert_array_equal(optimizer.received[0].numpy(), noise.covariance)


@pytest.mark.parametrize("every", [1, 2])
def test_what_was_gathered_in_the_warm_up_is_forgotten(every):
    optimizer = Fed(STILL)
    optimizer.warmup_steps, optimizer.train_size = 3, 1
    model, x, y = make(rows=72, optimizer=optimizer)
    gradients = zoo.loop(model, x, y)
    batches = [exact(gradients[start : start + 12]) for start in range(0, 72, 12)]
    noise = GradientNoise(every=every)
    fit(model, x, y, noise, steps_per_epoch=3)
    assert optimizer.calls.numpy() == 0
    assert noise.examples == (36 if every == 1 else 12)
    fit(model, x[36:], y[36:], noise)
    kept = batches[3:] if every == 1 else [batches[3], batches[5]]
    assert noise.examples == 12 * len(kept)
    assert_close(variances(noise), sum(kept) / len(kept))
    assert optimizer.fed.numpy() == noise.examples


# What is reported.


def test_history():
    model, x, y = make(metrics=["mae"])
    noise = GradientNoise()
    history = fit(model, x, y, noise, epochs=2, validation_data=(x, y)).history
    assert set(history) == {
        "loss",
        "mae",
        "val_loss",
        "val_mae",
        "gradient_noise_trace",
        "gradient_noise_rank",
        "gradient_noise_scale",
    }
    gradients = zoo.loop(model, x, y)
    C = np.cov(gradients.T)
    mean = gradients.mean(0)
    variance = np.diag(C)
    assert history["gradient_noise_trace"][-1] == pytest.approx(np.trace(C), rel=1e-5)
    rank = variance.sum() ** 2 / (variance**2).sum()
    assert history["gradient_noise_rank"][-1] == pytest.approx(rank, rel=1e-5)
    square = mean @ mean - np.trace(C) / 12
    scale = np.trace(C) / square if square > 0 else np.inf
    assert history["gradient_noise_scale"][-1] == pytest.approx(scale, rel=1e-3)
    assert noise.gradient_noise_scale == history["gradient_noise_scale"][-1]
    # Without the callback nothing is left.
    assert set(fit(model, x, y).history) == {"loss", "mae"}


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize("structure", ["diagonal", "full"])
@pytest.mark.parametrize("cls", [sg.SGLD, sg.pSGLD])
def test_the_noise_ratio_of_samplers_that_add_all_noise(cls, structure):
    """tr(H C H / S) / tr(2 T H / N)."""
    N, T, rate = 1000, 0.5, 1e-9
    optimizer = cls(rate, train_size=N, temperature=T, seed=1)
    model, x, y = make(optimizer=optimizer)
    C = exact(zoo.loop(model, x, y))
    noise = GradientNoise(structure=structure)
    history = fit(model, x, y, noise).history
    H = np.full(len(C), rate)
    if cls is sg.pSGLD:
        moments = np.concatenate([np.ravel(m) for m in optimizer._second_moments])
        H = rate / (1e-5 + np.sqrt(moments))
    expected = np.sum(H**2 * C) / 12 / np.sum(2 * T * H / N)
    assert history["noise_ratio"][0] == noise.noise_ratio == pytest.approx(expected, rel=1e-3)


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize(("rate", "warns"), [(1e-9, False), (0.05, True)])
def test_a_large_noise_ratio_is_warned_of_once(rate, warns):
    model, x, y = make(optimizer=sg.SGLD(rate, train_size=1000, seed=1))
    noise = GradientNoise()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            history = model.fit(x, y, batch_size=12, epochs=2, callbacks=[noise], verbose=0)
    assert (history.history["noise_ratio"][-1] > 0.1) == warns
    messages = [str(w.message) for w in caught if "times the noise" in str(w.message)]
    assert len(messages) == warns
    assert all("larger batches or a smaller learning rate" in message for message in messages)


def test_other_optimizers_have_no_noise_ratio():
    model, x, y = make()
    noise = GradientNoise()
    assert "noise_ratio" not in fit(model, x, y, noise).history
    with pytest.raises(ValueError, match=r"`SGLD` or `pSGLD`\. Received: SGD"):
        _ = noise.noise_ratio


def linear(x, y, batch_size, seed=0, epochs=1):
    """tail_index of a linear model at its optimum, over independent batches."""
    model = keras.Sequential([keras.Input((x.shape[1],)), layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(STILL), "mse")
    model.set_weights([np.zeros((x.shape[1], 1))])
    noise = GradientNoise()
    fit(model, x, y, noise, batch_size=batch_size)
    return noise


def test_tail_index_of_gaussian_noise():
    x = numbers(20_000, 30)
    y = np.sign(numbers(20_000, 1, seed=1))  # the product is Gaussian
    noise = linear(x, y, 100)
    # 6,000 logarithms of Var 1.23 and kurtosis 7 determine alpha to 0.1.
    assert noise.tail_index == pytest.approx(2.0, abs=0.2)


def test_tail_index_of_heavy_tails():
    rng = np.random.default_rng(2)
    x = rng.standard_cauchy((20_000, 30)).astype("float32")
    y = np.sign(numbers(20_000, 1, seed=1))
    noise = linear(x, y, 100)
    assert noise.tail_index == pytest.approx(1.0, abs=0.2)


def test_tail_index_by_hand():
    model, x, y = make(rows=36)
    gradients = zoo.loop(model, x, y)
    noise = GradientNoise()
    fit(model, x, y, noise)
    average, logs = 0.0, []
    for step, start in enumerate(range(0, 36, 12), 1):
        some = gradients[start : start + 12]
        average = average + (exact(some) - average) / step
        usable = average > 0
        logs.append(np.log(np.abs(some.mean(0)[usable]) / np.sqrt(average[usable] / 12)))
    inverse = 6 / np.pi**2 * np.concatenate(logs).var() - 0.5
    expected = 2.0 if inverse <= 0.25 else inverse**-0.5
    assert noise.tail_index == pytest.approx(expected, rel=1e-3)


def test_config_round_trip():
    noise = GradientNoise(microbatch_size=2, decay=0.9, every=3, structure="block")
    config = noise.get_config()
    assert config.pop("memory_budget") > 0
    assert config == {"microbatch_size": 2, "decay": 0.9, "every": 3, "structure": "block"}
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(noise))
    assert isinstance(again, GradientNoise)
    assert again.get_config() == noise.get_config()


# Errors.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"microbatch_size": 0}, "microbatch_size=0"),
        ({"microbatch_size": 1.5}, "microbatch_size=1.5"),
        ({"every": 0}, "every=0"),
        ({"decay": 0.0}, "decay=0.0"),
        ({"decay": 1.0}, "decay=1.0"),
        ({"structure": "kronecker"}, "structure='kronecker'"),
        ({"memory_budget": -1}, "memory_budget=-1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        GradientNoise(**arguments)


def test_results_before_the_first_batch():
    noise = GradientNoise()
    names = ("covariance", "examples", "trace", "effective_rank", "gradient_noise_scale")
    for name in (*names, "tail_index", "ways"):
        with pytest.raises(RuntimeError, match="before the first batch"):
            getattr(noise, name)


def test_a_matrix_that_does_not_fit():
    model, x, y = make()
    with pytest.raises(ValueError, match=r"GiB.*`\"diagonal\"` or `\"block\"`"):
        fit(model, x, y, GradientNoise(structure="full", memory_budget=10_000))
    with pytest.raises(ValueError, match=r"GiB.*`\"diagonal\"`"):
        fit(model, x, y, GradientNoise(structure="block", memory_budget=1_000))
    fit(model, x, y, GradientNoise(memory_budget=1_000))


@pytest.mark.parametrize(("batch_size", "microbatch_size"), [(1, 1), (3, 2)])
def test_a_batch_of_one_microbatch(batch_size, microbatch_size):
    model, x, y = make(rows=3, jit_compile=True)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size, drop_remainder=True)
    noise = GradientNoise(microbatch_size=microbatch_size, structure="full")
    with pytest.raises(ValueError, match="at least two microbatches"):
        model.fit(data, callbacks=[noise], verbose=0)


def test_a_short_batch_adds_nothing():
    model, x, y = make(rows=13)
    gradients = zoo.loop(model, x, y)
    noise = GradientNoise()
    fit(model, x, y, noise)  # 12 and 1
    assert noise.examples == 12
    assert_close(variances(noise), exact(gradients[:12]))


# Ways.


class Reversed(layers.Layer):
    """Calls its layer on the batch in another order: only numbers tell."""

    def build(self, shape):
        self.dense = layers.Dense(3, activation="tanh", name="inner")
        self.dense.build(shape)

    def call(self, x):
        return keras.ops.flip(self.dense(keras.ops.flip(x, 0)), 0)


@pytest.mark.parametrize("arguments", [{}, {"steps_per_execution": 2}])
def test_a_closed_form_that_is_wrong_is_dropped_and_what_it_gave_forgotten(arguments):
    model = keras.Sequential([keras.Input((4,)), Reversed(), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(STILL), "mse", **arguments)
    x, y = numbers(12, 4), numbers(12, 2, seed=1)
    gradients = zoo.loop(model, x, y)
    noise = GradientNoise()
    twice = np.concatenate([x, x]), np.concatenate([y, y])
    with pytest.warns(UserWarning, match="inner/kernel: its closed form is off by"):
        model.fit(*twice, batch_size=12, epochs=3, callbacks=[noise], verbose=0, shuffle=False)
    assert sorted(way == "closed form" for way in noise.ways.values()) == [False] * 2 + [True] * 2
    assert_close(variances(noise), exact(gradients))
    assert noise.examples == 72 - 12 * arguments.get("steps_per_execution", 1)
    mean = gradients.mean(0)
    square = mean @ mean - exact(gradients).sum() / 12
    expected = exact(gradients).sum() / square if square > 0 else np.inf
    assert noise.gradient_noise_scale == pytest.approx(expected, rel=1e-3)


def test_one_warning_says_what_is_slow():
    model, x, y = make("own_weight")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        noise = GradientNoise()
        for _ in range(2):
            model.fit(x, y, batch_size=12, callbacks=[noise], verbose=0, shuffle=False)
    ours = [str(w.message) for w in caught if "no closed form" in str(w.message)]
    assert len(ours) == 1
    # Keras counts the names of a process up.
    (own,) = [v.path for v in model.trainable_variables if "variable" in v.path]
    assert f"{own}: its layer has no closed form" in ours[0]
    assert "kernel" not in ours[0]


def test_a_model_with_a_train_step_of_its_own():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = layers.Dense(2)

        def call(self, x):
            return self.out(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = 3 * self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = Own()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = numbers(12, 4), numbers(12, 2, seed=1)
    model(x)
    gradients = zoo.loop(model, x, y)
    noise = GradientNoise()
    fit(model, x, y, noise)
    assert_close(variances(noise), exact(gradients))


@pytest.mark.parametrize("name", ["dropout", "batch_normalization"])
def test_training_is_what_it_is_without(name):
    """Weights, moving statistics, metrics and random masks."""
    ends = []
    for callbacks in ([], [GradientNoise()]):
        model, x, y = make(name, learning_rate=0.1, metrics=["mae"])
        history = fit(model, x, y, *callbacks, epochs=3).history
        ends.append([*model.get_weights(), history["loss"], history["mae"]])
    for plain, measured in zip(*ends, strict=True):
        np.testing.assert_allclose(measured, plain, rtol=1e-5, atol=1e-6)


def test_with_a_sampler_and_posterior_samples():
    x, y = numbers(48, 3), numbers(48, 1, seed=1)
    chains = []
    for extra in ([], [GradientNoise(every=2)]):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2, "tanh"), layers.Dense(1)])
        model.compile(
            optimizer=sg.SGLD(1e-2, train_size=48, prior=1.0, seed=3),
            loss=sg.GaussianNegativeLogLikelihood(0.5),
        )
        samples = sg.callbacks.PosteriorSamples(burn_in=4, thinning=2)
        fit(model, x, y, samples, *extra, epochs=3)
        chains.append(model.get_weights())
    for plain, measured in zip(*chains, strict=True):
        np.testing.assert_allclose(measured, plain, rtol=1e-5, atol=1e-6)
    noise = extra[0]
    assert noise.examples == 6 * 12
    assert set(noise.ways.values()) == {"closed form"}
    gradients = zoo.loop(model, x, y)
    # The weights have moved a little since.
    assert noise.trace == pytest.approx(exact(gradients).sum(), rel=1.0)


def test_the_update_of_many_weights_is_compiled(monkeypatch):
    found = []
    for threshold in (1, 100_000):
        monkeypatch.setattr("keras_sgmcmc.compilation._COMPILED_FROM", threshold)
        model, x, y = make("dense")
        noise = GradientNoise()
        model.fit(x, y, batch_size=12, callbacks=[noise], verbose=0, shuffle=False)
        found.append(variances(noise))
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_an_eager_step_compiles_no_update(monkeypatch):
    monkeypatch.setattr("keras_sgmcmc.compilation._COMPILED_FROM", 1)
    compiled = []
    monkeypatch.setattr("keras_sgmcmc.compilation.compiled", lambda f: compiled.append(f) or f)
    model, x, y = make("dense", run_eagerly=True)
    model.fit(x, y, batch_size=12, callbacks=[GradientNoise()], verbose=0)
    assert not compiled
