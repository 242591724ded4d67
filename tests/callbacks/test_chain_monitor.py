import functools
import pickle
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sgmcmc as sg
from keras_sgmcmc.callbacks.chain_health import ChainHealth

ROWS = 10
X = np.ones((ROWS, 1), "float32")


def quadratic(eta_h, *, sampler=None, mode=0.0, start=0.0, columns=3, **compile_arguments):
    """Independent weights on quadratics of curvature 1, so that eta h is the learning rate."""
    dense = keras.layers.Dense(
        columns, use_bias=False, kernel_initializer=keras.initializers.Constant(start), name="w"
    )
    model = keras.Sequential([keras.Input((1,)), dense], name="quadratic")
    sampler = sampler or sg.SGLD(eta_h, train_size=ROWS, seed=3, jit_compile=False)
    loss = sg.GaussianNegativeLogLikelihood()
    model.compile(optimizer=sampler, loss=loss, **compile_arguments)
    return model, np.full((ROWS, columns), mode, "float32")


def fit(model, y, *callbacks, steps=100, epochs=1, **arguments):
    """Full-batch steps, `steps` an epoch."""
    x, y = np.tile(X, (steps, 1)), np.tile(y, (steps, 1))
    arguments = {"batch_size": ROWS, "epochs": epochs, "verbose": 0, **arguments}
    return model.fit(x, y, callbacks=list(callbacks), **arguments)


