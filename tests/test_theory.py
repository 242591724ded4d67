import itertools

import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
import scipy.optimize
import scipy.stats

from keras_sgmcmc import theory

# Simulations average over this many independent chains, so that the standard error of a variance,
# sqrt(2 / CHAINS), is below 1 %. At 4 standard errors one entry in 16,000 fails by chance.
CHAINS = 40_000
TOLERANCE = 4.0


def random_covariance(rng, D, condition=30.0):
    """A positive definite matrix with eigenvalues from 1 / condition to 1 in random directions."""
    U = scipy.linalg.qr(rng.normal(size=(D, D)))[0]
    return (U * np.geomspace(1.0 / condition, 1.0, D)) @ U.T


def lyapunov(F, M):
    """X = F X F' + M by one linear system in all entries of X."""
    D = len(F)
    system = np.eye(D * D) - np.kron(F, F)
    return np.linalg.solve(system, M.reshape(-1)).reshape(D, D)


def momentum_chain(A, H, M, momentum):
    """Transition and noise of (theta, v), 2D x 2D."""
    eye = np.eye(len(A))
    F = np.block([[eye - H @ A, momentum * eye], [-H @ A, momentum * eye]])
    return F, np.tile(M, (2, 2))


def relative_error(actual, expected):
    return np.max(np.abs(actual - expected)) / np.max(np.abs(expected))


def assert_same_covariance(draws, covariance):
    """Whitened second moments of independent draws [chains, D] are the identity's."""
    white = scipy.linalg.solve_triangular(
        scipy.linalg.cholesky(covariance, lower=True), draws.T, lower=True
    )
    products = white[:, None] * white[None]
    deviation = products.mean(-1) - np.eye(len(white))
    error = products.std(-1) / np.sqrt(products.shape[-1])
    assert error.max() < 0.01
    assert np.max(np.abs(deviation) / error) < TOLERANCE


def simulate(A, H, M, steps, rng, momentum=0.0):
    """The last iterates and the mean of the last `steps` of a linear chain, after as many more."""
    root = scipy.linalg.cholesky(M, lower=True)
    theta = np.zeros((CHAINS, len(A)))
    v, total = np.zeros_like(theta), np.zeros_like(theta)
    for t in range(2 * steps):
        v = momentum * v - theta @ (H @ A).T + rng.normal(size=theta.shape) @ root.T
        theta = theta + v
        if t >= steps:
            total += theta
    return theta, total / steps


@pytest.fixture
def problem():
    """A and C unrelated, H neither commuting with them nor small: H A between 0.03 and 1.4."""
    rng = np.random.default_rng(0)
    A, C, H = (random_covariance(rng, 3, condition) for condition in (8.0, 20.0, 3.0))
    H = 1.4 * H / np.max(np.linalg.eigvals(H @ A).real)
    assert np.linalg.norm(A @ C - C @ A) > 0.1 * np.linalg.norm(A @ C)
    assert np.linalg.norm(A @ H - H @ A) > 0.1 * np.linalg.norm(A @ H)
    return A, C, H


# -- optimal steps ----------------------------------------------------------------------------


def test_optimal_steps_by_hand():
    # tr C = 5: 2 * 10 * 2 / (1000 * 5); 2 * 10 / (1000 * (4, 1)); tr(C^(1/2)) = 3:
    # eps* = 2 * 2 * 10 / (1000 * 3), divided by (2, 1).
    C, scales = np.diag([4.0, 1.0]), {"N": 1000, "S": 10}
    assert theory.optimal_learning_rate(C, **scales) == pytest.approx(0.008, rel=1e-14)
    expected = {
        "scalar": 0.008,
        "diagonal": [0.005, 0.02],
        "full": [[0.005, 0.0], [0.0, 0.02]],
        "sqrt": [0.04 / 6, 0.04 / 3],
    }
    for form, H in expected.items():
        actual = theory.optimal_preconditioner(C, form=form, **scales)
        np.testing.assert_allclose(actual, H, rtol=1e-14, err_msg=form)
        actual = theory.optimal_preconditioner(C, form=form, T=0.5, momentum=0.9, **scales)
        np.testing.assert_allclose(actual, 0.05 * np.array(H), rtol=1e-14, err_msg=form)
    # The full form with a prior: 2 N T / (N^2 C / S + T Lambda).
    np.testing.assert_allclose(
        theory.optimal_preconditioner(C, prior_precision=[0.0, 1e5], **scales),
        np.diag([0.005, 2000.0 / (1e5 + 1e5)]),
        rtol=1e-14,
    )
    np.testing.assert_allclose(
        theory.optimal_preconditioner(C, prior_precision=1e5, T=0.5, **scales),
        np.diag([1000.0 / (4e5 + 5e4), 1000.0 / (1e5 + 5e4)]),
        rtol=1e-14,
    )
    # Eq. 36 with S: 2 / (N (C / S + E)).
    np.testing.assert_allclose(
        theory.optimal_preconditioner(C, gradient_noise=0.1, **scales),
        np.diag([2e-3 / 0.5, 2e-3 / 0.2]),
        rtol=1e-14,
    )


@pytest.mark.parametrize("form", ["scalar", "sqrt"])
def test_optimal_step_minimises_the_divergence(problem, form):
    A, C, _ = problem
    N, S, T = 1000, 10, 0.7
    H = theory.optimal_preconditioner(C, form=form, N=N, S=S, T=T)

    def divergence(log_scale):
        covariance = theory.stationary_covariance(A, C, np.exp(log_scale) * H, S=S, discrete=False)
        return theory.gaussian_kl(covariance, T * np.linalg.inv(A) / N)

    best = scipy.optimize.minimize_scalar(divergence, bracket=(-0.5, 0.3), tol=1e-10)
    assert abs(best.x) < 1e-6


