"""The drift Gamma of pSGLD: its value, the bias it removes, its estimate, and where it can't be."""

import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import assert_close, run

import keras_sgmcmc as sg
from keras_sgmcmc import compilation, curvature, random

# An independent NumPy copy of a step on a network with three tanh layers.

ETA, N, T, RHO, EPSILON, PRECISION, SEED = 2.0**-4, 16, 0.5, 0.75, 0.25, 2.0, 3
SIZES = (3, 4, 3, 2)


def options(**changed):
    arguments = {
        "learning_rate": ETA,
        "train_size": N,
        "temperature": T,
        "rho": RHO,
        "epsilon": EPSILON,
        "prior": PRECISION,
        "seed": SEED,
        "include_gamma": True,
    }
    return arguments | changed


def data():
    rng = np.random.default_rng(1)
    return rng.standard_normal((N, SIZES[0])), rng.standard_normal((N, SIZES[-1]))


def start():
    rng = np.random.default_rng(2)
    shapes = [s for a, b in itertools.pairwise(SIZES) for s in ((a, b), (b,))]
    return [rng.standard_normal(shape) for shape in shapes]


def network_gradient(weights, x, y):
    """Gradient of the mean over rows of |y - f(x)|^2 / 2."""
    activations = [x]
    for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
        activations.append(np.tanh(activations[-1] @ kernel + bias))
    delta = (activations[-1] - y) / len(x)
    gradients = []
    for layer in reversed(range(len(SIZES) - 1)):
        delta = delta * (1 - activations[layer + 1] ** 2)
        gradients = [activations[layer].T @ delta, delta.sum(axis=0), *gradients]
        delta = delta @ weights[2 * layer].T
    return gradients


def central_differences(weights, x, y, step=1e-5):
    """d g_i / d theta_i for every weight."""
    diagonal = []
    for position, weight in enumerate(weights):
        h = np.zeros_like(weight)
        for i in np.ndindex(weight.shape):
            sides = []
            for sign in (1, -1):
                moved = [w.copy() for w in weights]
                moved[position][i] += sign * step
                sides.append(network_gradient(moved, x, y)[position][i])
            h[i] = (sides[0] - sides[1]) / (2 * step)
        diagonal.append(h)
    return diagonal


def numpy_step(weights, moments, step, adapting=True):
    """The weights after a step without Gamma, the drift by Gamma, and V."""
    x, y = data()
    moved, drifts, updated = [], [], []
    gradients, diagonal = network_gradient(weights, x, y), central_differences(weights, x, y)
    for i, (w, g, h, V) in enumerate(zip(weights, gradients, diagonal, moments, strict=True)):
        if adapting:
            V = RHO * V + (1 - RHO) * g**2
        H = ETA / (EPSILON + np.sqrt(V))
        z = random.normal(w.shape, "float64", seed=SEED, step=step, stream=i).numpy()
        moved.append(w - H * (g + PRECISION * w / N) + np.sqrt(2 * T * H / N) * z)
        gamma = -(1 - RHO) * g * h / (np.sqrt(V) * (EPSILON + np.sqrt(V)) ** 2)
        drifts.append(ETA * T / N * gamma if adapting else np.zeros_like(g))
        updated.append(V)
    return moved, drifts, updated


@pytest.fixture
def double_precision():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def network(optimizer, **kwargs):
    model = keras.Sequential(
        [keras.Input((SIZES[0],)), *(keras.layers.Dense(n, "tanh") for n in SIZES[1:])]
    )
    model.set_weights(start())
    model.compile(optimizer=optimizer, loss=sg.GaussianNegativeLogLikelihood(1.0), **kwargs)
    return model


def one_epoch(model, epochs=1):
    model.fit(*data(), batch_size=N, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    ("changed", "compiled"),
    [
        ({}, {"jit_compile": True}),
        ({"jit_compile": False, "loss_scale_factor": 8.0, "adaptation_steps": 2}, {}),
    ],
    ids=["jit", "without_xla_scaled_frozen"],
)
def test_the_drift_is_that_of_central_differences(changed, compiled, double_precision):
    """Step by step, the applied drift to 1e-3 of itself; none once V is frozen."""
    model = network(sg.pSGLD(**options(**changed)), **compiled)
    moments = [np.zeros_like(w) for w in start()]
    for step in range(3):
        before = model.get_weights()
        after = one_epoch(model)
        adapting = step < changed.get("adaptation_steps", 3)
        without, drifts, moments = numpy_step(before, moments, step, adapting)
        for ours, base, drift in zip(after, without, drifts, strict=True):
            assert np.all(np.abs(drift) > 1e-7) or not adapting
            np.testing.assert_allclose(ours - base, drift, rtol=1e-3, atol=1e-9)


