"""What SGFS and constant SGD share: warm-up, where C comes from, state, and training by `fit`."""

import json

import keras
import noise
import numpy as np
import pytest
import tensorflow as tf
from oracles import linear_posterior

import keras_sgmcmc as sg
from keras_sgmcmc import theory

samplers = pytest.mark.parametrize(
    ("cls", "form"),
    [
        (sg.SGFS, {"fisher": "diagonal"}),
        (sg.SGFS, {"fisher": "block"}),
        (sg.SGFS, {"fisher": "full", "noise": 5.0}),
        (sg.ConstantSGD, {"preconditioner": "scalar"}),
        (sg.ConstantSGD, {"preconditioner": "sqrt", "momentum": 0.5}),
        (sg.ConstantSGD, {"preconditioner": "full", "momentum": 0.5}),
    ],
)


def dense_model():
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation="tanh", name="hidden"),
            keras.layers.Dense(1, name="out"),
        ]
    )


def regression(rows=64):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 3)).astype("float32")
    return x, x[:, :1] - 0.5 * x[:, 1:2]


def with_covariance(optimizer, model):
    """The optimizer, built, and told a covariance of its own for every variable."""
    optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(1)
    entries = []
    for variable in optimizer._covariance:
        shape = tuple(variable.shape)
        if optimizer.noise_structure == "diagonal":
            entries.append(rng.uniform(0.5, 2.0, shape))
        else:
            x = rng.standard_normal((3 * shape[0], shape[0]))
            entries.append(np.cov(x.T))
    optimizer.update_noise_covariance([tf.constant(e, tf.float32) for e in entries], 1000)
    return optimizer


def compiled(cls, form, model=None, **kwargs):
    model = model or dense_model()
    arguments = {"train_size": 64, "batch_size": 8, "prior": 1.0, "seed": 3, "warmup_steps": 0}
    compile_kwargs = {
        name: kwargs.pop(name) for name in ("jit_compile_model", "run_eagerly") if name in kwargs
    }
    optimizer = with_covariance(cls(**(arguments | form | kwargs)), model)
    model.compile(
        optimizer=optimizer,
        loss=sg.GaussianNegativeLogLikelihood(0.5),
        run_eagerly=compile_kwargs.get("run_eagerly", False),
        jit_compile=compile_kwargs.get("jit_compile_model", False),
    )
    return model


def weights(model):
    return np.concatenate([w.ravel() for w in model.get_weights()])


@pytest.mark.usefixtures("without_xla")
@samplers
def test_config_round_trip(cls, form):
    optimizer = cls(
        train_size=10, batch_size=2, warmup_steps=7, update_every=3, prior=2.0, seed=1, **form
    )
    config = json.loads(json.dumps(optimizer.get_config()))
    again = cls.from_config(config)
    assert again.get_config() == optimizer.get_config()
    assert {name: config[name] for name in form} == form
    assert cls.from_config(cls(None).get_config())._is_largest if cls is sg.SGFS else True


@pytest.mark.parametrize(
    ("cls", "form"),
    [
        (sg.SGFS, {"fisher": "block"}),
        (sg.ConstantSGD, {"preconditioner": "sqrt", "momentum": 0.5}),
    ],
)
def test_all_modes_take_the_same_steps(cls, form):
    start, ends = None, []
    for mode in (
        {"run_eagerly": True, "jit_compile": False},
        {},
        {"jit_compile_model": True},
    ):
        model = dense_model()
        start = start or model.get_weights()
        model.set_weights(start)
        compiled(cls, form, model, **mode)
        model.fit(*regression(), batch_size=8, shuffle=False, verbose=0)
        ends.append(weights(model))
    for end in ends[1:]:
        np.testing.assert_allclose(end, ends[0], atol=1e-4)
    assert np.max(np.abs(ends[0] - np.concatenate([w.ravel() for w in start]))) > 1e-3


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize(
    ("cls", "form"),
    [
        (sg.SGFS, {"fisher": "block"}),
        (sg.ConstantSGD, {"preconditioner": "sqrt", "momentum": 0.5}),
        (sg.ConstantSGD, {"preconditioner": "full", "momentum": 0.5}),
    ],
)
def test_a_saved_chain_goes_on_bit_for_bit(cls, form, tmp_path):
    x, y = regression()
    model = compiled(cls, form, update_every=5)
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    saved, state = model.optimizer._named_state(), loaded.optimizer._named_state()
    assert sorted(saved) == sorted(state)
    for name, value in state.items():
        np.testing.assert_array_equal(value.numpy(), saved[name].numpy(), err_msg=name)
    for chain in (model, loaded):
        chain.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_array_equal(weights(loaded), weights(model))


