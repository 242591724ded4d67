"""SGFS: H and Q, the exact posterior by simulation, and what becomes of silent directions."""

import keras
import noise
import numpy as np
import pytest
import tensorflow as tf
from harness import assert_close, run

import keras_sgmcmc as sg
from keras_sgmcmc import theory

D = 5
C = noise.covariance_matrix(D)


def table(C, N, S, T, Lambda, step, b=None):
    """H and Q of the design's table, for C and Lambda as matrices."""
    gamma = 1 + N / (S * T)
    J = gamma * N * C + Lambda
    if b is None:
        a2 = 0.0 if step is None else 4.0 / step
        H = 2 * N / (1 + a2) * np.linalg.inv(J)
        return H, T * a2 * H @ J @ H / N**2
    H = 2 * N * np.linalg.inv(J + 4 * b / step * np.eye(len(C)))
    return H, T * H @ H * (4 * b / step) / N**2


def masked(matrix, fisher):
    mask = {"full": np.ones((D, D)), "diagonal": np.eye(D)}.get(fisher)
    if mask is None:
        mask = np.zeros((D, D))
        mask[:2, :2] = mask[2:, 2:] = 1.0
    return mask * matrix


def entries(fisher):
    if fisher == "full":
        return [C]
    if fisher == "block":
        return [C[:2, :2], C[2:, 2:]]
    return [np.diag(C)[:2], np.diag(C)[2:]]


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize("fisher", ["diagonal", "block", "full"])
@pytest.mark.parametrize(
    ("step", "b", "S"), [(None, None, 10), (1.0, None, 10), (1 / 9, None, 100), (0.5, 7.0, 10)]
)
def test_step_and_noise_are_those_of_the_table(fisher, step, b, S):
    N = 200
    kwargs = {} if b is None else {"noise": b}
    optimizer = noise.given(
        sg.SGFS, entries(fisher), step, fisher=fisher, train_size=N, batch_size=S, prior=3.0,
        **kwargs,
    )  # fmt: skip
    steps = noise.Steps(optimizer, [2, 3])
    (precision,) = optimizer.prior_precision.values()
    for T, Lambda in ((1.0, 3.0), (0.5, 40.0)):
        optimizer.temperature = T
        precision.assign(Lambda)
        H, Q = steps.matrices()
        expected = table(masked(C, fisher), N, S, T, Lambda * np.eye(D), step, b)
        noise.assert_matrices(H, expected[0], "H")
        noise.assert_matrices(Q, expected[1], "Q", rtol=1e-5 if step else 1e30)
        if step is None:
            assert np.max(np.abs(Q)) < 1e-9
    if step is not None:
        optimizer.learning_rate = 2 * step
        expected = table(masked(C, fisher), N, S, T, Lambda * np.eye(D), 2 * step, b)
        for actual, wanted, name in zip(steps.matrices(), expected, "HQ", strict=True):
            noise.assert_matrices(actual, wanted, f"{name} of another step")


@pytest.mark.parametrize("fisher", ["diagonal", "full"])
def test_a_flat_prior_and_mandts_bounded_step(fisher):
    N, S = 200, 10
    entry = [np.diag(C)] if fisher == "diagonal" else [C]
    optimizer = noise.given(sg.SGFS, entry, 1.0, fisher=fisher, train_size=N, batch_size=S)
    expected = table(masked(C, fisher), N, S, 1.0, np.zeros((D, D)), 1.0)
    for actual, wanted, name in zip(
        noise.Steps(optimizer, [D]).matrices(), expected, "HQ", strict=True
    ):
        noise.assert_matrices(actual, wanted, name)
    if fisher == "full":
        return
    T, Lambda, c = 0.5, 10.0, np.diag(C)
    whole = 2 * N * T * S / ((N + S * T) * N * c + S * T * Lambda)
    bound = np.median(whole)
    optimizer = noise.given(
        sg.SGFS, [c], None, max_step=bound, train_size=N, batch_size=S, temperature=T, prior=Lambda
    )
    H, Q = noise.Steps(optimizer, [D]).matrices()
    h = np.minimum(bound, whole)
    noise.assert_matrices(H, np.diag(h), "H")
    q = 2 * T * h / N - c * h**2 / S - T * h**2 * (c + Lambda / N) / N
    noise.assert_matrices(Q, np.diag(q), "Q")
    logs = optimizer.noise_logs()
    assert logs["capped_share"] == pytest.approx(2 / D)
    assert logs["batch_noise_share"] == pytest.approx(N / (N + S * T))


