"""Constant SGD: the optimal steps, and the stationary law that they give."""

import warnings

import keras
import noise
import numpy as np
import pytest
import tensorflow as tf

import keras_sgmcmc as sg
from keras_sgmcmc import theory

D = 5
C = noise.covariance_matrix(D)


def table(C, form, N, S, T=1.0, Lambda=0.0, mu=1.0):
    """H of the design's table."""
    variances = np.diag(C)
    if form == "scalar":
        H = 2 * T * S * len(C) / (N * np.trace(C)) * np.eye(len(C))
    elif form == "diagonal":
        H = np.diag(2 * T * S / (N * variances))
    elif form == "sqrt":
        G = np.sqrt(variances)
        H = np.diag(2 * len(C) * S * T / (N * np.sum(variances / G)) / G)
    else:
        H = 2 * N * T * np.linalg.inv(N**2 * C / S + T * Lambda * np.eye(len(C)))
    return mu * H


def entries(form, C=C):
    return [C] if form == "full" else [np.diag(C)[:2], np.diag(C)[2:]]


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize("form", ["scalar", "diagonal", "sqrt", "full"])
@pytest.mark.parametrize(("S", "momentum"), [(10, 0.0), (100, 0.9)])
def test_the_step_is_that_of_the_table_and_nothing_is_injected(form, S, momentum):
    N, mu = 1000, 1 - momentum
    optimizer = noise.given(
        sg.ConstantSGD, entries(form), preconditioner=form, momentum=momentum, train_size=N,
        batch_size=S, prior=3.0,
    )  # fmt: skip
    steps = noise.Steps(optimizer, [2, 3])
    (precision,) = optimizer.prior_precision.values()
    for T, Lambda in ((1.0, 3.0), (0.5, 40.0)):
        optimizer.temperature = T
        precision.assign(Lambda)
        H, Q = steps.matrices()
        noise.assert_matrices(H, table(C, form, N, S, T, Lambda, mu), "H")
        assert not np.any(Q)
    scalar = mu * 2 * T * S * D / (N * np.trace(C))
    if form == "sqrt":
        scalar = mu * 2 * T * S * D / (N * np.sum(np.sqrt(np.diag(C))))
    assert optimizer.optimal_learning_rate == pytest.approx(scalar, rel=1e-5)
    logs = optimizer.noise_logs()
    assert logs["optimal_learning_rate"] == optimizer.optimal_learning_rate
    assert logs["predicted_variance_bias"] == pytest.approx(T * S / N)
    assert logs["capped_share"] == logs["silent_coordinates"] == 0


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize(("rows", "T", "excess"), [(60, 1.0, "6%"), (200, 0.5, "11%"), (50, 1, "")])
def test_batches_that_bias_the_variance_are_warned_of(rows, T, excess):
    optimizer = sg.ConstantSGD(train_size=1000, batch_size=rows, temperature=T)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.build([keras.Variable(np.zeros(2, "float32"))])
    messages = [str(w.message) for w in caught]
    assert any(f"{excess} too large" in m and "SGFS" in m for m in messages) == bool(excess)


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize("of_batches", [False, True])
def test_steps_by_hand(of_batches):
    """N = 1000, S = 10, C = diag(4, 1): 0.008, (0.005, 0.02); C / S means the same."""
    expected = {
        "scalar": [0.008, 0.008],
        "diagonal": [0.005, 0.02],
        "sqrt": [0.02 / 3, 0.04 / 3],
        "full": [0.005, 0.02],
    }
    for form, H in expected.items():
        optimizer = sg.ConstantSGD(
            preconditioner=form, train_size=1000, batch_size=10, warmup_steps=0
        )
        steps = noise.Steps(optimizer, [2])
        entry = np.array([4.0, 1.0]) / (10 if of_batches else 1)
        entry = np.diag(entry) if form == "full" else entry
        optimizer.update_noise_covariance([tf.constant(entry, tf.float32)], 100, of_batches)
        np.testing.assert_allclose(-steps.move([1.0, 1.0]), H, rtol=1e-5)


@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_steps_are_bounded_where_the_prior_outweighs_the_noise(form):
    N, S, Lambda = 100, 10, 4.0
    weights = np.array([0.0, 0.008, 0.9, 1.1, 10.0])
    c = weights * Lambda * S / N**2
    basis = np.eye(D)
    if form == "full":
        basis = np.linalg.qr(np.random.default_rng(2).standard_normal((D, D)))[0]
        h = N / Lambda * np.where(weights < 0.01, 1.0, 2.0 / (1.0 + weights))
    else:
        with np.errstate(divide="ignore"):
            h = np.minimum(2 * S / (N * c), N / Lambda)
    matrix = (basis * c) @ basis.T
    optimizer = noise.given(
        sg.ConstantSGD,
        [matrix if form == "full" else c],
        preconditioner=form,
        train_size=N,
        batch_size=S,
        prior=Lambda,
    )
    H, _ = noise.Steps(optimizer, [D]).matrices()
    noise.assert_matrices(H, (basis * h) @ basis.T, "H")
    if form == "full":
        reference = theory.optimal_preconditioner(matrix, N=N, S=S, prior_precision=Lambda)
        noise.assert_matrices(H, reference, "H of theory")
    assert optimizer.noise_logs()["capped_share"] == pytest.approx((2 if form == "full" else 4) / D)


