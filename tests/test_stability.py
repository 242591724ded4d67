"""The largest eigenvalue of H A against the matrices themselves, and the warning."""

import warnings

import keras
import numpy as np
import pytest

import keras_sgmcmc as sg
from keras_sgmcmc import stability
from keras_sgmcmc.per_example import passes

ROWS, WIDTH, PRIOR = 400, 4, 5.0


def regression(optimizer):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, WIDTH)).astype("float32") * [3.0, 1.0, 0.5, 0.2]
    x[:, 1] += 0.9 * x[:, 0]
    y = (x[:, :1] + rng.standard_normal((ROWS, 1))).astype("float32")
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer=optimizer, loss=sg.GaussianNegativeLogLikelihood(1.0))
    return model, sg.minibatches(x, y, 50, seed=1)


def make(cls, **kwargs):
    return cls(train_size=ROWS, batch_size=50, prior=PRIOR, warmup_steps=20, seed=3, **kwargs)


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: make(sg.ConstantSGD, preconditioner="diagonal", momentum=0.5),
        lambda: make(sg.SGFS, learning_rate=1.0),
    ],
)
def test_it_is_that_of_the_matrices(optimizer):
    optimizer = optimizer()
    model, data = regression(optimizer)
    optimizer.build(model.trainable_variables)
    optimizer.update_noise_covariance([np.geomspace(1.0, 40.0, WIDTH)[:, None]], 1000)
    optimizer.iterations.assign(30)
    x = data.batches(0, ROWS // 50)[0].numpy().reshape(-1, WIDTH)
    A = x.T @ x / ROWS + PRIOR / ROWS * np.eye(WIDTH)
    H = optimizer.step_size(0).numpy()
    expected = np.linalg.eigvals(H * A).real.max()
    assert stability.step_curvature(model, optimizer, data) == pytest.approx(expected, rel=1e-3)
    assert optimizer.stability_limit == (3.0 if isinstance(optimizer, sg.ConstantSGD) else 2.0)


def test_nothing_is_said_where_an_operation_has_no_second_derivative(monkeypatch):
    optimizer = make(sg.SGFS)
    model, data = regression(optimizer)
    optimizer.build(model.trainable_variables)

    def without(model, data):
        raise LookupError("gradient registry has no entry")

    monkeypatch.setattr(passes, "mean_loss", without)
    assert stability.step_curvature(model, optimizer, data) is None


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize(("preconditioner", "warned"), [("diagonal", True), ("sqrt", False)])
def test_a_fit_reports_it_once_the_warm_up_is_over(preconditioner, warned):
    """Nearly equal features: the diagonal form takes D times too long a step."""
    rng = np.random.default_rng(0)
    width = 40 if warned else 2
    x = np.ones((ROWS, width)) + 0.05 * rng.standard_normal((ROWS, width))
    x = (x * rng.choice([-1.0, 1.0], (ROWS, 1))).astype("float32")
    y = rng.standard_normal((ROWS, 1)).astype("float32")
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = make(sg.ConstantSGD, learning_rate=0.01, preconditioner=preconditioner)
    model.compile(optimizer=optimizer, loss=sg.GaussianNegativeLogLikelihood(1.0))
    data = sg.minibatches(x, y, 50, seed=1, steps=40)
    # Of two monitors one looks.
    monitors = [sg.callbacks.ChainMonitor(), sg.callbacks.ChainMonitor()]
    callbacks = [sg.callbacks.GradientNoise(), *monitors]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history
        except sg.DivergenceError:
            assert warned
            history = None
    messages = [str(w.message) for w in caught if "largest eigenvalue of H A" in str(w.message)]
    assert len(messages) == int(warned)
    if warned:
        assert 'preconditioner="full"' in messages[0]
    if history is not None:
        assert len(set(history["step_curvature"])) == 1
        assert (history["step_curvature"][0] > 1.5) == warned