@pytest.mark.parametrize("step", [None, 1.0, 1 / 9])
@pytest.mark.parametrize("S", [10, 100])
@pytest.mark.parametrize("Lambda", [0.0, 3.0, 200.0])
@pytest.mark.parametrize("T", [1.0, 0.5])
def test_the_balance_of_noise_is_exact(step, S, Lambda, T):
    """Q + H C H / S = 2 T H / N - T H A H / N where A = C + Lambda / N."""
    N = 200
    A = C + Lambda / N * np.eye(D)
    H, Q = table(C, N, S, T, Lambda * np.eye(D), step)
    right = 2 * T * H / N - T * H @ A @ H / N
    noise.assert_matrices(Q + H @ C @ H / S, right, "balance", rtol=1e-12)
    stationary = theory.stationary_covariance(A, C, H, Q, S=S)
    np.testing.assert_allclose(stationary, T * np.linalg.inv(A) / N, rtol=1e-9)


@pytest.mark.parametrize("fisher", ["diagonal", "full"])
def test_without_a_step_moves_are_bounded_where_the_prior_outweighs_the_data(fisher):
    """gamma N I1 = (0, 0.3, 0.9, 1.1, 10) Lambda; rotated, for the full form."""
    N, S, Lambda = 100, 10, 4.0
    weights = np.array([0.0, 0.3, 0.9, 1.1, 10.0])
    expected = N / Lambda * np.where(weights < 1, 1.0, 2.0 / (1.0 + weights))
    c = weights * Lambda / (11 * N)
    basis = np.eye(D)
    if fisher == "full":
        basis = np.linalg.qr(np.random.default_rng(2).standard_normal((D, D)))[0]
    matrix = (basis * c) @ basis.T
    entry = [c] if fisher == "diagonal" else [matrix]
    optimizer = noise.given(
        sg.SGFS, entry, None, fisher=fisher, train_size=N, batch_size=S, prior=Lambda
    )
    H, Q = noise.Steps(optimizer, [D]).matrices()
    noise.assert_matrices(H, (basis * expected) @ basis.T, "H")
    J = 11 * N * matrix + Lambda * np.eye(D)
    noise.assert_matrices(Q, 2 * H / N - H @ J @ H / N**2, "Q", rtol=1e-4)
    reference = theory.sgfs_step(
        matrix, N=N, S=S, prior_precision=Lambda, learning_rate=None, fisher=fisher
    )
    expand = np.diag if fisher == "diagonal" else np.asarray
    noise.assert_matrices(H, expand(reference.H), "H of theory")
    noise.assert_matrices(Q, expand(reference.Q), "Q of theory", rtol=1e-4)
    assert optimizer.noise_logs()["capped_share"] == pytest.approx(3 / D)


def test_one_dimension_by_hand():
    """N = 100, n = 10, V = 4, b = 1, step 0.01: gamma = 11, 2 / 4800 for the summed gradient."""
    optimizer = noise.given(
        sg.SGFS, [np.array([4.0])], 0.01, noise=1.0, train_size=100, batch_size=10
    )
    H, Q = noise.Steps(optimizer, [1]).matrices()
    assert H[0, 0] == pytest.approx(100 * 2 / 4800, rel=1e-5)
    assert Q[0, 0] == pytest.approx(400 * (2 / 4800) ** 2, rel=1e-5)


def test_ill_scaled_blocks_lose_no_precision():
    scales = np.array([1e-6, 1e-3, 1.0, 1e3, 1e6])
    matrix = C * scales[:, None] * scales[None, :]
    optimizer = noise.given(sg.SGFS, [matrix], 1.0, fisher="full", train_size=200, batch_size=10)
    H, Q = noise.Steps(optimizer, [D]).matrices()
    expected = table(C, 200, 10, 1.0, 0.0, 1.0)
    outer = scales[:, None] * scales[None, :]
    noise.assert_matrices(H * outer, expected[0], "H")
    noise.assert_matrices(Q * outer, expected[1], "Q")