def test_small_variances_are_capped_and_missing_ones_counted():
    variances = np.array([1.0, 1e-9, 0.0, 3.0])
    optimizer = noise.given(
        sg.ConstantSGD, [variances], preconditioner="diagonal", train_size=100, batch_size=10
    )
    moved = -noise.Steps(optimizer, [4]).move(np.ones(4))
    np.testing.assert_allclose(moved, [0.2, 0.2e6, 0.0, 0.2 / 3], rtol=1e-5)
    logs = optimizer.noise_logs()
    assert (logs["capped_share"], logs["silent_coordinates"]) == (0.25, 1)
    optimizer = noise.given(
        sg.ConstantSGD, [variances], preconditioner="diagonal", train_size=100, batch_size=10,
        max_step=0.1,
    )  # fmt: skip
    moved = -noise.Steps(optimizer, [4]).move(np.ones(4))
    np.testing.assert_allclose(moved, [0.1, 0.1, 0.0, 0.2 / 3], rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"preconditioner": "best"}, r"`preconditioner` should be one of .*Received: .*'best'"),
        ({"momentum": 1.0}, "`momentum` should be .*Received: momentum=1.0"),
        ({"temperature": 0}, r"`temperature` should be positive.*SGLD.*Received: temperature=0"),
        ({"batch_size": 0}, "`batch_size` should be an integer >= 1"),
        ({"warmup_steps": -1}, "`warmup_steps` should be an integer >= 0"),
        ({"preconditioner": "full", "max_step": 1.0}, "`max_step` bounds the entries"),
    ],
)
def test_bad_arguments_are_named(arguments, match):
    with pytest.raises(ValueError, match=match):
        sg.ConstantSGD(**({"train_size": 10, "batch_size": 2} | arguments))


@pytest.mark.parametrize("cls", [sg.SGFS, sg.ConstantSGD])
def test_what_is_needed_at_build_is_said(cls):
    variable = keras.Variable(np.zeros(3))
    with pytest.raises(ValueError, match=r"needs `batch_size`.*batch_size=data.batch_size"):
        cls(train_size=10).build([variable])
    with pytest.raises(ValueError, match=r"needs `train_size`.*len\(x_train\)"):
        cls(batch_size=10).build([variable])
    optimizer = cls(train_size=10, batch_size=2)
    with pytest.raises(ValueError, match="`temperature` should be positive"):
        optimizer.temperature = 0.0
    optimizer.build([variable])
    with pytest.raises(ValueError, match=r"shapes \[\(3,\)\].*Received: \[\(2,\)\]"):
        optimizer.update_noise_covariance([tf.zeros(2)], 10)


# Simulation

N, S = 100, 30
A5 = noise.covariance_matrix(D, seed=4)
ROOT = np.linalg.cholesky(A5)
C5 = 1.5 * ROOT @ (noise.covariance_matrix(D, seed=5, spread=3.0) + 0.5 * np.eye(D)) @ ROOT.T


@pytest.mark.parametrize(
    ("form", "mu"),
    [
        ("scalar", 1.0),
        ("scalar", 0.5),
        ("diagonal", 1.0),
        ("diagonal", 0.1),
        ("sqrt", 1.0),
        ("sqrt", 0.1),
        ("full", 0.5),
    ],
)
def test_the_chain_has_the_covariance_that_theory_predicts(form, mu):
    """S / N = 0.3, A and C unrelated; the Ornstein-Uhlenbeck process is told apart."""
    H = theory.optimal_preconditioner(C5, N=N, S=S, form=form, momentum=1 - mu)
    scales = {"momentum": 1 - mu, "S": S}
    exact = theory.momentum_stationary_covariance(A5, C5, H, **scales)
    continuous = theory.momentum_stationary_covariance(A5, C5, H, discrete=False, **scales)
    if mu == 1:
        assert np.trace(np.linalg.solve(exact, continuous)) / D < 0.9
    chains = 40 if form == "full" else 2000
    optimizer = noise.given(
        sg.ConstantSGD,
        [noise.copies(C5, form, chains)],
        preconditioner=form,
        momentum=1 - mu,
        train_size=N,
        batch_size=S,
    )
    # From its stationary law but for the velocity, which takes some 1 / mu steps.
    draws = noise.sample(
        optimizer,
        exact,
        noise.linear_noise(A5, C5, S),
        steps=int(3000 / mu**0.5) if form == "full" else 160,
        keep_every=5,
        chains=chains,
        skip=16,
        jit=form != "full",
    )
    noise.assert_covariance(draws, exact, f"{form}, mu = {mu}")