@pytest.mark.usefixtures("without_xla")
def test_warm_up_is_plain_optimization_without_noise():
    x, y = regression()
    start = dense_model().get_weights()
    ends = []
    for optimizer in (
        sg.ConstantSGD(0.05, train_size=64, batch_size=8, momentum=0.5),
        keras.optimizers.SGD(0.05, momentum=0.5),
        sg.SGFS(train_size=64, batch_size=8, warmup_learning_rate=0.01, fisher="full"),
        keras.optimizers.RMSprop(0.01, epsilon=0.0),
    ):
        model = dense_model()
        model.set_weights(start)
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        ends.append(weights(model))
        if hasattr(optimizer, "noise_logs"):
            assert optimizer.noise_logs() == {"warming_up": 1.0}
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-5)
    np.testing.assert_allclose(ends[2], ends[3], atol=1e-3)


@pytest.mark.usefixtures("without_xla")
def test_the_spread_of_batch_gradients_stands_for_the_covariance():
    """S E (g_t - g_{t-1})^2 / 2, from the end of warm-up on, used after 200 steps."""
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((230, 1)).astype("float32") * [1.0, 3.0]
    gradients[:20] *= 100
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = sg.ConstantSGD(
        1e-3, preconditioner="diagonal", train_size=1000, batch_size=10, warmup_steps=21
    )
    for step, gradient in enumerate(gradients):
        assert optimizer.is_warming_up == (step < 221)
        optimizer.apply([tf.constant(gradient, tf.float32)], [variable])
    differences = np.diff(gradients[20:], axis=0)
    expected = 10 * np.mean(differences**2, axis=0) / 2
    np.testing.assert_allclose(optimizer._covariance[0].numpy(), expected, rtol=1e-4)
    # What a callback says counts, and the spread of the gradients no more.
    optimizer.update_noise_covariance([tf.constant([2.0, 5.0])], 500)
    optimizer.apply([tf.constant([1e3, 1e3])], [variable])
    np.testing.assert_array_equal(optimizer._covariance[0].numpy(), [2.0, 5.0])


@pytest.mark.usefixtures("without_xla")
def test_accumulated_batches_are_one_update():
    ends = []
    for accumulation in (None, 2):
        optimizer = sg.SGFS(
            fisher="full", train_size=100, batch_size=8, warmup_steps=0, seed=1,
            gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        variable = keras.Variable(np.zeros(3, "float32"))
        optimizer.build([variable])
        optimizer.update_noise_covariance([tf.eye(3)], 1000)
        parts = [[1.0, 2.0, 3.0]] if accumulation is None else [[0.0, 4.0, 1.0], [2.0, 0.0, 5.0]]
        for part in parts:
            optimizer.apply([tf.constant(part)], [variable])
        ends.append(variable.numpy())
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5)


@pytest.mark.usefixtures("without_xla")
def test_matrices_are_factored_when_due_and_when_what_they_depend_on_changes():
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = sg.SGFS(
        1.0, fisher="full", train_size=100, batch_size=8, warmup_steps=0, prior=1.0, update_every=3
    )
    optimizer.build([variable])
    factored = []
    for step in range(8):
        optimizer.update_noise_covariance([(step + 1.0) * tf.eye(2)], 100)
        if step == 5:
            optimizer.temperature = 0.5
        optimizer.apply([tf.zeros(2)], [variable])
        factored.append(int(optimizer._factor_step[0].numpy()))
    assert factored == [0, 0, 0, 3, 3, 5, 5, 5]