@pytest.mark.parametrize("step", [1.0, None])
def test_damped_directions_keep_their_balance(step):
    """Directions with Lambda / J below 1e-5: slower, with the noise that belongs to the slower H.

    Q = 2 T H / N - T H J H / N^2 for the J without damping, whatever H is.
    """
    N, S, Lambda = 1000, 10, 0.01
    matrix = np.ones((D, D)) + 1e-3 * np.diag([1.0, 1.0, 0.0, 0.0, 0.0])
    optimizer = noise.given(
        sg.SGFS, [matrix], step, fisher="full", train_size=N, batch_size=S, prior=Lambda
    )
    H, Q = noise.Steps(optimizer, [D]).matrices()
    assert np.max(optimizer._damping[0].numpy()) > 0
    J = (1 + N / S) * N * matrix + Lambda * np.eye(D)
    # float32 knows H J H only relative to the largest terms in it.
    noise.assert_matrices(Q, 2 * H / N - H @ J @ H / N**2, "Q", rtol=2e-2)
    with pytest.warns(UserWarning, match=r"rank 5 of 5.*damping is 1e-5"):
        assert optimizer.noise_logs()["silent_coordinates"] == 0


@pytest.mark.parametrize("cls", [sg.SGFS, sg.ConstantSGD])
def test_a_singular_covariance_gives_finite_steps_and_a_warning(cls):
    """50 weights, a covariance from 10 examples, no prior."""
    x = np.random.default_rng(0).standard_normal((10, 50))
    matrix = np.cov(x.T)
    form = {"fisher": "full"} if cls is sg.SGFS else {"preconditioner": "full"}
    optimizer = noise.given(cls, [matrix], train_size=1000, batch_size=10, seed=1, **form)
    data = np.random.default_rng(1).standard_normal((1000, 50))
    draws = run(
        optimizer,
        np.zeros(50, "float32"),
        noise.minibatch_means(data, 10),
        steps=200,
        keep_every=100,
    )
    assert np.all(np.isfinite(draws))
    assert np.ptp(draws) > 0
    with pytest.warns(UserWarning, match="rank 9 of 50"):
        assert optimizer.noise_logs()["silent_coordinates"] == 41


@pytest.mark.parametrize("fisher", ["diagonal", "full"])
def test_coordinates_without_variance_and_prior_stand_still(fisher):
    variances = np.array([1.0, 0.0, 2.0])
    entry = [variances] if fisher == "diagonal" else [np.diag(variances)]
    optimizer = noise.given(sg.SGFS, entry, 1.0, fisher=fisher, train_size=100, batch_size=10)
    moved = noise.Steps(optimizer, [3]).move([1.0, 1.0, 1.0], np.ones((2, 3)))
    assert moved[1] == 0
    assert np.all(moved[[0, 2]] != 0)
    assert optimizer.noise_logs()["silent_coordinates"] == 1


def test_too_many_weights_are_refused_before_any_matrix_is_made():
    model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(100), keras.layers.Dense(9)])
    for form, cls in (({"fisher": "full"}, sg.SGFS), ({"preconditioner": "full"}, sg.ConstantSGD)):
        optimizer = cls(train_size=10, batch_size=2, **form)
        with pytest.raises(ValueError, match=r'101009 parameters needs 114 GiB.*"diagonal"') as e:
            optimizer.build(model.trainable_variables)
        assert ('"block"' in str(e.value)) == (cls is sg.SGFS)
        assert not any(len(variable.shape) == 2 for variable in optimizer.variables)


def test_each_variable_keeps_its_own_statistics():
    """Permuted variables give permuted moves; one block for all is the full form."""
    moves = []
    for order in ([0, 1], [1, 0]):
        sizes = [[2, 3][i] for i in order]
        rows = np.concatenate([[[0, 1], [2, 3, 4]][i] for i in order])
        optimizer = noise.given(
            sg.SGFS, [C[np.ix_(rows, rows)]], 1.0, fisher="full", train_size=50, batch_size=5
        )
        moved = noise.Steps(optimizer, sizes).move(np.arange(1.0, 6.0)[rows])
        back = np.empty(D)
        back[rows] = moved
        moves.append(back)
    np.testing.assert_allclose(moves[0], moves[1], rtol=1e-5)
    ends = []
    for fisher in ("full", "block"):
        layer = keras.layers.Dense(2)
        layer.build((None, 1))
        layer.set_weights([np.zeros((1, 2)), np.zeros(2)])
        optimizer = noise.given(
            sg.SGFS, [C[:4, :4]], 1.0, fisher=fisher, train_size=50, batch_size=5, seed=3
        )
        for _ in range(3):
            optimizer.apply([tf.ones((1, 2)), tf.ones((2,))], layer.trainable_variables)
        ends.append(np.concatenate([w.ravel() for w in layer.get_weights()]))
    assert np.all(ends[0] != 0)
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-6)


# Simulation