class Poison(keras.callbacks.Callback):
    """A weight becomes NaN at one step."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step:
            kernel = self.model.trainable_variables[0]
            value = kernel.numpy()
            value[0, 0] = np.nan
            kernel.assign(value)


# A repeated epoch feeds 100 times the rows.
pytestmark = [
    pytest.mark.filterwarnings("ignore:An epoch feeds"),
    pytest.mark.usefixtures("without_xla"),
]


@pytest.mark.parametrize(
    ("make", "start", "mode", "block"),
    [
        (sg.callbacks.ChainMonitor, 0.0, 1.0, 1),
        (sg.callbacks.ChainMonitor, 100.0, 100.0, 1),
        (sg.callbacks.ChainMonitor, 0.5, 1.0, 4),
        (lambda: sg.callbacks.PosteriorSamples(0, 20), 0.0, 1.0, 4),
        (lambda: sg.callbacks.PosteriorSamples(0, 3), 0.5, 1.0, 1),
    ],
)
def test_unstable_step_is_found_within_50_steps(make, start, mode, block):
    model, y = quadratic(2.5, start=start, mode=mode, steps_per_execution=block)
    with pytest.raises(sg.DivergenceError, match="grows without bound") as raised:
        fit(model, y, make())
    error = raised.value
    assert 30 <= error.step <= 50
    assert error.variable == "quadratic/w/kernel"
    assert f"at step {error.step} variable quadratic/w/kernel" in str(error)
    assert np.all(np.isfinite(model.get_weights()[0]))


@pytest.mark.parametrize(("eta_h", "start"), [(1.9, 0.0), (1.9, 100.0), (1.99, 100.0)])
def test_stable_step_is_not_flagged(eta_h, start):
    model, y = quadratic(eta_h, start=start, mode=1.0)
    fit(model, y, sg.callbacks.ChainMonitor(), steps=200)


@pytest.mark.parametrize("every", [1, 10, 25])
def test_a_chain_that_travels_far_is_not_flagged(every):
    # From 0.01 to a mode at a million: on a straight line first, then slower.
    model, y = quadratic(1e-3, start=0.01, mode=1e6)
    fit(model, y, sg.callbacks.ChainMonitor(every), steps=200)
    assert np.all(model.get_weights()[0] > 1e5)


@pytest.mark.parametrize("every", [1, 25])
def test_divergence_is_found_whatever_the_interval(every):
    model, y = quadratic(2.5, start=0.5)
    with pytest.raises(sg.DivergenceError) as raised:
        fit(model, y, sg.callbacks.ChainMonitor(every))
    assert raised.value.step <= 50


def test_slower_divergence_is_found_later():
    model, y = quadratic(2.2, start=0.5)
    with pytest.raises(sg.DivergenceError) as raised:
        fit(model, y, sg.callbacks.ChainMonitor())
    assert 40 <= raised.value.step <= 80


def test_the_variable_that_diverges_is_named():
    inputs = keras.Input((1,))
    layers = [keras.layers.Dense(1, use_bias=False, name=name) for name in ("calm", "wild")]
    model = keras.Model(inputs, [layer(inputs) for layer in layers])
    model.compile(
        optimizer=sg.SGLD(0.1, train_size=ROWS, seed=1, jit_compile=False),
        loss=[sg.GaussianNegativeLogLikelihood(), sg.GaussianNegativeLogLikelihood(0.2)],
    )
    y = np.zeros((ROWS * 60, 1))
    with pytest.raises(sg.DivergenceError, match="variable wild/kernel"):
        model.fit(
            np.ones_like(y),
            [y, y],
            batch_size=ROWS,
            callbacks=[sg.callbacks.ChainMonitor()],
            verbose=0,
        )


@pytest.mark.parametrize(
    "make", [sg.callbacks.ChainMonitor, lambda: sg.callbacks.PosteriorSamples(0)]
)
def test_nan_is_seen_at_the_next_batch(make):
    model, y = quadratic(0.1)
    with pytest.raises(
        sg.DivergenceError, match="variable quadratic/w/kernel is not finite"
    ) as raised:
        fit(model, y, Poison(13), make())
    assert raised.value.step in (13, 14)


def test_nan_at_the_last_step_of_an_epoch_is_seen_in_that_epoch():
    model, y = quadratic(0.1)
    with pytest.raises(sg.DivergenceError) as raised:
        fit(model, y, Poison(17), sg.callbacks.ChainMonitor(), steps=17, epochs=2)
    assert raised.value.step == 17


def test_nan_at_the_last_step_of_an_epoch_of_unknown_length_is_seen_too():
    model, y = quadratic(0.1)

    def batches():
        for _ in range(17):
            yield X, y

    with pytest.raises(sg.DivergenceError) as raised:
        model.fit(batches(), callbacks=[Poison(17), sg.callbacks.ChainMonitor()], verbose=0)
    assert raised.value.step == 17


def test_weights_that_are_not_finite_at_the_start_are_seen_before_the_first_update():
    model, y = quadratic(0.1, start=float("inf"))
    with pytest.raises(sg.DivergenceError, match="at step 0 variable quadratic/w/kernel"):
        fit(model, y, sg.callbacks.ChainMonitor())
    assert int(model.optimizer.iterations) == 0


def test_backup_and_restore_keeps_the_last_good_checkpoint(tmp_path):
    model, y = quadratic(0.1)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    after_first = {}

    class Remember(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            after_first.setdefault("weights", self.model.get_weights()[0])

    with pytest.raises(sg.DivergenceError):
        fit(
            model, y, backup, Poison(10), Remember(), sg.callbacks.ChainMonitor(), steps=5, epochs=9
        )
    # Resumed, it goes on from the end of epoch 1, and not from the NaN at the end of epoch 2.
    resumed, _ = quadratic(0.1)
    monitor = sg.callbacks.ChainMonitor()

    class Resumed(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            after_first.setdefault("step", int(self.model.optimizer.iterations))
            after_first.setdefault("restored", self.model.get_weights()[0])

    fit(resumed, y, backup, monitor, Resumed(), steps=5, epochs=3)
    assert after_first["step"] == 5
    np.testing.assert_array_equal(after_first["restored"], after_first["weights"])


def test_the_preconditioner_is_finite_when_the_run_stops():
    # Frozen at almost 0 after a step, so that eta h = 2.5; the live one would hold the chain back.
    sampler = sg.pSGLD(
        2.5,
        train_size=ROWS,
        rho=0.999999,
        epsilon=1.0,
        adaptation_steps=1,
        seed=1,
        jit_compile=False,
    )
    model, y = quadratic(None, sampler=sampler, start=0.5)
    with pytest.raises(sg.DivergenceError):
        fit(model, y, sg.callbacks.ChainMonitor())
    for variable in sampler.variables:
        assert np.all(np.isfinite(variable.numpy().astype("float64"))), variable.path


def test_the_error_can_be_sent_between_processes():
    error = pickle.loads(pickle.dumps(sg.DivergenceError("diverged", 17, "dense/kernel")))
    assert (str(error), error.step, error.variable) == ("diverged", 17, "dense/kernel")


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_a_model_without_trainable_variables_is_refused():
    model, y = quadratic(0.1)
    model.trainable = False
    model.compile(optimizer=model.optimizer, loss=sg.GaussianNegativeLogLikelihood())
    with pytest.raises(ValueError, match="no trainable variables"):
        fit(model, y, sg.callbacks.ChainMonitor())


def test_a_fit_after_a_divergence_starts_afresh():
    model, y = quadratic(2.5, start=0.5)
    monitor = sg.callbacks.ChainMonitor()
    with pytest.raises(sg.DivergenceError):
        fit(model, y, monitor)
    model.optimizer.learning_rate = 0.1
    model.set_weights([np.zeros((1, 3))])
    fit(model, y, monitor)


def test_other_optimizers_are_watched_too_and_their_loss_is_not_checked():
    # Of three columns the mean square has curvature 2/3.
    model, y = quadratic(None, sampler=keras.optimizers.SGD(3.75), start=0.5)
    model.compile(optimizer=keras.optimizers.SGD(3.75), loss="mse")
    with pytest.raises(sg.DivergenceError):
        fit(model, y, sg.callbacks.ChainMonitor())


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "10", None])
def test_bad_arguments(every):
    with pytest.raises(ValueError, match=r"`every` should be an integer >= 1\. Received: every="):
        sg.callbacks.ChainMonitor(every=every)


def test_serialization():
    config = keras.saving.serialize_keras_object(sg.callbacks.ChainMonitor(every=7, health=True))
    again = keras.saving.deserialize_keras_object(config)
    assert isinstance(again, sg.callbacks.ChainMonitor)
    assert (again.every, again.health) == (7, True)


# Health: ratios of means along the chain against closed forms of independent quadratics.

NUMBER, BATCH = 1000, 10


def sampled_columns(optimizer, *, steps, columns, spread=0.0):
    """A chain on columns of mean 0 and variance `spread`^2, each of curvature 1.

    Returns the monitor and the covariance of per-example gradients.
    """
    y = np.random.default_rng(0).normal(size=(NUMBER, columns))
    y = spread * (y - y.mean(0)) / y.std(0)
    model, _ = quadratic(None, sampler=optimizer, columns=columns, steps_per_execution=100)
    monitor = sg.callbacks.ChainMonitor(health=True)
    data = sg.minibatches(
        np.ones((NUMBER, 1), "float32"), y.astype("float32"), BATCH, seed=5, steps=steps
    )
    model.fit(data, callbacks=[monitor], verbose=0)
    return monitor, np.cov(y.T, ddof=0)


def assert_estimate(estimate, expected, tolerance=0.02):
    """To `tolerance` and to five standard errors: one in a million by chance."""
    assert estimate.value == pytest.approx(expected, rel=tolerance)
    assert abs(estimate.value - expected) < 5 * estimate.error
    assert estimate.error < tolerance * expected


@pytest.mark.filterwarnings("ignore:The (stationarity|configurational)")
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_health_of_sgld_and_of_one_with_the_wrong_noise(factor):
    """Var = factor Q / (eta h (2 - eta h)), so that both numbers tell half and double noise."""

    class Wrong(sg.SGLD):
        def _normal(self, *arguments):
            return factor**0.5 * super()._normal(*arguments)

    eta, temperature, precision = 0.1, 0.7, 500.0
    optimizer = Wrong(
        eta, train_size=NUMBER, temperature=temperature, prior=precision, seed=1, jit_compile=False
    )
    monitor, _ = sampled_columns(optimizer, steps=20_000, columns=100)
    found, step = monitor._health.estimates, eta * (1 + precision / NUMBER)
    assert_estimate(found["configurational_temperature"], factor / (1 - step / 2))
    assert_estimate(found["stationarity"], 2 * factor / (2 - step + factor * step))


def test_batch_noise_heats_the_chain_and_leaves_it_stationary():
    eta = 0.05
    optimizer = sg.SGLD(eta, train_size=NUMBER, seed=1, jit_compile=False)
    with pytest.warns(UserWarning, match="configurational temperature of the chain is") as caught:
        monitor, C = sampled_columns(optimizer, steps=20_000, columns=50, spread=1.0)
    found = monitor._health.estimates
    covariance = sg.theory.sgld_stationary_covariance(np.eye(50), C, eta, N=NUMBER, S=BATCH)
    expected = NUMBER * np.trace(covariance) / 50
    assert expected > 3
    assert_estimate(found["configurational_temperature"], expected)
    assert_estimate(found["stationarity"], 1.0)
    messages = [str(w.message) for w in caught if "of the chain is" in str(w.message)]
    assert len(messages) == 1
    assert "take larger batches or a smaller learning rate" in messages[0]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # Where C is the Hessian SGFS is exact; constant SGD is too wide by 1 / (1 - S / N).
        (lambda **k: sg.SGFS(None, **k), 1.0),
        (lambda **k: sg.SGFS(None, fisher="full", **k), 1.0),
        (lambda **k: sg.ConstantSGD(preconditioner="diagonal", **k), 1 / (1 - 0.04)),
        (lambda **k: sg.ConstantSGD(momentum=0.5, **k), None),
    ],
    ids=["diagonal", "matrix", "constant", "momentum"],
)
def test_health_of_methods_that_use_the_noise_of_the_batches(make, expected):
    columns, batch = 40, 40
    optimizer = make(train_size=NUMBER, batch_size=batch, warmup_steps=0, seed=1, jit_compile=False)
    matrix = optimizer.noise_structure != "diagonal"

    class Told(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                C = np.eye(columns, dtype="float32")
                entry = C if matrix else np.ones((1, columns), "float32")
                optimizer.update_noise_covariance([entry], 1e6)

    y = np.random.default_rng(0).normal(size=(NUMBER, columns))
    # Uncorrelated columns, so that C = 1 = A, exactly.
    y = np.linalg.qr(y - y.mean(0))[0] * np.sqrt(NUMBER)
    model, _ = quadratic(None, sampler=optimizer, columns=columns, steps_per_execution=100)
    optimizer.build(model.trainable_variables)
    monitor = sg.callbacks.ChainMonitor(health=True)
    data = sg.minibatches(
        np.ones((NUMBER, 1), "float32"), y.astype("float32"), batch, seed=5, steps=40_000
    )
    model.fit(data, callbacks=[Told(), monitor], verbose=0)
    found = monitor._health.estimates
    if expected is None:
        H = optimizer.optimal_learning_rate
        covariance = sg.theory.momentum_stationary_covariance(
            np.eye(columns), np.eye(columns), H, momentum=0.5, S=batch, N=NUMBER
        )
        expected = NUMBER * np.trace(covariance) / columns
    assert_estimate(found["configurational_temperature"], expected)
    if matrix or optimizer.momentum > 0:
        assert "stationarity" not in found
    else:
        assert_estimate(found["stationarity"], 1.0)


def test_of_many_weights_some_steps_are_measured():
    model, y = quadratic(0.5, columns=100_001)
    monitor = sg.callbacks.ChainMonitor(health=True)
    history = fit(model, y, monitor, steps=50, epochs=4).history
    assert monitor._health._interval > 1
    assert history["configurational_temperature"][-1] == pytest.approx(1 / 0.75, rel=0.02)
    assert history["stationarity"][-1] == pytest.approx(1.0, rel=0.02)


def test_a_chain_that_travels_is_told_so_once_when_it_ends(capsys):
    model, y = quadratic(1e-3, mode=100.0)
    monitor = sg.callbacks.ChainMonitor(health=True)
    with pytest.warns(UserWarning, match=r"stationarity of the chain is -.*burn-in") as caught:
        history = fit(model, y, monitor, steps=600, epochs=2, verbose=2).history
    assert len([w for w in caught if "of the chain is" in str(w.message)]) == 1
    assert history["stationarity"][-1] < -10
    assert "stationarity: " in capsys.readouterr().out
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The .* of the chain is")
        fit(model, y, monitor, steps=100)


def health(compile_arguments, steps, **arguments):
    sampler = sg.SGLD(0.1, train_size=ROWS, seed=3, jit_compile=False, **arguments)
    model, y = quadratic(None, sampler=sampler, **compile_arguments)
    return fit(model, y, sg.callbacks.ChainMonitor(health=True), steps=steps).history


@functools.cache
def health_of_unfused_steps():
    return health({}, 80)


@pytest.mark.parametrize(
    ("compile_arguments", "sampler_arguments"),
    [
        ({"jit_compile": True}, {}),
        ({"run_eagerly": True}, {}),
        ({}, {"gradient_accumulation_steps": 2}),
        ({"steps_per_execution": 10}, {}),
    ],
    ids=["jit", "eager", "accumulation", "several steps"],
)
def test_health_is_the_same_in_all_modes(compile_arguments, sampler_arguments):
    expected = health_of_unfused_steps()
    accumulated = sampler_arguments.get("gradient_accumulation_steps", 1)
    found = health(compile_arguments, 80 * accumulated, **sampler_arguments)
    for name in ("configurational_temperature", "stationarity"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_health_under_mixed_precision(policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model, y = quadratic(0.1, columns=50)
        monitor = sg.callbacks.ChainMonitor(health=True)
        history = fit(model, y, monitor, steps=300).history
    finally:
        keras.config.set_dtype_policy(before)
    assert 0.7 < history["configurational_temperature"][-1] < 1.4


@pytest.mark.parametrize(
    ("cls", "compile_arguments"),
    [
        (sg.SGFS, {}),
        (sg.pSGLD, {"jit_compile": True}),
        (sg.pSGLD, {"steps_per_execution": 10}),
        (sg.SGFS, {"steps_per_execution": 10}),
    ],
)
def test_health_changes_no_bit_of_the_draws_and_is_traced_once(cls, compile_arguments, monkeypatch):
    traced = []
    observe = ChainHealth.before_move
    monkeypatch.setattr(
        ChainHealth, "before_move", lambda *given: (traced.append(1), observe(*given))[1]
    )

    def weights(monitor):
        arguments = {"batch_size": ROWS, "warmup_steps": 15} if cls is sg.SGFS else {}
        sampler = cls(0.01, train_size=ROWS, prior=1.0, seed=3, **arguments)
        model, y = quadratic(None, sampler=sampler, mode=1.0, **compile_arguments)
        data = sg.minibatches(X, y, ROWS, seed=1, steps=30)
        for _ in range(2):
            model.fit(data, callbacks=[monitor], verbose=0)
        return model.get_weights()[0]

    plain = weights(sg.callbacks.ChainMonitor())
    assert not traced
    np.testing.assert_array_equal(weights(sg.callbacks.ChainMonitor(health=True)), plain)
    assert len(traced) <= 2  # a fused step is traced twice, for the shapes of its logs first


def test_health_needs_a_sampler_on_one_replica():
    model, y = quadratic(None, sampler=keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=r"`health=True` needs a sampler.*Received: .*SGD"):
        fit(model, y, sg.callbacks.ChainMonitor(health=True))
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model, y = quadratic(0.1)
    with pytest.raises(ValueError, match="`health=True` is not available under a distribution"):
        fit(model, y, sg.callbacks.ChainMonitor(health=True))
    with pytest.raises(ValueError, match=r"`health` should be True or False\. Received: health=1"):
        sg.callbacks.ChainMonitor(health=1)
