"""One step worked by hand; T = 0 is the plain optimizer; the same chain in every mode."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sgmcmc as sg
from keras_sgmcmc import random

samplers = pytest.mark.parametrize("cls", [sg.SGLD, sg.pSGLD])


def noise(shape, step, stream, seed=3, dtype="float32"):
    return random.normal(shape, dtype, seed=seed, step=step, stream=stream).numpy()


@pytest.mark.parametrize("jit", [True, False])
def test_sgld_step_by_hand(jit):
    theta = np.array([[1.0, -2.0, 3.0], [0.5, 0.0, 4.0]], "float32")
    gradient = np.array([[0.1, 0.2, -0.3], [1.0, -1.0, 0.0]], "float32")
    variables = [keras.Variable(theta), keras.Variable(theta[0])]
    optimizer = sg.SGLD(0.2, train_size=50, prior=5.0, temperature=0.5, seed=3, jit_compile=jit)
    for step in range(3):
        before = [v.numpy() for v in variables]
        optimizer.apply([tf.constant(gradient), tf.constant(gradient[0])], variables)
        for i, (variable, old, g) in enumerate(
            zip(variables, before, (gradient, gradient[0]), strict=True)
        ):
            drift = g + 5.0 * old / 50
            z = noise(old.shape, step, i)
            expected = old - 0.2 * drift + np.sqrt(2 * 0.5 * 0.2 / 50) * z
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("jit", [True, False])
def test_psgld_step_by_hand(jit):
    """V from the likelihood alone; one G in drift and noise; frozen after two updates."""
    theta = np.array([1.0, -2.0, 3.0, 0.0], "float32")
    variable = keras.Variable(theta)
    optimizer = sg.pSGLD(
        0.02, train_size=50, prior=5.0, rho=0.9, epsilon=0.1, adaptation_steps=2, seed=3,
        jit_compile=jit,
    )  # fmt: skip
    V = np.zeros(4)
    for step in range(4):
        g = np.array([0.1, -1.0, 2.0, 0.0], "float32") * (step + 1)
        old = variable.numpy()
        optimizer.apply([tf.constant(g)], [variable])
        if step < 2:
            V = 0.9 * V + 0.1 * g**2
        G = 1 / (0.1 + np.sqrt(V))
        drift = g + 5.0 * old / 50
        expected = old - 0.02 * G * drift + np.sqrt(2 * 0.02 * G / 50) * noise((4,), step, 0)
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adaptation_steps", [None, 10])
def test_a_gradient_that_is_not_finite_leaves_the_preconditioner_alone(adaptation_steps):
    variable = keras.Variable(np.zeros(3, "float32"))
    optimizer = sg.pSGLD(1e-3, train_size=100, adaptation_steps=adaptation_steps)
    optimizer.apply([tf.constant([1.0, 2.0, 3.0])], [variable])
    before = optimizer._second_moments[0].numpy()
    optimizer.apply([tf.constant([np.nan, np.inf, 1e30])], [variable])
    np.testing.assert_array_equal(optimizer._second_moments[0].numpy(), before)


def test_noise_scales_as_the_root_of_step_temperature_and_size():
    """Log-log slopes over four decades, of the injected part and of the drift."""

    def moved(learning_rate=1e-2, train_size=100, temperature=1.0, gradient=0.0):
        variable = keras.Variable(np.zeros(1000, "float32"))
        optimizer = sg.SGLD(
            learning_rate, train_size=train_size, temperature=temperature, seed=3, jit_compile=False
        )
        optimizer.apply([tf.fill([1000], gradient)], [variable])
        return variable.numpy()

    decades = np.array([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    for name, slope in (("learning_rate", 1), ("temperature", 1), ("train_size", -1)):
        values = decades if name != "train_size" else 1 / decades
        variances = [moved(**{name: value}).var() for value in values]
        fitted = np.polyfit(np.log(values), np.log(variances), 1)[0]
        assert fitted == pytest.approx(slope, abs=1e-4), name
    drifts = [-moved(v, temperature=0.0, gradient=0.5).mean() for v in decades]
    np.testing.assert_allclose(drifts, 0.5 * decades, rtol=1e-5)


def tanh_network():
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def classification():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 5)).astype("float32")
    return x, (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)


def trained(optimizer, start, epochs=5, **kwargs):
    model = tanh_network()
    model.set_weights(start)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", **kwargs)
    model.fit(*classification(), batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


# RMSprop has its epsilon inside the root: with 1e-30 it is gone in both.
PLAIN = {
    sg.SGLD: (lambda **k: sg.SGLD(0.1, **k), lambda: keras.optimizers.SGD(0.1)),
    sg.pSGLD: (
        lambda **k: sg.pSGLD(0.01, rho=0.9, epsilon=1e-30, **k),
        lambda: keras.optimizers.RMSprop(0.01, rho=0.9, epsilon=1e-30),
    ),
}


@samplers
def test_temperature_zero_is_the_plain_optimizer_bit_for_bit_without_xla(cls):
    # In a graph TensorFlow rewrites RMSprop's division by a root, and only that, to rounding.
    modes = {"run_eagerly": cls is sg.pSGLD, "epochs": 2}
    start = tanh_network().get_weights()
    sampler, plain = PLAIN[cls]
    ours = trained(sampler(temperature=0, train_size=64, jit_compile=False), start, **modes)
    theirs = trained(plain(), start, **modes)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("cls", "jit_compile"), [(sg.SGLD, True), (sg.pSGLD, "auto")])
def test_temperature_zero_is_the_plain_optimizer_to_rounding_with_xla(cls, jit_compile):
    start = tanh_network().get_weights()
    sampler, plain = PLAIN[cls]
    ours = trained(sampler(temperature=0, train_size=64), start, jit_compile=jit_compile, epochs=1)
    theirs = trained(plain(), start, jit_compile=jit_compile, epochs=1)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_temperature_zero_goes_down_monotonically_on_a_convex_problem():
    variable = keras.Variable(np.array([3.0, -2.0], "float32"))
    curvature = np.array([1.0, 10.0], "float32")
    optimizer = sg.SGLD(0.15, temperature=0)
    losses = []
    for _ in range(50):
        theta = variable.numpy()
        losses.append(0.5 * np.sum(curvature * theta**2))
        optimizer.apply([tf.constant(curvature * theta)], [variable])
    assert np.all(np.diff(losses) < 0)


# Modes


def run_mode(cls, mode, start):
    prior = sg.GaussianPrior(groups={"kernel": 5.0, "bias": None})
    stable = {"epsilon": 1e-2} if cls is sg.pSGLD else {}
    optimizer = cls(1e-2, train_size=64, prior=prior, seed=5, **stable)
    x, y = classification()
    if mode in ("default", "eager", "jit"):
        options = {"default": {}, "eager": {"run_eagerly": True}, "jit": {"jit_compile": True}}
        return trained(optimizer, start, epochs=2, **options[mode])
    if mode == "steps_per_execution":
        return trained(optimizer, start, epochs=2, steps_per_execution=3)
    model = tanh_network()
    model.set_weights(start)
    if mode == "train_on_batch":
        model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
        for _ in range(2):
            for i in range(0, 64, 8):
                model.train_on_batch(x[i : i + 8], y[i : i + 8])
        return model.get_weights()
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    def step(xb, yb):
        with tf.GradientTape() as tape:
            loss = loss_of(yb, model(xb, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    if mode == "custom loop in a graph":
        optimizer.build(model.trainable_variables)
        step = tf.function(step)
    for _ in range(2):
        for i in range(0, 64, 8):
            step(tf.constant(x[i : i + 8]), tf.constant(y[i : i + 8]))
    return model.get_weights()


def test_every_mode_runs_the_same_chain():
    start = tanh_network().get_weights()
    expected = run_mode(sg.pSGLD, "default", start)
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(expected, start, strict=True))
    for mode in (
        "eager",
        "jit",
        "steps_per_execution",
        "train_on_batch",
        "custom loop",
        "custom loop in a graph",
    ):
        got = run_mode(sg.pSGLD, mode, start)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4, err_msg=mode)


@pytest.mark.parametrize("jit", [True, False])
def test_steps_and_variables_get_different_noise_and_seeds_decide(jit):
    n, steps = 4_000, 10
    zero = [tf.zeros(n), tf.zeros(n)]

    def chain(seed):
        variables = [keras.Variable(np.zeros(n, "float32")) for _ in range(2)]
        optimizer = sg.SGLD(0.5, train_size=1, seed=seed, jit_compile=jit)
        path = [np.zeros((2, n))]
        for _ in range(steps):
            optimizer.apply(zero, variables)
            path.append(np.stack([v.numpy() for v in variables]))
        return np.diff(np.stack(path), axis=0).reshape(2 * steps, n)

    first = chain(1)
    correlation = np.corrcoef(first) - np.eye(2 * steps)
    assert np.abs(correlation).max() < 5 / np.sqrt(n)
    for increments in first:
        assert abs(np.corrcoef(increments[1:], increments[:-1])[0, 1]) < 4 / np.sqrt(n)
    np.testing.assert_array_equal(first, chain(1))
    assert np.abs(np.corrcoef(first[0], chain(2)[0])[0, 1]) < 4 / np.sqrt(n)


@samplers
def test_compiled_update_has_no_host_callback_and_is_traced_once(cls):
    traces = []

    class Counting(cls):
        def preconditioner(self, *args):
            traces.append(1)
            return super().preconditioner(*args)

    arguments = {"adaptation_steps": 3} if cls is sg.pSGLD else {}
    variable = keras.Variable(np.zeros(7, "float32"))
    optimizer = Counting(1e-2, train_size=10, prior=1.0, **arguments)
    optimizer.build([variable])

    @tf.function(jit_compile=True)
    def step(gradient):
        optimizer.apply([gradient])

    for _ in range(6):
        step(tf.ones(7))
    assert len(traces) == 1
    assert int(optimizer.iterations) == 6
    operations = {op.type for op in step.get_concrete_function(tf.ones(7)).graph.get_operations()}
    assert not {name for name in operations if "Py" in name or "Host" in name}
    for _ in range(6):
        optimizer.apply([tf.ones(7)], [variable])
    assert len(traces) == 1


@samplers
@pytest.mark.parametrize("shape", [(), (1,), (3, 3, 2, 4), (0, 5)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shapes_and_dtypes(cls, shape, dtype):
    variable = keras.Variable(np.ones(shape), dtype=dtype)
    optimizer = cls(0.5, train_size=4, jit_compile=False)
    optimizer.apply([tf.ones(shape, dtype)], [variable])
    value = variable.numpy()
    assert value.shape == shape
    assert value.dtype == dtype
    assert np.all(np.isfinite(value))
    assert np.all(value != 1.0)


def test_float64_is_not_rounded_to_float32():
    """Weights of 1e8 that take steps of about 1, which float32 would round to multiples of 8."""
    n = 50_000
    variable = keras.Variable(np.full(n, 1e8), dtype="float64")
    optimizer = sg.SGLD(0.5, train_size=1, seed=1)
    optimizer.apply([tf.zeros(n, tf.float64)], [variable])
    moved = variable.numpy() - 1e8
    assert moved.var() == pytest.approx(1.0, rel=4 * np.sqrt(2 / n))
    assert len(np.unique(moved)) > 0.99 * n


@samplers
def test_float64_as_keras_default(cls):
    keras.config.set_floatx("float64")
    try:
        stable = {"epsilon": 0.1} if cls is sg.pSGLD else {}
        optimizer = cls(0.1, train_size=10, prior=2.0, seed=1, **stable)
        variable = keras.Variable(np.zeros(20_000))
        for _ in range(3):
            optimizer.apply([tf.zeros(20_000, tf.float64)], [variable])
    finally:
        keras.config.set_floatx("float32")
    assert {str(v.dtype) for v in optimizer.variables} <= {"float64", "int64", "uint32"}
    H = 0.1 if cls is sg.SGLD else 0.1 / 0.1
    shrink = 1 - 2.0 * H / 10
    expected = 2 * H / 10 * (1 + shrink**2 + shrink**4)
    assert variable.numpy().var() == pytest.approx(expected, rel=4 * np.sqrt(2 / 20_000))


def test_float64_layer_in_a_float32_model():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2, dtype="float64"), keras.layers.Dense(1)]
    )
    model.compile(optimizer=sg.pSGLD(train_size=1000, prior=1.0), loss="mse")
    before = model.get_weights()
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    assert [w.dtype for w in model.get_weights()] == ["float64"] * 2 + ["float32"] * 2
    assert not any(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))


@samplers
def test_gradient_accumulation_updates_once_in_k_batches(cls):
    """Three batches of 8 accumulated are one batch of 24: weights, noise, statistics, schedule."""
    x = np.random.default_rng(0).standard_normal((72, 5)).astype("float32")
    y = np.arange(72) % 3
    start = tanh_network().get_weights()
    ends = []
    for batch_size, accumulation in ((24, None), (8, 3)):
        model = tanh_network()
        model.set_weights(start)
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.01])
        model.compile(
            optimizer=cls(
                schedule,
                train_size=72,
                prior=1.0,
                seed=2,
                gradient_accumulation_steps=accumulation,
            ),
            loss="sparse_categorical_crossentropy",
        )
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        assert int(model.optimizer.iterations) == 3
        ends.append(model.get_weights())
    for a, b in zip(*ends, strict=True):
        # V divides by gradients, which enlarges the rounding of small ones.
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)

    variable = keras.Variable(np.zeros(5, "float32"))
    optimizer = cls(0.1, train_size=10, gradient_accumulation_steps=3, seed=2)
    moved = []
    for _ in range(6):
        optimizer.apply([tf.zeros(5)], [variable])
        moved.append(variable.numpy().copy())
    changed = [bool(np.any(a != b)) for a, b in zip([np.zeros(5), *moved], moved, strict=False)]
    assert changed == [False, False, True, False, False, True]


def test_psgld_moves_rows_without_data_with_a_step_of_rate_over_epsilon():
    """V is 0 there, so H = eta / epsilon; the user is told when that is unstable."""
    arguments = {"train_size": 100, "prior": 10.0, "seed": 1}
    variable = keras.Variable(np.ones((2, 20_000), "float32"))
    optimizer = sg.pSGLD(1e-3, epsilon=1e-3, **arguments)
    gradient = tf.IndexedSlices(tf.ones((1, 20_000)), tf.constant([0]), tf.constant([2, 20_000]))
    optimizer.apply([gradient], [variable])
    silent = variable.numpy()[1]
    assert silent.var() == pytest.approx(2 * 1.0 / 100, rel=4 * np.sqrt(2 / 20_000))
    assert abs(silent.mean() - (1 - 1.0 * 10 / 100)) < 4 * np.sqrt(0.02 / 20_000)
    with pytest.warns(
        UserWarning, match=r"data are silent.*10 times.*`epsilon` to at least 0.0001"
    ):
        sg.pSGLD(1e-3, epsilon=1e-5, **arguments).build([keras.Variable(np.ones(3))])


def test_embedding_rows_without_data_sample_the_prior():
    """Rows that no batch touches relax to N(0, 1 / lambda), and equal the dense computation."""
    rows, columns, precision, train_size = 10, 2_000, 4.0, 8
    embedding = keras.layers.Embedding(rows, columns, embeddings_initializer="zeros")
    model = keras.Sequential([keras.Input((1,), dtype="int32"), embedding])
    optimizer = sg.SGLD(
        0.1 * train_size / precision, train_size=train_size, prior=precision, seed=4
    )
    dense = keras.Variable(np.zeros((rows, columns), "float32"))
    twin = sg.SGLD(0.1 * train_size / precision, train_size=train_size, prior=precision, seed=4)
    tokens = tf.zeros((3, 1), tf.int32)
    draws = []
    for step in range(160):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(tokens) - 1.0))
        (gradient,) = tape.gradient(loss, model.trainable_variables)
        assert isinstance(gradient, tf.IndexedSlices)
        optimizer.apply([gradient], model.trainable_variables)
        twin.apply([tf.convert_to_tensor(gradient)], [dense])
        if step >= 40 and step % 30 == 0:
            draws.append(embedding.embeddings.numpy()[1:])
    np.testing.assert_array_equal(embedding.embeddings.numpy(), dense.numpy())
    squares = np.stack(draws).astype("float64") ** 2
    per_chain = squares.mean(axis=0).ravel()
    error = per_chain.std() / np.sqrt(per_chain.size)
    expected = 1 / precision / (1 - 0.05)
    assert error < 0.02 * expected
    assert abs(per_chain.mean() - expected) < 4 * error


def test_mixed_precision_scales_nothing_and_skips_noise_with_the_step():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = tanh_network()
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = sg.SGLD(0.1, train_size=64, prior=1.0, seed=5)
    start = model.get_weights()
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    assert model.optimizer.inner_optimizer is optimizer
    model.fit(*classification(), batch_size=8, shuffle=False, verbose=0)
    # The scale of 2^15 overflows no gradient of this model.
    assert int(optimizer.iterations) == 8
    same = sg.SGLD(0.1, train_size=64, prior=1.0, seed=5)
    for a, b in zip(model.get_weights(), trained(same, start, epochs=1), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3)
    before = model.get_weights()
    infinite = [tf.fill(v.shape, np.inf) for v in model.trainable_variables]
    model.optimizer.apply(infinite, model.trainable_variables)
    assert int(optimizer.iterations) == 8
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


# Scaling of the target by data, weights and losses


def conjugate_variance(columns, rows, weights=None, loss=None, **kwargs):
    """Variance of the draws of a mean, by `fit` on full batches, and its standard error."""
    prior = kwargs.pop("prior", 1.0)
    repeat = kwargs.pop("repeat", 1)
    y = np.random.default_rng(0).standard_normal((rows, 1)).astype("float32")
    y = np.repeat(np.broadcast_to(y, (rows, columns)), repeat, axis=0)
    x = np.ones((rows * repeat, 1), "float32")
    train_size = kwargs.pop("train_size", rows * repeat)
    precision = kwargs.pop("expected_precision")
    step = 0.1 * train_size / precision
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(columns, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(
        optimizer=sg.SGLD(step, train_size=train_size, prior=prior, seed=1),
        loss=loss or sg.GaussianNegativeLogLikelihood(1.0),
    )
    data = tf.data.Dataset.from_tensors((x, y) if weights is None else (x, y, weights))
    model.fit(data.repeat(60), verbose=0, shuffle=False, **kwargs)
    draws = []
    for _ in range(6):
        model.fit(data.repeat(25), verbose=0, shuffle=False, **kwargs)
        draws.append(model.get_weights()[0].ravel())
    squares = np.var(np.stack(draws).astype("float64"), axis=1)
    expected = 1 / precision / (1 - 0.05)
    return squares.mean() / expected, np.sqrt(2 / (6 * columns))


def test_duplicated_data_counts_and_the_prior_does_not_scale():
    for repeat in (1, 10):
        ratio, error = conjugate_variance(
            4_000, 20, repeat=repeat, prior=30.0, expected_precision=20 * repeat + 30.0
        )
        assert error < 0.02
        assert abs(ratio - 1) < 4 * error


def test_zero_and_double_weights():
    """Keras divides by rows, so U = sum w_i l_i: weights 1, 1, 0, 0 are two rows, 2 is two rows."""
    for weights in ([1, 1, 0, 0], [2, 0, 0, 0]):
        ratio, error = conjugate_variance(
            4_000, 4, weights=np.array(weights, "float32"), prior=1.0, expected_precision=3.0
        )
        assert abs(ratio - 1) < 4 * error


def test_mse_means_a_variance_of_one_half():
    """No factor 1/2: precision 2 N for one output; over d outputs Keras averages, 2 N / d."""
    columns = 4_000
    ratio, error = conjugate_variance(
        columns, 20, loss="mse", prior=1.0, expected_precision=20 * 2 / columns + 1.0
    )
    assert abs(ratio - 1) < 4 * error
    ratio, error = conjugate_variance(
        columns,
        20,
        loss=lambda y, p: keras.ops.sum(keras.ops.square(y - p), axis=-1),
        prior=1.0,
        expected_precision=20 * 2 + 1.0,
    )
    assert abs(ratio - 1) < 4 * error


def test_class_weight_is_the_equal_sample_weight():
    x, y = classification()
    start = tanh_network().get_weights()
    ends = []
    for weights in (
        {"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}},
        {"sample_weight": np.array([0.5, 2.0, 1.0])[y]},
    ):
        model = tanh_network()
        model.set_weights(start)
        model.compile(
            optimizer=sg.SGLD(0.1, train_size=64, seed=1), loss="sparse_categorical_crossentropy"
        )
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0, **weights)
        ends.append(model.get_weights())
    for a, b in zip(*ends, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_energy_at_stationarity():
    """The mean loss of the draws lies (D / 2) / N above its minimum."""
    from harness import run

    D, N, h = 20_000, 1_000, np.linspace(0.5, 2.0, 20_000).astype("float32")
    optimizer = sg.SGLD(0.02, train_size=N, seed=3)
    start = np.random.default_rng(0).standard_normal(D) / np.sqrt(N * h)
    draws = run(optimizer, start.astype("float32"), lambda t, _: h * t, steps=300, keep_every=100)
    energy = 0.5 * np.sum(h * draws.astype("float64") ** 2, axis=1)
    exact = 0.5 * np.sum(1 / (1 - 0.02 * h / 2)) / N
    error = exact * np.sqrt(2 / D)
    assert np.all(np.abs(energy - exact) < 4 * error)
    assert abs(exact / (D / 2 / N) - 1) < 0.02


# Distribution


def copies(variable):
    return [np.array(v.numpy()) for v in variable.value.values]


def test_a_plain_step_on_two_replicas_is_one_on_one(mirrored):
    """At T = 0, the prior's share included."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 5)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")

    weights = []
    for scope in (mirrored.scope, lambda: tf.device("CPU:0")):
        with scope():
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
            model.set_weights([np.full((5, 1), 2.0), np.array([1.0])])
            model.compile(
                optimizer=sg.SGLD(0.5, train_size=4, prior=1.0, temperature=0), loss="mse"
            )
        model.fit(x, y, batch_size=16, verbose=0)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@samplers