@pytest.mark.parametrize(
    ("fisher", "a", "N", "S", "with_prior", "T"),
    [
        ("diagonal", 0, 200, 10, True, 0.5),
        ("diagonal", 0, 200, 100, False, 1.0),
        ("diagonal", 2, 200, 10, False, 1.0),
        ("diagonal", 2, 200, 100, True, 0.5),
        ("diagonal", 6, 100, 10, False, 1.0),
        ("full", 0, 200, 10, False, 1.0),
        ("full", 2, 200, 10, True, 0.5),
        ("full", 2, 200, 100, False, 1.0),
    ],
)
def test_the_posterior_is_exact_for_whitened_data(fisher, a, N, S, with_prior, T):
    """Variance T / (N (1 + lambda / N)) for every step, batch, prior and temperature."""
    dimension = N // 2
    curvature = 2.0 if with_prior else 1.0
    optimizer = noise.given(
        sg.SGFS,
        [np.eye(dimension) if fisher == "full" else np.ones(dimension)],
        4 / a**2 if a else None,
        fisher=fisher,
        train_size=N,
        batch_size=S,
        prior=float(N) if with_prior else None,
        temperature=T,
        seed=3,
    )
    gamma = 1 + N / (S * T)
    contraction = 2 * curvature / ((1 + a**2) * (gamma + curvature - 1))
    keep_every = max(1, int(0.25 / contraction))
    start = np.random.default_rng(1).standard_normal(dimension) * np.sqrt(T / (N * curvature))
    draws = run(
        optimizer,
        start.astype("float32"),
        noise.minibatch_means(noise.whitened_data(N, dimension), S),
        steps=keep_every
        * max(400, int((7000 if a == 6 else 10_000) / (contraction * dimension) / keep_every)),
        keep_every=keep_every,
        jit=fisher == "diagonal",
    )
    ratios = draws.astype("float64") ** 2 * N * curvature / T
    # Coordinates share the batches, so the error comes from stretches of the chain.
    stretches = ratios[: len(ratios) // 15 * 15].reshape(15, -1).mean(axis=1)
    error = stretches.std(ddof=1) / np.sqrt(15)
    assert_close(stretches.mean(), 1.0, error, "variance", largest_error=0.02)


def test_a_coordinate_without_data_has_the_prior():
    optimizer = noise.given(
        sg.SGFS, [np.zeros(20_000)], 1.0, train_size=100, batch_size=10, prior=1.0, seed=3
    )
    start = np.random.default_rng(0).standard_normal(20_000).astype("float32")
    draws = run(optimizer, start, lambda theta, _: tf.zeros_like(theta), steps=20, keep_every=1)
    draws = draws.astype("float64")
    squares = (draws**2).mean(axis=0)
    assert_close(squares.mean(), 1.0, squares.std() / np.sqrt(20_000), "variance", 0.02)
    products = (draws[1:] * draws[:-1]).mean(axis=0)
    assert_close(products.mean(), 0.6, products.std() / np.sqrt(20_000), "lag-1 correlation", 0.02)


A5 = noise.covariance_matrix(D, seed=4)
ROOT = np.linalg.cholesky(A5)
# C^-1 A has eigenvalues between 1/3 and 1, in directions of its own.
C5 = 1.5 * ROOT @ (noise.covariance_matrix(D, seed=5, spread=3.0) + 0.5 * np.eye(D)) @ ROOT.T


@pytest.mark.parametrize(
    ("fisher", "step", "b"),
    [
        ("diagonal", 2.0, None),
        ("diagonal", 2.0, 30.0),
        ("full", None, None),
        ("full", 2.0, 30.0),
    ],
)
def test_the_chain_has_the_covariance_that_theory_predicts(fisher, step, b):
    """S / N = 0.3, A and C unrelated."""
    N, S = 100, 30
    law = theory.sgfs_step(
        C5, N=N, S=S, learning_rate=step, fisher=fisher, noise="fisher" if b is None else b
    )
    exact = theory.stationary_covariance(A5, C5, *law, S=S)
    chains = 2000 if fisher == "diagonal" else 40
    kwargs = {} if b is None else {"noise": b}
    optimizer = noise.given(
        sg.SGFS,
        [noise.copies(C5, fisher, chains)],
        step,
        fisher=fisher,
        train_size=N,
        batch_size=S,
        seed=3,
        **kwargs,
    )
    draws = noise.sample(
        optimizer,
        exact,
        noise.linear_noise(A5, C5, S),
        steps=80 if chains == 2000 else 2000,
        keep_every=5,
        chains=chains,
        skip=8,
        jit=fisher == "diagonal",
    )
    noise.assert_covariance(draws, exact, f"SGFS {fisher}")