@pytest.mark.usefixtures("without_xla")
def test_fused_steps_are_the_same_chain(double_precision):
    rows = [np.concatenate([part] * 3) for part in data()]
    fused = network(sg.pSGLD(**options()), steps_per_execution=3)
    fused.fit(*rows, batch_size=N, shuffle=False, verbose=0)
    weights, moments = start(), [np.zeros_like(w) for w in start()]
    for step in range(3):
        without, drifts, moments = numpy_step(weights, moments, step)
        weights = [a + b for a, b in zip(without, drifts, strict=True)]
    for ours, theirs in zip(fused.get_weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.fixture
def mixed_precision():
    """Sets a policy until the test ends."""
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy("float32")


@pytest.mark.usefixtures("without_xla")
def test_bfloat16_gives_the_drift_to_its_rounding(monkeypatch, mixed_precision):
    """Difference of a step with and without Gamma, which has the same noise; 8 bits of fraction."""
    monkeypatch.setattr(curvature, "EXACT_UP_TO", 0)

    def drifts():
        with_gamma, without = (
            one_epoch(network(sg.pSGLD(**options(include_gamma=gamma)))) for gamma in (True, False)
        )
        return [a - b for a, b in zip(with_gamma, without, strict=True)]

    single = drifts()
    mixed_precision("mixed_bfloat16")
    same_sign = []
    for ours, theirs in zip(drifts(), single, strict=True):
        assert np.any(ours != theirs)
        tolerance = 0.15 * np.abs(theirs).max()
        np.testing.assert_allclose(np.abs(ours), np.abs(theirs), atol=tolerance)
        same_sign.append((np.sign(ours) == np.sign(theirs)).ravel())
    # V is g^2 at first, so Gamma has the sign of g, which rounding may turn where g is near 0.
    assert np.mean(np.concatenate(same_sign)) > 0.9


# The law that is sampled


@pytest.mark.parametrize(
    ("factor", "variance"), [(0.0, 1.444), (0.5, 1.207), (1.0, 1.0), (2.0, 0.671)]
)
def test_gamma_makes_the_law_right_without_memory(factor, variance):
    """U = N theta^2 / 2, rho = 0, full batch, step 0.02 eps: variance of theta times N.

    Independent weights in one variable: their Hessian is diagonal, so that the estimate is exact.
    With Gamma times f the law is p(theta) ~ (eps + |theta|)^(1 - f) exp(-U) but for the step,
    which the variances are the integrals of.
    """

    class Scaled(sg.pSGLD):
        def correction(self, *args):
            return factor * super().correction(*args)

    train_size, weights = 100, 20_000
    epsilon = train_size**-0.5
    optimizer = Scaled(
        0.02 * epsilon,
        rho=0.0,
        epsilon=epsilon,
        train_size=train_size,
        include_gamma=True,
        seed=5,
    )
    rng = np.random.default_rng(0)
    begin = rng.standard_normal(weights) * np.sqrt(variance / train_size)
    draws = run(
        optimizer, begin.astype("float32"), lambda theta, _: theta, steps=1_500, keep_every=100
    )
    squares = train_size * (draws[5:].astype("float64") ** 2).mean(axis=0)
    error = squares.std(ddof=1) / np.sqrt(weights)
    print(f"Gamma times {factor}: variance times N {squares.mean():.4f} +- {error:.4f}")
    assert error <= 0.01
    assert squares.mean() == pytest.approx(variance, abs=0.05)


# The diagonal of the Hessian


def traced_diagonal(model, x, y, jit=False):
    """Function of (steps, exact_up_to) to diagonals [steps, weights] of the model's loss."""
    variables = model.trainable_variables

    def diagonal(step, exact_up_to):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / 2
        gradients = [compilation.densify(g) for g in tape.gradient(loss, variables)]
        parts = curvature.hessian_diagonal(
            gradients,
            variables,
            streams=range(len(variables)),
            seed=11,
            step=step,
            exact_up_to=exact_up_to,
        )
        return tf.concat([tf.reshape(part, (-1,)) for part in parts], axis=0)

    @tf.function(jit_compile=jit, autograph=False)
    def diagonals(steps, exact_up_to):
        return tf.map_fn(
            lambda step: diagonal(step, exact_up_to), steps, fn_output_signature=model.compute_dtype
        )

    return lambda steps, exact_up_to: diagonals(tf.constant(steps), exact_up_to).numpy()


def test_the_estimate_is_unbiased():
    """10^4 probes on a network, whose Hessian is far from diagonal: within 4 standard errors."""
    x, y = (part.astype("float32") for part in data())
    model = network(sg.SGLD(train_size=N))
    diagonals = traced_diagonal(model, x, y)
    (exact,) = diagonals([0], 1000)
    estimates = diagonals(np.arange(10_000), 0).astype("float64")
    error = estimates.std(axis=0, ddof=1) / 100
    # Probes that hit the diagonal alone would pass any test of their mean.
    assert np.median(100 * error / np.abs(exact)) > 0.5
    assert_close(estimates.mean(axis=0), exact, error, "diagonal of the Hessian")


def test_probes_are_signs_that_depend_on_seed_step_and_variable():
    words = {"seed": 11, "step": 5, "stream": 0}
    first = curvature.signs((100_000,), "float32", **words).numpy()
    assert set(np.unique(first)) == {-1.0, 1.0}
    others = [
        curvature.signs((100_000,), "float32", **words | {name: value}).numpy()
        for name, value in (("seed", 12), ("step", 6), ("stream", 1))
    ]
    others += [np.roll(first, 1), random.normal((100_000,), "float32", **words).numpy()]
    # Six means of 10^5 terms of variance 1, each within 4 of its standard errors.
    for product in (first, *(first * other for other in others)):
        assert abs(product.mean()) < 4 / np.sqrt(100_000)
    np.testing.assert_array_equal(first, curvature.signs((100_000,), "float32", **words))


def test_embeddings_convolutions_and_shared_layers(double_precision):
    """Against central differences of the model's own gradient, in double precision."""
    inputs = keras.Input((4,), dtype="int32")
    shared = keras.layers.Dense(3, "tanh")
    hidden = keras.layers.Embedding(5, 3)(inputs)
    hidden = keras.layers.Conv1D(3, 2, padding="same", activation="softplus")(hidden)
    hidden = shared(shared(keras.layers.GlobalAveragePooling1D()(hidden)))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    rng = np.random.default_rng(0)
    model.set_weights([rng.standard_normal(w.shape) for w in model.get_weights()])
    x, y = rng.integers(0, 4, (8, 4)), rng.standard_normal((8, 1))

    @tf.function(autograph=False)
    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2) / 2
        gradients = tape.gradient(loss, model.trainable_variables)
        return tf.concat([tf.reshape(tf.convert_to_tensor(g), (-1,)) for g in gradients], 0)

    expected = []
    for position, weight in enumerate(model.get_weights()):
        for i in np.ndindex(weight.shape):
            sides = []
            for sign in (1, -1):
                moved = model.get_weights()
                moved[position][i] += sign * 1e-5
                kept = model.get_weights()
                model.set_weights(moved)
                sides.append(gradient().numpy()[len(expected)])
                model.set_weights(kept)
            expected.append((sides[0] - sides[1]) / 2e-5)
    (ours,) = traced_diagonal(model, x, y, True)([0], 1000)
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-8)