def test_two_replicas_stay_equal_and_share_no_noise(cls, mirrored):
    arguments = {"epsilon": 1.0, "rho": 0.5} if cls is sg.pSGLD else {}
    with mirrored.scope():
        theta = [keras.Variable(np.zeros((4, 5000), "float32"), name=n) for n in "ab"]
        optimizer = cls(0.1, train_size=10, seed=3, prior=1.0, **arguments)
        optimizer.build(theta)

    @tf.function
    def step():
        def replica():
            optimizer.apply([tf.zeros((4, 5000)), tf.zeros((4, 5000))], theta)

        mirrored.run(replica)

    previous = [np.zeros((4, 5000))] * 2
    increments = []
    for _ in range(5):
        step()
        for i, variable in enumerate(theta):
            first, second = copies(variable)
            np.testing.assert_array_equal(first, second)
            increments.append((first - previous[i] * (1 - 0.1 / 10)).ravel())
            previous[i] = first
    assert int(optimizer.iterations.numpy()) == 5
    increments = np.stack(increments)
    # The variance of one step is 2 T eta / N, and neither weights nor steps share noise.
    n = increments.shape[1]
    np.testing.assert_allclose(increments.var(axis=1), 0.02, rtol=4 * np.sqrt(2 / n))
    correlation = np.corrcoef(increments) - np.eye(10)
    assert np.abs(correlation).max() < 5 / np.sqrt(n)
    # The same noise as on one device.
    single = keras.Variable(np.zeros((4, 5000), "float32"))
    twin = cls(0.1, train_size=10, seed=3, prior=1.0, **arguments)
    twin.apply([tf.zeros((4, 5000))], [single])
    np.testing.assert_allclose(single.numpy().ravel(), increments[0], atol=1e-6)