def test_diagonal_preconditioner_is_optimal_where_noise_is_curvature(problem):
    A, _, _ = problem
    N, S = 1000, 10
    best = theory.optimal_preconditioner(A, form="diagonal", N=N, S=S)

    def divergence(log_scales):
        covariance = theory.stationary_covariance(
            A, A, np.exp(log_scales) * best, S=S, discrete=False
        )
        return theory.gaussian_kl(covariance, np.linalg.inv(A) / N)

    gradient = scipy.optimize.approx_fprime(np.zeros(3), divergence, 1e-6)
    assert np.max(np.abs(gradient)) < 1e-4


# -- stationary covariances -------------------------------------------------------------------


def test_stationary_covariance_by_hand():
    # 2 h p - p^2 h = ...: in one dimension p = H A = 0.5, noise 0.25 * 8 / 4 + 0.25 = 0.75.
    one = theory.stationary_covariance(2.0, 8.0, 0.25, 0.25, S=4)
    assert one.item() == pytest.approx(0.375 / 0.75, rel=1e-14)
    # The first-order process: divided by 2 p = 1 rather than p (2 - p) = 0.75.
    one = theory.stationary_covariance(2.0, 8.0, 0.25, 0.25, S=4, discrete=False)
    assert one.item() == pytest.approx(0.375, rel=1e-14)
    # Two dimensions, A diagonal: Sigma_ij = n_ij / (p_i + p_j - p_i p_j), p = (0.5, 1).
    C = np.array([[4.0, 2.0], [2.0, 8.0]])
    two = theory.stationary_covariance(np.diag([1.0, 2.0]), C, 0.5, S=2)
    np.testing.assert_allclose(two, [[0.5 / 0.75, 0.25], [0.25, 1.0]], rtol=1e-14)


@pytest.mark.parametrize("S", [1, 7])
@pytest.mark.parametrize("with_noise", [False, True])
def test_stationary_covariance_solves_the_lyapunov_equation(problem, S, with_noise):
    A, C, H = problem
    Q = random_covariance(np.random.default_rng(1), 3) if with_noise else None
    M = H @ C @ H / S + (Q if with_noise else 0.0)
    actual = theory.stationary_covariance(A, C, H, Q, S=S)
    assert relative_error(actual, lyapunov(np.eye(3) - H @ A, M)) < 1e-13
    actual = theory.stationary_covariance(A, C, H, Q, S=S, discrete=False)
    expected = scipy.linalg.solve_continuous_lyapunov(H @ A, M)
    assert relative_error(actual, expected) < 1e-12


def test_scalar_and_diagonal_preconditioners_are_matrices_written_short(problem):
    A, C, _ = problem
    h = np.array([0.1, 0.2, 0.3])
    for short, full in ((0.3, 0.3 * np.eye(3)), (h, np.diag(h))):
        np.testing.assert_allclose(
            theory.stationary_covariance(A, C, short, short, S=2),
            theory.stationary_covariance(A, C, full, full, S=2),
            rtol=1e-13,
        )


def test_batches_without_replacement():
    # Batches of 2 of the three gradients -1, 0, 1 have the means -1/2, 0, 1/2: variance 1/6.
    noise = {"S": 2, "N": 3, "replacement": False}
    p = 0.5
    covariance = theory.stationary_covariance(1.0, 2.0 / 3.0, p, **noise)
    assert covariance.item() == pytest.approx(p**2 / 6 / (1 - (1 - p) ** 2), rel=1e-14)
    full = theory.stationary_covariance(1.0, 1.0, p, 0.1, S=3, N=3, replacement=False)
    assert full.item() == pytest.approx(0.1 / (1 - (1 - p) ** 2), rel=1e-14)


def test_slow_directions_keep_their_accuracy():
    # I - H A would lose half the digits of a step of 1e-8.
    covariance = theory.stationary_covariance(np.diag([1e-8, 1.0]), np.eye(2), 1.0, S=1)
    np.testing.assert_allclose(np.diag(covariance), [1e8 / (2.0 - 1e-8), 1.0], rtol=1e-14)


def test_stationary_covariance_by_simulation(problem):
    A, C, H = problem
    rng = np.random.default_rng(2)
    theta, average = simulate(A, H, H @ C @ H / 5, steps=40, rng=rng)
    assert_same_covariance(theta, theory.stationary_covariance(A, C, H, S=5))
    assert_same_covariance(average, theory.iterate_average_covariance(A, C, H, S=5, window=40))
    with pytest.raises(AssertionError):
        assert_same_covariance(theta, theory.stationary_covariance(A, C, H, S=5, discrete=False))


def test_sgld_discrete_law():
    # T / (N h (1 - eta h / 2)) on full batches.
    N, h, T = 500, 3.0, 0.7
    for step in (0.1, 0.5, 1.0, 1.9):
        actual = theory.sgld_stationary_covariance(h, None, step / h, N=N, T=T)
        assert actual.item() == pytest.approx(T / (N * h * (1.0 - step / 2.0)), rel=1e-13)
        actual = theory.sgld_stationary_covariance(h, None, step / h, N=N, T=T, discrete=False)
        assert actual.item() == pytest.approx(T / (N * h), rel=1e-13)
    assert theory.sgld_stationary_covariance(h, None, 0.1, N=N, T=0.0).item() == 0.0