def test_matrices_without_the_callback_warn_in_the_logs():
    model = dense_model()
    model.compile(
        optimizer=sg.SGFS(fisher="full", train_size=64, batch_size=8, warmup_steps=5), loss="mse"
    )
    data = sg.minibatches(*regression(), 8, seed=1)
    with pytest.warns(UserWarning, match=r"still takes those of the warm-up.*GradientNoise\(\)"):
        model.fit(data, verbose=0, callbacks=[sg.callbacks.ChainMonitor()])


def test_reshuffled_data_are_warned_of():
    model = dense_model()
    model.compile(
        optimizer=sg.ConstantSGD(train_size=64, batch_size=8),
        loss=sg.GaussianNegativeLogLikelihood(1.0),
    )
    with pytest.warns(UserWarning, match="`ConstantSGD` turns the noise of the batches"):
        model.fit(*regression(), batch_size=8, verbose=0, callbacks=[sg.callbacks.ChainMonitor()])


class Regression:
    N, D, S, NOISE_STD = 400, 4, 20, 0.5

    def __init__(self):
        rng = np.random.default_rng(3)
        x = rng.standard_normal((self.N, self.D)) * [1.0, 0.8, 0.6, 0.4]
        y = x @ rng.standard_normal((self.D, 1)) + self.NOISE_STD * rng.standard_normal((self.N, 1))
        self.x, self.y = x.astype("float32"), y.astype("float32")
        self.mean, self.covariance = linear_posterior(x, y, self.NOISE_STD, 1.0)
        self.C = theory.gaussian_posterior(x, y[:, 0], noise_std=self.NOISE_STD).C

    def predicted(self, form, cls):
        """Covariance of the chain: the noise of its batches grows off the mode."""
        H, Q = noise_law(cls, form, self.C, self.N, self.S)
        return theory.linear_regression_stationary_covariance(
            self.x, self.y[:, 0], H, Q, S=self.S, noise_std=self.NOISE_STD, prior_precision=1.0
        )

    def draws(self, optimizer, callbacks, steps, burn_in):
        model = keras.Sequential([keras.Input((self.D,)), keras.layers.Dense(1, use_bias=False)])
        loss = sg.GaussianNegativeLogLikelihood(self.NOISE_STD)
        model.compile(optimizer=optimizer, loss=loss, steps_per_execution=1000)
        samples = sg.callbacks.PosteriorSamples(burn_in=burn_in, thinning=20)
        data = sg.minibatches(self.x, self.y, self.S, seed=1, steps=steps)
        history = model.fit(data, verbose=0, callbacks=[samples, *callbacks]).history
        (draws,) = samples.posterior.draws.values()
        return draws.reshape(-1, self.D), {name: value[-1] for name, value in history.items()}

    def check(self, draws, expected, bias):
        """Mean, and variances on the axes of `expected`: within 4 standard errors, and `bias`."""
        white = np.linalg.inv(np.linalg.cholesky(expected))
        u = (draws.astype("float64") - self.mean[:, 0]) @ white.T
        blocks = u[: len(u) // 25 * 25].reshape(25, -1, self.D)
        for values, wanted, allowed in (
            (blocks.mean(1), 0.0, 0.0),
            ((blocks**2).mean(1), 1.0, bias),
            ((blocks**2).mean((1, 2))[:, None], 1.0, bias),
        ):
            error = values.std(0, ddof=1) / 5
            assert np.all(np.abs(values.mean(0) - wanted) < 4 * error + allowed), values.mean(0)
        assert error < 0.025, error


def noise_law(cls, form, C, N, S):
    if cls is sg.SGFS:
        return theory.sgfs_step(C, N=N, S=S, prior_precision=1.0, learning_rate=None, fisher=form)
    return theory.optimal_preconditioner(C, N=N, S=S, form=form, prior_precision=1.0), None


def make_sampler(cls, form, problem):
    kwargs = {
        "train_size": problem.N,
        "batch_size": problem.S,
        "prior": 1.0,
        "seed": 3,
        "warmup_steps": 300,
    }
    if cls is sg.SGFS:
        return sg.SGFS(None, fisher=form, warmup_learning_rate=0.01, **kwargs)
    return sg.ConstantSGD(0.02, preconditioner=form, **kwargs)


@pytest.mark.parametrize("cls", [sg.SGFS, sg.ConstantSGD])
def test_full_forms_sample_bayesian_linear_regression(cls):
    """From `compile` and `fit`: the law that theory predicts, and by it nearly the posterior.

    The residuals' fourth moments leave C off A by some percent, and the callback's C is that of the
    iterates, whose residuals are larger by D / N or so: 2 % of a variance.
    """
    problem = Regression()
    optimizer = make_sampler(cls, "full", problem)
    callbacks = [sg.callbacks.GradientNoise(every=2)]
    draws, logs = problem.draws(optimizer, callbacks, steps=41_000, burn_in=1_000)
    expected = problem.predicted("full", cls)
    problem.check(draws, expected, bias=0.02)
    trace = np.trace(np.linalg.inv(problem.covariance) @ expected) / problem.D
    assert abs(trace - 1) < 0.1
    assert logs["warming_up"] == 0
    assert ("predicted_variance_bias" in logs) == (cls is sg.ConstantSGD)
    assert ("batch_noise_share" in logs) == (cls is sg.SGFS)
    assert logs["capped_share"] == 0


@pytest.mark.parametrize("cls", [sg.SGFS, sg.ConstantSGD])
def test_diagonal_forms_work_by_themselves(cls):
    """C from the spread of the batches' gradients, which also holds what the steps change them."""
    problem = Regression()
    draws, logs = problem.draws(
        make_sampler(cls, "diagonal", problem), [], steps=41_000, burn_in=1_000
    )
    problem.check(draws, problem.predicted("diagonal", cls), bias=0.05)
    assert logs["warming_up"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: sg.SGFS(1.0, train_size=50, batch_size=4, prior=1.0, seed=3, warmup_steps=3),
        lambda: sg.ConstantSGD(
            0.1, train_size=50, batch_size=4, momentum=0.5, preconditioner="sqrt", warmup_steps=3
        ),
    ],
)
def test_diagonal_forms_run_on_two_replicas(make, mirrored):
    C = np.linspace(0.5, 2.0, 6).astype("float32")
    with mirrored.scope():
        theta = keras.Variable(np.ones(6, "float32"))
        optimizer = make()
        optimizer.build([theta])

    @tf.function
    def step(gradient):
        mirrored.run(lambda: optimizer.apply([gradient / 2], [theta]))

    single = keras.Variable(np.ones(6, "float32"))
    twin = make()
    twin.build([single])
    rng = np.random.default_rng(0)
    for number in range(8):
        gradient = tf.constant(rng.standard_normal(6), tf.float32)
        if number == 5:
            with mirrored.scope():
                optimizer.update_noise_covariance([tf.constant(C)], 100)
            twin.update_noise_covariance([tf.constant(C)], 100)
        step(gradient)
        twin.apply([gradient], [single])
        copies = [np.asarray(v) for v in mirrored.experimental_local_results(theta.value)]
        np.testing.assert_array_equal(copies[0], copies[1])
        np.testing.assert_allclose(copies[0], single.numpy(), rtol=1e-4, atol=1e-5)
    assert not optimizer.is_warming_up