def test_the_variance_on_two_replicas_that_share_a_batch(mirrored):
    with mirrored.scope():
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(4000, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        model.compile(
            optimizer=sg.SGLD(0.1, train_size=16, seed=3, prior=4.0),
            loss=sg.GaussianNegativeLogLikelihood(1.0),
        )
    x, y = np.ones((16, 1), "float32"), np.zeros((16, 4000), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    model.fit(data.repeat(60), verbose=0)
    squares = []
    for _ in range(6):
        model.fit(data.repeat(25), verbose=0)
        first, second = copies(model.trainable_variables[0])
        np.testing.assert_array_equal(first, second)
        squares.append(np.mean(first.astype("float64") ** 2))
    h = 20 / 16
    expected = 1 / (16 * h * (1 - 0.1 * h / 2))
    error = expected * np.sqrt(2 / (6 * 4000))
    assert abs(np.mean(squares) - expected) < 4 * error, (np.mean(squares), expected)


def test_strategy_of_one_replica():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    x = np.random.default_rng(0).standard_normal((16, 3)).astype("float32")
    weights = []
    for scope in (contextlib.nullcontext, strategy.scope):
        with scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(optimizer=sg.SGLD(0.1, train_size=16, prior=1.0, seed=1), loss="mae")
        model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0)
        weights.append(model.get_weights())
    for alone, distributed in zip(*weights, strict=True):
        np.testing.assert_allclose(alone, distributed, atol=1e-6)