def test_sgld_adds_the_noise_of_batches(problem):
    # Eq. 34 corrected, and its third term: A Sigma + Sigma A - eta A Sigma A = 2T/N + (eta/S) C.
    A, C, _ = problem
    N, S, T, eta = 100, 10, 0.5, 0.8
    Sigma = theory.sgld_stationary_covariance(A, C, eta, N=N, S=S, T=T)
    np.testing.assert_allclose(
        A @ Sigma + Sigma @ A - eta * A @ Sigma @ A,
        2.0 * T / N * np.eye(3) + eta / S * C,
        atol=1e-15,
    )
    # pSGLD with a frozen G is SGLD in the coordinates theta / sqrt(G).
    G = np.array([0.2, 1.0, 3.0])
    root = np.diag(np.sqrt(G))
    scaled = theory.sgld_stationary_covariance(root @ A @ root, root @ C @ root, 0.3, N=N, S=S, T=T)
    actual = theory.sgld_stationary_covariance(A, C, 0.3 * G, N=N, S=S, T=T)
    np.testing.assert_allclose(actual, root @ scaled @ root, rtol=1e-12)


@pytest.mark.parametrize("T", [1.0, 0.5])
def test_constant_sgd_full_has_the_discretisation_bias(problem, T):
    # (T / N) (A - A H A / 2)^-1 for unrelated A and C, T A^-1 / N / (1 - S T / N) for C = A.
    A, C, _ = problem
    A = A / 4.0
    N, S = 1000, 30
    H = theory.optimal_preconditioner(C, N=N, S=S, T=T)
    posterior = T * np.linalg.inv(A) / N
    exact = T / N * np.linalg.inv(A - A @ H @ A / 2.0)
    assert relative_error(theory.stationary_covariance(A, C, H, S=S), exact) < 1e-12
    first_order = theory.stationary_covariance(A, C, H, S=S, discrete=False)
    assert relative_error(first_order, posterior) < 1e-12

    H = theory.optimal_preconditioner(A, N=N, S=S, T=T)
    exact = posterior / (1.0 - S * T / N)
    assert relative_error(theory.stationary_covariance(A, A, H, S=S), exact) < 1e-12
    bias = theory.discretization_bias(N=N, S=S, T=T)
    assert bias == pytest.approx(1.0 / (1.0 - S * T / N) - 1.0, rel=1e-12)


# -- SGFS -------------------------------------------------------------------------------------


def test_sgfs_step_by_hand():
    # gamma = 11, gamma N V = 4400, 4 B / eps = 400; the paper's factor 2 / 4800 is H / N.
    H, Q = theory.sgfs_step(4.0, N=100, S=10, learning_rate=0.01, noise=1.0)
    assert H.item() == pytest.approx(100.0 * 2.0 / 4800.0, rel=1e-14)
    assert Q.item() == pytest.approx((2.0 / 4800.0) ** 2 * 400.0, rel=1e-14)
    # a = 2 with a prior: H = 2 N / (5 (gamma N V + Lambda)), Q = T a^2 H J H / N^2.
    J = (1.0 + 100 / 5) * 100 * 4.0 + 300.0
    H, Q = theory.sgfs_step(4.0, N=100, S=10, T=0.5, learning_rate=1.0, prior_precision=300.0)
    assert H.item() == pytest.approx(200.0 / 5.0 / J, rel=1e-14)
    assert Q.item() == pytest.approx(0.5 * 4.0 * H.item() ** 2 * J / 100**2, rel=1e-14)


@pytest.mark.parametrize("fisher", ["full", "block", "diagonal"])
@pytest.mark.parametrize("learning_rate", [None, 4.0, 1.0, 1.0 / 9.0, 1e-3])
@pytest.mark.parametrize("prior_precision", [0.0, 5.0, [0.0, 1.0, 20.0, 300.0]])
@pytest.mark.parametrize(("S", "T"), [(1, 1.0), (7, 0.3), (90, 2.0)])
def test_sgfs_is_exact(fisher, learning_rate, prior_precision, S, T):
    N, D = 100, 4
    C = random_covariance(np.random.default_rng(3), D, 100.0)
    blocks = None
    if fisher == "block":
        blocks = [1, 3]
        C[0, 1:] = C[1:, 0] = 0.0
    elif fisher == "diagonal":
        C = np.diag(np.diag(C))
    A = C + np.asarray(prior_precision) * np.eye(D) / N
    H, Q = theory.sgfs_step(
        C,
        N=N,
        S=S,
        T=T,
        prior_precision=prior_precision,
        learning_rate=learning_rate,
        fisher=fisher,
        blocks=blocks,
    )
    full_H, full_Q = (np.diag(H), np.diag(Q)) if fisher == "diagonal" else (H, Q)
    expected = 2 * T * full_H / N - T * full_H @ A @ full_H / N
    assert relative_error(full_Q + full_H @ C @ full_H / S, expected) < 1e-12
    actual = theory.stationary_covariance(A, C, H, Q, S=S)
    assert relative_error(actual, T * np.linalg.inv(A) / N) < 1e-12
    oracle = lyapunov(np.eye(D) - full_H @ A, full_Q + full_H @ C @ full_H / S)
    assert relative_error(oracle, T * np.linalg.inv(A) / N) < 1e-11