def test_matrices_are_refused_on_two_replicas(mirrored):
    with mirrored.scope():
        theta = keras.Variable(np.ones(6, "float32"))
        optimizer = sg.SGFS(fisher="full", train_size=50, batch_size=4)
        with pytest.raises(ValueError, match=r"(?s)2 replicas.*diagonal"):
            optimizer.build([theta])


def test_the_mean_loss_at_stationarity_is_the_posteriors():
    """D / (2 N) above its minimum, on a quadratic whose C is its Hessian."""
    N, S, D = 200, 20, 100
    x = noise.whitened_data(N, D)
    for cls, form, bias in (
        (sg.SGFS, {"fisher": "diagonal", "learning_rate": None}, 1.0),
        (sg.ConstantSGD, {"preconditioner": "diagonal"}, 1 / (1 - S / N)),
    ):
        optimizer = noise.given(cls, [np.ones(D)], train_size=N, batch_size=S, seed=3, **form)
        draws = noise.run(
            optimizer, np.zeros(D, "float32"), noise.minibatch_means(x, S), steps=1500, keep_every=5
        )[20:]
        excess = np.mean(np.sum(draws.astype("float64") ** 2, axis=1)) / 2
        assert excess / bias == pytest.approx(D / (2 * N), rel=0.15)