# State and arguments


@pytest.mark.usefixtures("without_xla")
def test_a_saved_chain_goes_on_with_the_same_probes(tmp_path, monkeypatch):
    monkeypatch.setattr(curvature, "EXACT_UP_TO", 0)
    model = network(sg.pSGLD(**options()))
    one_epoch(model, 5)
    model.save(tmp_path / "model.keras")
    through = one_epoch(model, 5)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.include_gamma is True
    for ours, theirs in zip(one_epoch(loaded, 5), through, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_config_round_trip():
    optimizer = sg.pSGLD(**options())
    config = json.loads(json.dumps(optimizer.get_config()))
    assert config["include_gamma"] is True
    assert sg.pSGLD.from_config(config).get_config() == optimizer.get_config()
    assert sg.pSGLD().get_config()["include_gamma"] is False


@pytest.mark.parametrize("value", [None, 1, "exact"])
def test_include_gamma_is_a_boolean(value):
    with pytest.raises(ValueError, match=f"`include_gamma` should be.*Received.*{value}"):
        sg.pSGLD(include_gamma=value)


def test_no_gradient_no_drift():
    """sqrt(V) = 0 where nothing was ever seen: Gamma's limit is 0, not 0 / 0."""
    variable = keras.Variable(np.array([0.0, 1.0], "float32"))
    optimizer = sg.pSGLD(1e-3, train_size=10, include_gamma=True, seed=1)

    @tf.function(autograph=False)
    def step():
        theta = tf.convert_to_tensor(variable)
        optimizer.apply([theta * tf.constant([0.0, 1.0])], [variable])

    step()
    z = random.normal((2,), "float32", seed=1, step=0, stream=0).numpy()
    assert variable.numpy()[0] == pytest.approx(np.sqrt(2 * 1e-3 / 1e-5 / 10) * z[0], rel=1e-5)
    assert np.isfinite(variable.numpy()[1])


# Where the Hessian can't be had


def unmoved(model):
    pairs = zip(model.get_weights(), start(), strict=True)
    return all(np.array_equal(a, b.astype(a.dtype)) for a, b in pairs)


def test_eager_steps_are_refused():
    model = network(sg.pSGLD(**options()), run_eagerly=True)
    with pytest.raises(ValueError, match=r"run eagerly.*without `run_eagerly`.*`adaptation_steps`"):
        one_epoch(model)
    assert unmoved(model)
    variable = keras.Variable(np.ones(2, "float32"))
    with pytest.raises(ValueError, match=r"one `tf.function`"):
        sg.pSGLD(**options()).apply([tf.ones(2)], [variable])
    np.testing.assert_array_equal(variable.numpy(), 1)


def test_gradient_accumulation_is_refused():
    with pytest.raises(ValueError, match=r"larger batches.*gradient_accumulation_steps=2"):
        sg.pSGLD(**options(gradient_accumulation_steps=2))


def test_several_replicas_are_refused(monkeypatch):
    model = network(sg.pSGLD(**options()))
    monkeypatch.setattr(compilation, "replicas", lambda: 2)
    with pytest.raises(ValueError, match=r"each of 2 replicas.*on one replica"):
        one_epoch(model)
    assert unmoved(model)


@pytest.mark.parametrize("compiled", [{}, {"jit_compile": True}])
def test_float16_is_refused(compiled, mixed_precision):
    mixed_precision("mixed_float16")
    model = network(sg.pSGLD(**options()), **compiled)
    with pytest.raises(ValueError, match=r"vanish in float16.*mixed_bfloat16.*Received: .*kernel"):
        one_epoch(model)
    assert unmoved(model)


@pytest.mark.parametrize("exact_up_to", [1000, 0])
def test_gradients_from_another_function_are_refused(exact_up_to, monkeypatch):
    monkeypatch.setattr(curvature, "EXACT_UP_TO", exact_up_to)
    variable = keras.Variable(np.ones(2, "float32"))
    optimizer = sg.pSGLD(**options())

    @tf.function(autograph=False)
    def step(gradient):
        optimizer.apply([gradient], [variable])

    with pytest.raises(ValueError, match=r"don't depend on the variables.*function that calls"):
        step(tf.ones(2))
    np.testing.assert_array_equal(variable.numpy(), 1)


def test_an_operation_without_second_derivative_is_named():
    variable = keras.Variable(np.ones((1, 2, 2, 1), "float32"))
    optimizer = sg.pSGLD(**options())

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            theta = tf.convert_to_tensor(variable)
            tape.watch(theta)
            dilated = tf.nn.dilation2d(
                theta, tf.zeros((2, 2, 1)), (1, 1, 1, 1), "SAME", "NHWC", (1, 1, 1, 1)
            )
            loss = tf.reduce_sum(dilated**2)
        optimizer.apply([tape.gradient(loss, theta)], [variable])

    with pytest.raises(ValueError, match=r"no second derivative.*Dilation2D"):
        step()