@pytest.mark.parametrize(
    ("fisher", "max_step"), [("full", None), ("diagonal", None), ("diagonal", 0.7)]
)
@pytest.mark.parametrize("noise", [0.3, "fisher"])
def test_sgfs_with_any_noise_and_bound_is_exact(fisher, max_step, noise):
    N, S, T, prior_precision = 100, 10, 0.8, 3.0
    C = random_covariance(np.random.default_rng(4), 3)
    if fisher == "diagonal":
        C = np.diag(np.diag(C))
    A = C + prior_precision * np.eye(3) / N
    H, Q = theory.sgfs_step(
        C,
        N=N,
        S=S,
        T=T,
        prior_precision=prior_precision,
        learning_rate=2.0,
        fisher=fisher,
        noise=noise,
        max_step=max_step,
    )
    actual = theory.stationary_covariance(A, C, H, Q, S=S)
    assert relative_error(actual, T * np.linalg.inv(A) / N) < 1e-12


def test_sgfs_bounded_step_is_mandts():
    N, S, T, Lambda, h_max = 200, 20, 0.5, 10.0, 0.9
    c = np.array([0.01, 0.1, 1.0])
    H, Q = theory.sgfs_step(
        np.diag(c),
        N=N,
        S=S,
        T=T,
        prior_precision=Lambda,
        learning_rate=None,
        fisher="diagonal",
        max_step=h_max,
    )
    largest = 2.0 * N * T * S / ((N + S * T) * N * c + S * T * Lambda)
    np.testing.assert_allclose(H, np.minimum(h_max, largest), rtol=1e-14)
    assert np.sum(largest > h_max) == 2
    expected = 2 * T * H / N - c * H**2 / S - T * H**2 * (c + Lambda / N) / N
    np.testing.assert_allclose(Q, expected, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("fisher", ["full", "diagonal"])
@pytest.mark.parametrize(("learning_rate", "H_A"), [(1.0, 2.0 / 5.0), (None, 1.0)])
def test_sgfs_where_the_data_are_silent(fisher, learning_rate, H_A):
    # Variance T / Lambda; lag-1 correlation 1 - 2 / (1 + a^2), and 0 rather than -1 at a = 0.
    N, S, T, Lambda = 100, 10, 0.5, 4.0
    C = np.diag([1.0, 0.0])
    A = C + Lambda / N * np.eye(2)
    H, Q = theory.sgfs_step(
        C, N=N, S=S, T=T, prior_precision=Lambda, learning_rate=learning_rate, fisher=fisher
    )
    assert (H[1] if fisher == "diagonal" else H[1, 1]) * A[1, 1] == pytest.approx(H_A, rel=1e-13)
    covariance = theory.stationary_covariance(A, C, H, Q, S=S)
    np.testing.assert_allclose(covariance, T * np.linalg.inv(A) / N, atol=1e-13)


def test_largest_sgfs_step_of_weak_data():
    # gamma N I1 = (0, 0.3, 0.9, 1.1, 10) Lambda: N / Lambda below 1, 2 N / J above.
    N, S, Lambda = 100, 10, 4.0
    weight = np.array([0.0, 0.3, 0.9, 1.1, 10.0])
    C = np.diag(weight * Lambda / ((1.0 + N / S) * N))
    expected = N / Lambda * np.array([1.0, 1.0, 1.0, 2.0 / 2.1, 2.0 / 11.0])
    for fisher in ("full", "diagonal"):
        H, _ = theory.sgfs_step(
            C, N=N, S=S, prior_precision=Lambda, learning_rate=None, fisher=fisher
        )
        np.testing.assert_allclose(
            np.diag(H) if fisher == "full" else H, expected, rtol=1e-13, err_msg=fisher
        )


# -- momentum ---------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_momentum_solves_the_joint_lyapunov_equation(problem, momentum):
    A, C, H = problem
    S, Q = 5, 0.1 * np.eye(3)
    M = H @ C @ H / S + Q
    joint = lyapunov(*momentum_chain(A, H, M, momentum))
    actual = theory.momentum_stationary_covariance(A, C, H, Q, momentum=momentum, S=S)
    assert relative_error(actual, joint[:3, :3]) < 1e-12
    velocity = (H @ A @ actual + actual @ A @ H) / (1.0 + momentum)
    assert relative_error(velocity, joint[3:, 3:]) < 1e-12
    if momentum == 0.0:
        np.testing.assert_array_equal(actual, theory.stationary_covariance(A, C, H, Q, S=S))


def test_momentum_first_order_process(problem):
    A, C, H = problem
    mu, S = 0.3, 5
    eye, zero = np.eye(3), np.zeros((3, 3))
    drift = np.block([[zero, -eye], [H @ A, mu * eye]])
    noise = np.block([[zero, zero], [zero, H @ C @ H / S]])
    joint = scipy.linalg.solve_continuous_lyapunov(drift, noise)
    actual = theory.momentum_stationary_covariance(A, C, H, momentum=1 - mu, S=S, discrete=False)
    assert relative_error(actual, joint[:3, :3]) < 1e-12
    # Eq. 31 is SGD without momentum at H / mu, which differs where A and Sigma do not commute.
    eq_31 = theory.stationary_covariance(A, C, H / mu, S=S, discrete=False)
    assert relative_error(actual, eq_31) > 0.05


def test_momentum_by_hand():
    # p = 0.5, m = 0.5, noise 0.25 * 8 / 4: n / (mu p (2 - p / (1 + m))).
    actual = theory.momentum_stationary_covariance(2.0, 8.0, 0.25, momentum=0.5, S=4)
    assert actual.item() == pytest.approx(0.125 / (0.25 * (2.0 - 1.0 / 3.0)), rel=1e-14)


def test_optimal_step_with_momentum_has_the_same_limit(problem):
    A, C, _ = problem
    N, S = 10**7, 10
    H = theory.optimal_preconditioner(C, momentum=0.9, N=N, S=S)
    actual = theory.momentum_stationary_covariance(A, C, H, momentum=0.9, S=S)
    assert relative_error(actual, np.linalg.inv(A) / N) < 1e-4


def test_momentum_by_simulation(problem):
    A, C, H = problem
    momentum, S = 0.6, 5
    rng = np.random.default_rng(5)
    theta, average = simulate(A, H, H @ C @ H / S, steps=60, rng=rng, momentum=momentum)
    settings = {"momentum": momentum, "S": S}
    assert_same_covariance(theta, theory.momentum_stationary_covariance(A, C, H, **settings))
    assert_same_covariance(
        average, theory.iterate_average_covariance(A, C, H, window=60, **settings)
    )


# -- iterate averages -------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("window", [1, 2, 13])
def test_iterate_average_is_the_sum_of_all_lags(problem, momentum, window):
    A, C, H = problem
    F, M = momentum_chain(A, H, H @ C @ H / 5 + 0.1 * np.eye(3), momentum)
    X = lyapunov(F, M)
    total = sum(
        np.linalg.matrix_power(F, max(s - t, 0)) @ X @ np.linalg.matrix_power(F.T, max(t - s, 0))
        for s, t in itertools.product(range(window), repeat=2)
    )
    actual = theory.iterate_average_covariance(A, C, H, 0.1, window=window, momentum=momentum, S=5)
    assert relative_error(actual, total[:3, :3] / window**2) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_iterate_average_of_the_first_order_process(problem, momentum):
    A, C, H = problem
    L, S, mu = 7, 5, 1.0 - momentum
    eye, zero = np.eye(3), np.zeros((3, 3))
    if momentum:
        drift = np.block([[zero, eye], [-H @ A, -mu * eye]])
        noise = scipy.linalg.block_diag(zero, H @ C @ H / S)
    else:
        drift, noise = -H @ A, H @ C @ H / S
    X = scipy.linalg.solve_continuous_lyapunov(-drift, noise)

    def lag(s):
        gamma = (L - s) * (scipy.linalg.expm(drift * s) @ X)[:3, :3]
        return gamma + gamma.T

    expected = scipy.integrate.quad_vec(lag, 0, L, epsrel=1e-10)[0] / L**2
    actual = theory.iterate_average_covariance(
        A, C, H, window=L, momentum=momentum, S=S, discrete=False
    )
    assert relative_error(actual, expected) < 1e-9


def test_window_of_one_is_the_iterate(problem):
    A, C, H = problem
    np.testing.assert_allclose(
        theory.iterate_average_covariance(A, C, H, window=1, S=5),
        theory.stationary_covariance(A, C, H, S=5),
        rtol=1e-13,
    )


def test_short_windows_of_slow_chains_keep_their_accuracy():
    # The mean of two iterates with correlation 1 - p: (1 + 1 - p) / 2 of the variance.
    p = 1e-9
    iterate = theory.stationary_covariance(1.0, 1.0, p, S=1)
    average = theory.iterate_average_covariance(1.0, 1.0, p, window=2, S=1)
    np.testing.assert_allclose(1.0 - average / iterate, p / 2.0, rtol=1e-6)
    # The continuous window loses L p / 3 to first order.
    iterate = theory.stationary_covariance(1.0, 1.0, p, S=1, discrete=False)
    average = theory.iterate_average_covariance(1.0, 1.0, p, window=300, S=1, discrete=False)
    np.testing.assert_allclose(1.0 - average / iterate, 100.0 * p, rtol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("discrete", [True, False])
def test_long_windows_have_the_sandwich_covariance(problem, momentum, discrete):
    A, C, H = problem
    S, window = 10, 10**7
    N = S * window
    sandwich = np.linalg.inv(A) @ C @ np.linalg.inv(A) / N
    if momentum and not discrete:
        # The process moves by dtheta = v dt, and its noise enters once a unit of time as well.
        H = H / 3.0
    actual = theory.iterate_average_covariance(
        A, C, H, window=window, momentum=momentum, S=S, discrete=discrete
    )
    assert relative_error(actual, sandwich) < 1e-4
    assert theory.sandwich_ratio(A, C) == pytest.approx(
        np.trace(A @ sandwich) * N / len(A), rel=1e-12
    )


# -- linear regression ------------------------------------------------------------------------


@pytest.fixture
def regression():
    """A few heavy-tailed rows, at a step where the growth of the noise off the mode matters."""
    rng = np.random.default_rng(6)
    x = rng.standard_t(4, size=(5, 2)) @ np.array([[1.0, 0.4], [0.0, 0.6]])
    return x, x @ [1.0, -1.0] + rng.normal(size=5)


SIGMA, PRECISION = 0.8, 2.0


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("replacement", [True, False])
def test_linear_regression_over_all_batches(regression, momentum, replacement):
    # The expectation over a batch is a sum over all 25 or 20 ordered batches of two rows.
    x, y = regression
    N, D = x.shape
    posterior = theory.gaussian_posterior(x, y, prior_precision=PRECISION, noise_std=SIGMA)
    H = np.diag([0.05, 0.1])
    batches = list(itertools.permutations(range(N), 2))
    if replacement:
        batches += [(i, i) for i in range(N)]
    systems, constants = [], []
    for rows in map(list, batches):
        a = x[rows].T @ x[rows] / 2 / SIGMA**2 + PRECISION / N * np.eye(D)
        g = x[rows].T @ (x[rows] @ posterior.mean - y[rows]) / 2 / SIGMA**2
        g = g + PRECISION / N * posterior.mean
        F, M = momentum_chain(a, H, H @ np.outer(g, g) @ H, momentum)
        systems.append(np.kron(F, F))
        constants.append(M + np.tile(0.01 * np.eye(D), (2, 2)))
    expected = np.linalg.solve(
        np.eye(4 * D * D) - np.mean(systems, 0), np.mean(constants, 0).reshape(-1)
    ).reshape(2 * D, 2 * D)[:D, :D]
    settings = {"S": 2, "momentum": momentum, "replacement": replacement}
    actual = theory.linear_regression_stationary_covariance(
        x, y, H, 0.01, noise_std=SIGMA, prior_precision=PRECISION, **settings
    )
    assert relative_error(actual, expected) < 1e-11
    additive = theory.momentum_stationary_covariance(
        posterior.A, posterior.C, H, 0.01, N=N, **settings
    )
    assert relative_error(additive, expected) > 0.03


def test_linear_regression_by_simulation():
    rng = np.random.default_rng(7)
    N, D, S = 40, 3, 4
    x = rng.normal(size=(N, D)) @ random_covariance(rng, D, 3.0)
    y = x @ rng.normal(size=D) + 0.5 * rng.normal(size=N)
    posterior = theory.gaussian_posterior(x, y, noise_std=0.5)
    h = 0.3 / np.linalg.eigvalsh(posterior.A)[-1]
    theta = np.tile(posterior.mean, (CHAINS, 1))
    for _ in range(120):
        rows = rng.integers(N, size=(CHAINS, S))
        batch = x[rows]
        residuals = np.einsum("csd,cd->cs", batch, theta) - y[rows]
        gradient = np.einsum("csd,cs->cd", batch, residuals) / (S * 0.25) + theta / N
        theta = theta - h * gradient
    actual = theory.linear_regression_stationary_covariance(
        x, y, h, S=S, noise_std=0.5, prior_precision=1.0
    )
    assert_same_covariance(theta - posterior.mean, actual)
    additive = theory.stationary_covariance(posterior.A, posterior.C, h, S=S)
    with pytest.raises(AssertionError):
        assert_same_covariance(theta - posterior.mean, additive)


def test_linear_regression_without_finite_variance():
    x = np.array([[0.1], [0.1], [0.1], [3.0]])
    y = np.array([0.0, 1.0, 0.0, 1.0])
    # mean x^2 = 2.26, mean x^4 = 20.3: the variance of the chain grows where h > 2 * 2.26 / 20.3.
    theory.linear_regression_stationary_covariance(x, y, 0.2, S=1)
    with pytest.raises(ValueError, match=r"`H` should keep the variance finite.*larger batch"):
        theory.linear_regression_stationary_covariance(x, y, 0.25, S=1)
    theory.linear_regression_stationary_covariance(x, y, 0.25, S=4)


# -- posteriors and divergences ---------------------------------------------------------------


def test_gaussian_kl_by_hand():
    # 1/2 [4/2 + (3 - 1)^2 / 2 - 1 + log(2/4)]
    expected = 0.5 * (2.0 + 2.0 - 1.0 - np.log(2.0))
    assert theory.gaussian_kl(4.0, 2.0, [3.0], [1.0]) == pytest.approx(expected, rel=1e-14)
    P = random_covariance(np.random.default_rng(8), 4)
    assert theory.gaussian_kl(P, P) == pytest.approx(0.0, abs=1e-13)
    # Scaling all of D = 4 dimensions by s: D (s - 1 - log s) / 2.
    assert theory.gaussian_kl(3.0 * P, P) == pytest.approx(2.0 * (2.0 - np.log(3.0)), rel=1e-12)


def test_gaussian_kl_by_quadrature():
    z, weights = np.polynomial.hermite_e.hermegauss(5)
    points = np.stack(np.meshgrid(z, z), -1).reshape(-1, 2)
    weights = np.outer(weights, weights).reshape(-1) / (2.0 * np.pi)
    rng = np.random.default_rng(9)
    q, p = (
        scipy.stats.multivariate_normal(rng.normal(size=2), random_covariance(rng, 2))
        for _ in range(2)
    )
    x = q.mean + points @ np.linalg.cholesky(q.cov).T
    expected = weights @ (q.logpdf(x) - p.logpdf(x))
    actual = theory.gaussian_kl(q.cov, p.cov, q.mean, p.mean)
    assert actual == pytest.approx(expected, rel=1e-11)


def data(rng, rows=60):
    """Features of very different scales, and a constant."""
    return np.column_stack([rng.normal(size=(rows, 2)) * [1.0, 100.0], np.ones(rows)])


def test_linear_posterior_is_exact():
    rng = np.random.default_rng(10)
    x = data(rng)
    y = x @ [1.0, 0.02, -1.0] + 0.3 * rng.normal(size=len(x))
    precision = np.array([1.0, 10.0, 0.0])
    posterior = theory.gaussian_posterior(x, y, prior_precision=precision, noise_std=0.3, T=0.5)
    information = x.T @ x / 0.09 + np.diag(precision)
    assert relative_error(posterior.covariance, 0.5 * np.linalg.inv(information)) < 1e-12
    expected = np.linalg.solve(information, x.T @ y / 0.09)
    np.testing.assert_allclose(posterior.mean, expected, rtol=1e-10)
    assert relative_error(posterior.A, information / 60) < 1e-14
    gradients = x * ((x @ expected - y) / 0.09)[:, None]
    assert relative_error(posterior.C, np.cov(gradients.T, bias=True)) < 1e-9


@pytest.mark.parametrize("model", ["logistic", "softmax"])
def test_mode_of_a_classifier(model):
    rng = np.random.default_rng(11)
    x = data(rng)
    K = 1 if model == "logistic" else 3
    logits = x @ (rng.normal(size=(3, K)) / [[1.0], [100.0], [1.0]])
    noise = rng.logistic(size=logits.shape)
    y = (logits + noise > 0)[:, 0] if K == 1 else np.argmax(logits + noise, axis=1)
    precision = np.linspace(0.1, 2.0, 3 * K)

    def per_example_loss(theta):
        f = x @ theta.reshape(3, K)
        if K == 1:
            return np.log1p(np.exp(-np.where(y, 1.0, -1.0) * f[:, 0]))
        return np.log(np.exp(f).sum(1)) - f[np.arange(len(y)), y]

    def mean_loss(theta):
        return per_example_loss(theta).mean() + precision @ theta**2 / (2 * len(x))

    posterior = theory.gaussian_posterior(x, y, model=model, prior_precision=precision)
    # Steps along whitened directions, so that features of all scales are alike.
    mode, root = posterior.mean, np.linalg.cholesky(posterior.covariance)
    h = 1e-3
    steps = h * root.T
    gradient = [(mean_loss(mode + s) - mean_loss(mode - s)) / (2 * h) for s in steps]
    assert np.max(np.abs(gradient)) * len(x) < 1e-5

    def second(s, t):
        signs = itertools.product((1, -1), repeat=2)
        return sum(i * j * mean_loss(mode + i * s + j * t) for i, j in signs) / (4 * h**2)

    hessian = np.array([[second(s, t) for t in steps] for s in steps])
    np.testing.assert_allclose(hessian * len(x), np.eye(3 * K), atol=1e-5)
    np.testing.assert_allclose(root.T @ posterior.A @ root * 60, np.eye(3 * K), atol=1e-9)

    gradients = [(per_example_loss(mode + s) - per_example_loss(mode - s)) / (2 * h) for s in steps]
    expected = np.cov(gradients, bias=True).reshape(3 * K, 3 * K)
    assert relative_error(root.T @ posterior.C @ root, expected) < 1e-5


def test_two_class_softmax_is_logistic_regression():
    # The difference of two columns with precision lambda has the precision lambda / 2.
    rng = np.random.default_rng(12)
    x = data(rng)
    y = rng.integers(2, size=len(x))
    two = theory.gaussian_posterior(x, y, model="softmax", prior_precision=3.0)
    one = theory.gaussian_posterior(x, y, model="logistic", prior_precision=1.5)
    difference = np.kron(np.eye(3), [-1.0, 1.0])
    np.testing.assert_allclose(difference @ two.mean, one.mean, rtol=1e-8, atol=1e-12)
    assert relative_error(difference @ two.covariance @ difference.T, one.covariance) < 1e-9


def test_newton_converges_where_its_full_steps_do_not():
    x = np.repeat([[-2.9, -1.1], [0.1, 0.0], [-0.1, 0.0], [-0.4, -1.4]], [1, 10, 100, 100], axis=0)
    y = np.repeat([1.0, 1.0, 0.0, 1.0], [1, 10, 100, 100])
    posterior = theory.gaussian_posterior(x, y, model="logistic", prior_precision=1e-4)
    p = 1.0 / (1.0 + np.exp(-x @ posterior.mean))
    gradient = x.T @ (p - y) + 1e-4 * posterior.mean
    assert np.max(np.abs(gradient)) < 1e-10


def test_relaxation_time():
    A = np.diag([1.0, 0.1])
    assert theory.relaxation_time(A, 0.5) == pytest.approx(20.0, rel=1e-14)
    assert theory.relaxation_time(A, 0.05, momentum=0.9) == pytest.approx(20.0, rel=1e-12)
    # With momentum the slow eigenvalue of the chain is 1 - 1 / time.
    time = theory.relaxation_time(1.0, 1e-5, momentum=0.9)
    F, _ = momentum_chain(np.eye(1), 1e-5 * np.eye(1), np.eye(1), 0.9)
    assert 1.0 / (1.0 - np.max(np.linalg.eigvals(F))) == pytest.approx(time, rel=1e-3)


# -- errors -----------------------------------------------------------------------------------

EYE = np.eye(2)


@pytest.mark.parametrize(
    ("momentum", "limit"),
    [(0.0, r"below 2\b.*largest stable step is 0\.5\."), (0.5, r"below 3\b.*step is 0\.75\.")],
)
def test_unstable_steps_are_refused_with_the_largest_stable_one(momentum, limit):
    A = np.diag([4.0, 1.0])
    settings = {"momentum": momentum, "S": 1}
    for H in (2.0 * (1.0 + momentum) / 4.0, 1.0):
        with pytest.raises(ValueError, match=f"`H` should keep the chain stable.*{limit}"):
            theory.momentum_stationary_covariance(A, EYE, H, **settings)
    with pytest.raises(ValueError, match=r"Multiply H by less than"):
        theory.iterate_average_covariance(A, EYE, np.ones(2), window=3, **settings)
    theory.momentum_stationary_covariance(A, EYE, 0.999 * (1.0 + momentum) / 2.0, **settings)
    # The first-order process has no largest step.
    theory.momentum_stationary_covariance(A, EYE, 1.0, discrete=False, **settings)


def test_spectral_radius_in_the_message():
    with pytest.raises(ValueError, match=r"spectral radius 1\.5, largest eigenvalue of H A 2\.5"):
        theory.stationary_covariance(np.diag([1.0, 5.0]), EYE, 0.5, S=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.stationary_covariance(-EYE, EYE, 0.1, S=1), "`A` should be positive def"),
        (lambda: theory.stationary_covariance(EYE, -EYE, 0.1, S=1), "`C` should be positive semi"),
        (lambda: theory.stationary_covariance(EYE, EYE, [0.1, 0.0], S=1), "`H` should be positive"),
        (lambda: theory.stationary_covariance(EYE, EYE, np.ones(3), S=1), r"`H`.*shape \(2,\)"),
        (lambda: theory.stationary_covariance(EYE, np.eye(3), 0.1, S=1), r"`C`.*shape \(2, 2\)"),
        (lambda: theory.stationary_covariance([1.0, 1.0], EYE, 0.1, S=1), r"`A`.*np\.diag"),
        (lambda: theory.stationary_covariance([[1, 1], [0, 1]], EYE, 0.1, S=1), "symmetric"),
        (lambda: theory.stationary_covariance(EYE, EYE, 0.1), "`S`, the rows of a batch, is need"),
        (lambda: theory.stationary_covariance(EYE, EYE, 0.1, S=0), r"`S`.*Received: S=0"),
        (
            lambda: theory.stationary_covariance(EYE, EYE, 0.1, S=2, replacement=False),
            "`N`, the rows of data, is needed",
        ),
        (
            lambda: theory.stationary_covariance(EYE, EYE, 0.1, S=3, N=2, replacement=False),
            "`S` should be at most N.*S=3, N=2",
        ),
        (lambda: theory.momentum_stationary_covariance(EYE, EYE, 0.1, momentum=1.0, S=1), "< 1"),
        (lambda: theory.iterate_average_covariance(EYE, EYE, 0.1, window=0, S=1), "`window`"),
        (lambda: theory.optimal_learning_rate(0 * EYE, N=10, S=1), "`C` should have a positive tr"),
        (lambda: theory.optimal_learning_rate(EYE, N=10, S=1, T=0.0), r"`T`.*positive.*T=0\.0"),
        (
            lambda: theory.optimal_preconditioner(np.diag([1, 0]), form="diagonal", N=10, S=1),
            r"no noise at coordinates \[1\]",
        ),
        (lambda: theory.optimal_preconditioner(np.diag([1, 0]), N=10, S=1), "prior precision"),
        (lambda: theory.optimal_preconditioner(EYE, form="best", N=10, S=1), "form='best'"),
        (lambda: theory.sgfs_step(0 * EYE, N=10, S=1), "`C` should be positive where"),
        (lambda: theory.sgfs_step(0 * EYE, N=10, S=1, learning_rate=None), "positive prior"),
        (lambda: theory.sgfs_step(EYE, N=10, S=1, fisher="block"), "`blocks`.*needed there"),
        (lambda: theory.sgfs_step(EYE, N=10, S=1, fisher="block", blocks=[3]), "sum to D = 2"),
        (lambda: theory.sgfs_step(EYE, N=10, S=1, max_step=1.0), "`max_step`.*fisher='diagonal'"),
        (lambda: theory.sgfs_step(EYE, N=10, S=1, noise="identity"), "noise='identity'"),
        (lambda: theory.sgfs_step(EYE, N=10, S=1, fisher="low rank"), "fisher='low rank'"),
        (lambda: theory.gaussian_kl(EYE, 0 * EYE), "`target_covariance` should be positive def"),
        (lambda: theory.gaussian_kl(EYE, EYE, mean=[1.0]), r"`mean` should have shape \(2,\)"),
        (lambda: theory.discretization_bias(N=10, S=10), "`S` should be below N / T.*S=10, N=10"),
        (
            lambda: theory.gaussian_posterior(EYE, [0, 2], model="logistic"),
            "`y` should hold 0 and 1.*from 0 to 2",
        ),
        (lambda: theory.gaussian_posterior(EYE, [0, 0.5], model="softmax"), "classes 0, 1"),
        (lambda: theory.gaussian_posterior(EYE, [0, 1], model="probit"), "model='probit'"),
        (lambda: theory.gaussian_posterior(EYE, [0, 1, 2]), "`y`.*2 rows of x"),
        (lambda: theory.gaussian_posterior(np.ones(3), np.ones(3)), r"`x`.*\[N, D\]"),
    ],
)
def test_errors_name_the_argument_and_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("x", "y", "model"),
    [
        (np.outer(np.arange(5.0), [0.3, 0.7]), np.arange(5.0), "linear"),
        (np.array([[-2.0], [-1.0], [1.0], [2.0]]), [0, 0, 1, 1], "logistic"),
        (np.array([[-2.0], [1.0], [-1.0], [2.0]]), [0, 0, 1, 1], "softmax"),
    ],
    ids=["collinear", "separable", "softmax"],
)
def test_a_mode_that_does_not_exist_asks_for_a_prior(x, y, model):
    with pytest.raises(ValueError, match=r"`prior_precision` should make the mode unique"):
        theory.gaussian_posterior(x, y, model=model, prior_precision=0.0)
    theory.gaussian_posterior(x, y, model=model, prior_precision=1.0)
