"""What the samplers do on a Gaussian target, in closed form: NumPy and SciPy alone.

Near a mode every sampler of this library is the same linear chain (theta measured from the mode)

    theta <- theta - H (A theta + e) + xi,      e ~ N(0, C / S),   xi ~ N(0, Q)

and, with momentum = 1 - mu in Keras' sense,

    v <- momentum v - H (A theta + e) + xi,     theta <- theta + v

| symbol | meaning | shape |
|---|---|---|
| A | Hessian of the mean loss, the prior's Lambda / N included | [D, D], positive definite |
| C | covariance of one example's likelihood gradient at the mode (divisor N) | [D, D] |
| H | preconditioner with the step in it, in mean-loss units | number, [D] (diagonal) or [D, D] |
| Q | covariance of the injected noise | None (0), number, [D] or [D, D] |
| N, S, T | rows of data, rows of a batch, temperature | numbers |

The target has the covariance T A^-1 / N. For D = 1 a number will do for A and C. What H and Q are
for each method:

| method | H, Q |
|---|---|
| SGLD, pSGLD with frozen G | eta or eta G; `sgld_stationary_covariance` adds Q = 2 T H / N |
| SGFS, all forms | `sgfs_step` |
| constant SGD, all forms | `optimal_preconditioner`, Q = None |

    step = theory.sgfs_step(C, N=N, S=S, prior_precision=1.0)
    covariance = theory.stationary_covariance(A, C, *step, S=S)
    theory.gaussian_kl(covariance, np.linalg.inv(A) / N)

Batches are drawn independently of each other, with replacement unless said otherwise. A reshuffled
epoch is another chain, which these formulas do not describe.

References: S. Mandt, M. D. Hoffman, D. M. Blei, "Stochastic gradient descent as approximate
Bayesian inference", JMLR 18, 2017 ("Mandt" below). S. Ahn, A. Korattikara, M. Welling, "Bayesian
posterior sampling via stochastic gradient Fisher scoring", ICML 2012 ("Ahn"). C. F. Van Loan,
"Computing integrals involving the matrix exponential", IEEE TAC 23, 1978.
"""

from typing import NamedTuple

import numpy as np
import scipy.linalg
import scipy.special

from keras_sgmcmc.validation import positive_integer, real_number

# Share of the prior in the bracket of constant SGD's full form from which a direction is silent.
_SILENT = 0.99


class Step(NamedTuple):
    """What distinguishes one method from another: theta <- theta - H g + N(0, Q).

    H: [D] for diagonal forms, else [D, D].
    Q: Of the same shape.
    """

    H: np.ndarray
    Q: np.ndarray


class GaussianPosterior(NamedTuple):
    """N(mean, covariance), with the two matrices that decide how a sampler does on it.

    mean: [P], the weights in the order of a flattened Keras kernel.
    covariance: T A^-1 / N, [P, P].
    A: Hessian of the mean loss at the mean, prior included, [P, P].
    C: Covariance of the per-example gradients of the likelihood there, [P, P].
    """

    mean: np.ndarray
    covariance: np.ndarray
    A: np.ndarray
    C: np.ndarray


def optimal_learning_rate(C, *, N, S, T=1.0, preconditioner=1.0, momentum=0.0, gradient_noise=None):
    """The step of constant SGD whose stationary law is closest to the posterior.

        eps* = 2 T D / (N tr(P (C / S + E)))

    minimises KL(q || posterior) over the step eps of H = eps P, to first order in the step, for any
    P. For P = I and E = 0 it is Mandt's eq. 18, 2 T S D / (N tr C); for P = diag(C)^(-1/2) his
    eq. 64.

    Args:
        C: Per-example gradient covariance, [D, D].
        N: Rows of data.
        S: Rows of a batch.
        T: Temperature, positive. Defaults to `1.0`.
        preconditioner: P, a number, [D] or [D, D]. Defaults to `1.0`.
        momentum: 1 - mu in Keras' sense. The optimal step is mu times that without momentum.
            Defaults to `0.0`.
        gradient_noise: E, covariance of noise added to the gradient, a number, [D] or [D, D].
            Defaults to None: no such noise.

    Returns:
        The step, a float in mean-loss units (what Keras calls the learning rate).

    Raises:
        ValueError: If an argument is outside its range, or tr(P (C / S + E)) is not positive.
    """
    N, S, T = _scales(N, S, T)
    mu = 1.0 - _momentum(momentum)
    noise = _gradient_noise(C, S, gradient_noise)
    P = _expand("preconditioner", preconditioner, len(noise))
    total = np.sum(P * noise)
    if not total > 0:
        raise ValueError(
            "`C` should have a positive trace under `preconditioner`: constant SGD samples only "
            f"where there is gradient noise. Received: tr(P (C / S + E))={total:g}. "
            "Estimate C from the gradients of single examples, at the mode."
        )
    return float(mu * 2.0 * T * len(noise) / (N * total))


def optimal_preconditioner(
    C, *, N, S, T=1.0, form="full", prior_precision=0.0, momentum=0.0, gradient_noise=None
):
    """H of constant SGD in its four forms, and Mandt's optimal preconditioner of SGFS.

    | form | H | source |
    |---|---|---|
    | `"full"` | 2 N T (N^2 (C / S + E) + T Lambda)^-1 | Mandt theorem 2, eq. 20 |
    | `"diagonal"` | 2 T / (N (C_kk / S + E_kk)) | corollary 1 of theorem 2 |
    | `"sqrt"` | eps* G^-1, G = diag(C)^(1/2), eps* of eq. 64 | Mandt appendix E |
    | `"scalar"` | eps* of eq. 18 | Mandt theorem 1 |

    Without noise of one's own E = 0. With theta <- theta - H (g + e), e ~ N(0, E), that is
    Q = H E H, the full form is Mandt's eq. 36 (which has S = 1) and its corollary the diagonal one.
    The full form is exact to first order in the step for any A: without Lambda, which is not in the
    paper, Sigma = (T / N) (A - A H A / 2)^-1. Lambda is of higher order where there are data. Where
    it is more than 99 % of the bracket, H is cut at mu N / Lambda: without data H A would be 2, the
    limit of stability. The diagonal form is optimal only where C is proportional to A.

    Args:
        C: Per-example gradient covariance, [D, D].
        N: Rows of data.
        S: Rows of a batch.
        T: Temperature, positive. Defaults to `1.0`.
        form: `"full"`, `"diagonal"`, `"sqrt"` or `"scalar"`. Defaults to `"full"`.
        prior_precision: Lambda, in posterior units, a number, [D] or [D, D]; used by the full form
            alone. Defaults to `0.0`.
        momentum: 1 - mu in Keras' sense; H is multiplied by mu. Defaults to `0.0`.
        gradient_noise: E, a number, [D] or [D, D]. Defaults to None: no such noise.

    Returns:
        H: [D, D] for `"full"`, [D] for `"diagonal"` and `"sqrt"`, a float for `"scalar"`.

    Raises:
        ValueError: If an argument is outside its range, or a direction has no noise to sample with.
    """
    forms = ("full", "diagonal", "sqrt", "scalar")
    if form not in forms:
        raise ValueError(f"`form` should be one of {forms}. Received: form={form!r}")
    scales = {"N": N, "S": S, "T": T, "momentum": momentum, "gradient_noise": gradient_noise}
    if form == "scalar":
        return optimal_learning_rate(C, **scales)

    N, S, T = _scales(N, S, T)
    mu = 1.0 - _momentum(momentum)
    noise = _gradient_noise(C, S, gradient_noise)
    if form == "full":
        Lambda = _expand("prior_precision", prior_precision, len(noise))
        return mu * _uncut(N**2 / T * noise + Lambda, Lambda, N, T, _SILENT).H

    diagonal = np.diagonal(noise)
    if not np.all(diagonal > 0):
        raise ValueError(
            f"`C` should have a positive diagonal for form={form!r}: constant SGD samples only "
            "where there is gradient noise. Received: no noise at coordinates "
            f"{np.flatnonzero(diagonal <= 0).tolist()}. Leave them out, or use form='full' "
            "with a prior precision, or SGFS, which injects noise."
        )
    if form == "diagonal":
        return mu * 2.0 * T / (N * diagonal)
    G = np.sqrt(np.diagonal(_covariance("C", C)))
    if not np.all(G > 0):
        raise ValueError(
            "`C` should have a positive diagonal for form='sqrt'. Received: 0 at coordinates "
            f"{np.flatnonzero(G <= 0).tolist()}. Use form='diagonal'."
        )
    return optimal_learning_rate(C, preconditioner=1.0 / G, **scales) / G


def sgfs_step(
    C,
    *,
    N,
    S,
    T=1.0,
    prior_precision=0.0,
    learning_rate=1.0 / 9.0,
    fisher="full",
    blocks=None,
    noise="fisher",
    max_step=None,
):
    """H and Q of stochastic gradient Fisher scoring (Ahn, eq. 11).

    With gamma = 1 + N / (S T), J = gamma N I1 + Lambda, I1 the form of C that `fisher` names,

        H = 2 N (J + B)^-1,         Q = T H B H / N^2 = 2 T H / N - T H J H / N^2

    where B = a^2 J, a^2 = 4 / learning_rate, for `noise="fisher"` (Ahn section 5), and
    B = (4 b / learning_rate) I for a number b. If A = C + Lambda / N and I1 = C, then

        Q + H C H / S = 2 T H / N - T H A H / N

    and the stationary covariance is T A^-1 / N for every step, batch, prior and temperature.

    Where H is cut down below 2 N (J + B)^-1, Q is the second expression. It is cut at `max_step`
    (Mandt section 4.2, for diagonals); and without a step (B = 0) at N / Lambda where
    gamma N I1 < Lambda, since a direction without data would have H A = 2 and flip for ever.

    Args:
        C: Per-example gradient covariance, [D, D].
        N: Rows of data.
        S: Rows of a batch.
        T: Temperature, positive. Defaults to `1.0`.
        prior_precision: Lambda, in posterior units, a number, [D] or [D, D]; like C it is reduced
            to the form that `fisher` names. Defaults to `0.0`.
        learning_rate: Ahn's step, positive; None is the largest, B = 0. Defaults to `1/9`: a = 6.
        fisher: `"full"`, `"diagonal"` or `"block"`. Defaults to `"full"`.
        blocks: Sizes of the blocks of `fisher="block"`, integers that sum to D.
        noise: `"fisher"`, or b, a positive number in mean-loss units. Defaults to `"fisher"`.
        max_step: Mandt's h_max, a positive number in mean-loss units, for `fisher="diagonal"`.
            Defaults to None: no bound.

    Returns:
        A `Step`: H and Q, [D] for `fisher="diagonal"`, else [D, D].

    Raises:
        ValueError: If an argument is outside its range, or J is singular.
    """
    N, S, T = _scales(N, S, T)
    C = _covariance("C", C)
    Lambda = _expand("prior_precision", prior_precision, len(C))
    if isinstance(noise, str) and noise != "fisher":
        raise ValueError(f"`noise` should be 'fisher' or a number. Received: noise={noise!r}")
    if noise != "fisher":
        noise = real_number("noise", noise, positive=True)
    if learning_rate is not None:
        learning_rate = real_number("learning_rate", learning_rate, positive=True)
    if max_step is not None:
        max_step = real_number("max_step", max_step, positive=True)
        if fisher != "diagonal":
            raise ValueError(
                "`max_step` bounds the entries of a diagonal H. Received: "
                f"max_step={max_step!r} with fisher={fisher!r}. Use fisher='diagonal'."
            )

    gamma = 1.0 + N / (S * T)
    mask = _fisher_mask(fisher, blocks, len(C))
    J, Lambda = mask * (gamma * N * C + Lambda), mask * Lambda
    if learning_rate is None:
        B = np.zeros_like(J)
    elif noise == "fisher":
        B = 4.0 / learning_rate * J
    else:
        B = 4.0 * noise / learning_rate * np.eye(len(J))

    if fisher == "diagonal":
        return _diagonal_sgfs(*map(np.diagonal, (J, B, Lambda)), N, T, max_step)
    if learning_rate is None:
        return _uncut(J, Lambda, N, T, 0.5)
    H = 2.0 * N * _inverse(J + B)
    return Step(H, _symmetrize(T * H @ B @ H) / N**2)


def stationary_covariance(A, C, H, Q=None, *, S=None, N=None, replacement=True, discrete=True):
    """Stationary covariance of a sampler with additive gradient noise.

        H A Sigma + Sigma A H - H A Sigma A H = H C H / S + Q

    The chain itself, exactly. Without the third term (`discrete=False`) it is the
    Ornstein-Uhlenbeck process that Mandt approximates it by.

    Args:
        A: Hessian of the mean loss, prior included, [D, D].
        C: Per-example gradient covariance, [D, D]; None for full batches.
        H: Preconditioner with the step in it, a number, [D] or [D, D].
        Q: Covariance of the injected noise, a number, [D] or [D, D]. Defaults to None: none.
        S: Rows of a batch. Needed with C.
        N: Rows of data. Needed with `replacement=False`.
        replacement: False if the rows of one batch are drawn without replacement (the batches
            still independently), which multiplies the batch noise by (N - S) / (N - 1). Defaults
            to True.
        discrete: False for the Ornstein-Uhlenbeck process. Defaults to True.

    Returns:
        Sigma, [D, D], in units of theta squared.

    Raises:
        ValueError: If A or H is not positive definite, or the chain is unstable: the spectral
            radius of I - H A is 1 or more. The message gives the largest stable step.
    """
    modes = _modes(A, H, 0.0, discrete)
    return modes.covariance(modes.noise(C, Q, _batch_factor(C, S, N, replacement)))


def sgld_stationary_covariance(A, C, H, *, N, S=None, T=1.0, replacement=True, discrete=True):
    """Stationary covariance of SGLD at a constant step, and of pSGLD with a frozen preconditioner.

        H A Sigma + Sigma A H - H A Sigma A H = 2 T H / N + H C H / S

    For H = eta and without the third term this is A Sigma + Sigma A = (2 T / N) I + (eta / S) C,
    which is what Mandt's eq. 34 should read. With full batches on curvature h it gives
    Sigma = T / (N h (1 - eta h / 2)).

    Args:
        A: Hessian of the mean loss, prior included, [D, D].
        C: Per-example gradient covariance, [D, D]; None for full batches.
        H: eta for SGLD; eta G, [D], for pSGLD; or [D, D].
        N: Rows of data.
        S: Rows of a batch. Needed with C.
        T: Temperature, at least 0. Defaults to `1.0`.
        replacement: See `stationary_covariance`. Defaults to True.
        discrete: False for the Ornstein-Uhlenbeck process. Defaults to True.

    Returns:
        Sigma, [D, D].

    Raises:
        ValueError: As `stationary_covariance`.
    """
    N = positive_integer("N", N)
    T = real_number("T", T, minimum=0.0)
    Q = 2.0 * T * np.asarray(H, float) / N
    return stationary_covariance(A, C, H, Q, S=S, N=N, replacement=replacement, discrete=discrete)


def momentum_stationary_covariance(
    A, C, H, Q=None, *, momentum, S=None, N=None, replacement=True, discrete=True
):
    """Stationary covariance of theta under SGD with momentum.

    The theta block of the solution of the 2D x 2D Lyapunov equation of

        v <- momentum v - H g + xi,    theta <- theta + v

    In coordinates theta = V phi where H A = V diag(p) V^-1 and n is the covariance of the noise of
    a step, it is, with m = momentum and mu = 1 - m,

        Sigma_ij = n_ij / (mu (p_i + p_j) - p_i p_j + m (p_i^2 + p_j^2 - 2 m p_i p_j) / (1 - m^2))

    and for the Ornstein-Uhlenbeck process dv = -(mu v + H A theta) dt + noise, dtheta = v dt,

        Sigma_ij = n_ij / (mu (p_i + p_j) + (p_i - p_j)^2 / (2 mu)).

    Mandt's eq. 31 is the latter without its last term: right where H A and the noise commute.

    Args:
        A: Hessian of the mean loss, prior included, [D, D].
        C: Per-example gradient covariance, [D, D]; None for full batches.
        H: Preconditioner with the step, and the factor mu if wanted, in it: a number, [D] or
            [D, D].
        Q: Covariance of noise injected into v. Defaults to None: none.
        momentum: 1 - mu in Keras' sense, in [0, 1). With 0 this is `stationary_covariance`.
        S: Rows of a batch. Needed with C.
        N: Rows of data. Needed with `replacement=False`.
        replacement: See `stationary_covariance`. Defaults to True.
        discrete: False for the Ornstein-Uhlenbeck process. Defaults to True.

    Returns:
        Sigma, [D, D]. That of v is (H A Sigma + Sigma A H) / (1 + momentum) in the chain.

    Raises:
        ValueError: As `stationary_covariance`; the chain is stable while the eigenvalues of H A
            are below 2 (1 + momentum).
    """
    modes = _modes(A, H, momentum, discrete)
    return modes.covariance(modes.noise(C, Q, _batch_factor(C, S, N, replacement)))


def linear_regression_stationary_covariance(
    x,
    y,
    H,
    Q=None,
    *,
    S,
    noise_std=1.0,
    prior_precision=0.0,
    momentum=0.0,
    replacement=True,
    tolerance=1e-13,
):
    """Stationary covariance on linear regression, whose gradient noise grows away from the mode.

    An example's gradient at distance d from the mode is x_i (x_i' d - r_i) / sigma^2, so that the
    noise of a batch, averaged over d ~ (0, Sigma), has S times the covariance

        C + mean_i a_i Sigma a_i - a Sigma a,    a_i = x_i x_i' / sigma^2,   a = mean_i a_i

    Sigma is the fixed point of this and of `momentum_stationary_covariance` in turn: exact for the
    chain on these data. Q comes from a method's formula at the mode (`sgfs_step`, or
    2 T H / N for SGLD).

    Args:
        x: Features, [N, D].
        y: Targets, [N].
        H: Preconditioner with the step in it, a number, [D] or [D, D].
        Q: Covariance of the injected noise, a number, [D] or [D, D]. Defaults to None: none.
        S: Rows of a batch.
        noise_std: sigma, in units of y. Defaults to `1.0`.
        prior_precision: Lambda, in posterior units, a number, [D] or [D, D]. Defaults to `0.0`.
        momentum: 1 - mu in Keras' sense. Defaults to `0.0`.
        replacement: See `stationary_covariance`. Defaults to True.
        tolerance: Relative error at which the iteration ends. Defaults to `1e-13`.

    Returns:
        Sigma, [D, D].

    Raises:
        ValueError: As `stationary_covariance`; also if the variance grows without bound although
            the mean is stable, which happens at large steps with small batches.
    """
    x, y = _rows(x, y)
    if y.size != len(x):
        raise ValueError(f"`y` should have one target a row. Received: y of shape {y.shape}")
    sigma = real_number("noise_std", noise_std, positive=True)
    _, _, A, C = gaussian_posterior(x, y, noise_std=sigma, prior_precision=prior_precision)
    factor = _batch_factor(C, S, len(x), replacement)
    modes = _modes(A, H, momentum, discrete=True)

    z = x @ modes.V / sigma
    mean_square = z.T @ z / len(z)
    response = modes.response()
    increment = modes.noise(C, Q, factor) * response
    first = np.trace(increment)
    phi, growth = increment, 0.0
    for _ in range(10_000):
        lengths = np.sum(z @ increment * z, axis=1)
        spread = (z * lengths[:, None]).T @ z / len(z) - mean_square @ increment @ mean_square
        previous, increment = np.trace(increment), factor * spread * response
        growth = np.trace(increment) / previous if previous > 0 else 0.0
        phi = phi + increment
        size = np.trace(phi)
        if growth < 1.0 and np.trace(increment) <= tolerance * (1.0 - growth) * size:
            return modes.to_theta(phi)
        if not size < 1e12 * first:
            break
    raise ValueError(
        "`H` should keep the variance finite: here the noise of a batch grows off the mode faster "
        f"than the step contracts, by a factor of {growth:.4g} a round (1 is the limit). "
        f"Received: H with eigenvalues of H A up to {modes.p.max():.4g} and S={S}. "
        "Take a smaller step or a larger batch."
    )


def iterate_average_covariance(
    A, C, H, Q=None, *, window, S=None, N=None, momentum=0.0, replacement=True, discrete=True
):
    """Covariance of the mean of `window` successive iterates of a stationary chain.

        (1/L^2) [L Sigma + sum_{k=1}^{L-1} (L - k) (Gamma_k + Gamma_k')],   L = window

    where Gamma_k = (I - H A)^k Sigma is the covariance of iterates k steps apart. It holds for any
    A, C and H, which need not commute as in Mandt's eq. 44. For long windows it is
    A^-1 C A^-1 / (S L), whatever H: at L = N / S the sandwich, which is the posterior's A^-1 / N
    only if C = A. What is missing of it in a direction of curvature lambda is governed by
    e^(-eps lambda N / S) for a step eps (Mandt's eq. 46, whose exponent is misprinted).

    Args:
        A: Hessian of the mean loss, prior included, [D, D].
        C: Per-example gradient covariance, [D, D]; None for full batches.
        H: Preconditioner with the step in it, a number, [D] or [D, D].
        Q: Covariance of the injected noise. Defaults to None: none.
        window: L, in steps.
        S: Rows of a batch. Needed with C.
        N: Rows of data. Needed with `replacement=False`.
        momentum: 1 - mu in Keras' sense, see `momentum_stationary_covariance`. Defaults to `0.0`.
        replacement: See `stationary_covariance`. Defaults to True.
        discrete: False for the Ornstein-Uhlenbeck process and the integral over the window.
            Defaults to True.

    Returns:
        The covariance, [D, D].

    Raises:
        ValueError: As `stationary_covariance`.
    """
    L = positive_integer("window", window)
    modes = _modes(A, H, momentum, discrete)
    noise = modes.noise(C, Q, _batch_factor(C, S, N, replacement))
    X, F = modes.lag_zero(noise), modes.transition()
    lags = _lag_sum(F, L, discrete)
    total = L * X[..., 0] if discrete else 0.0
    one_sided = np.einsum("ik,ijk->ij", lags[:, 0], X)
    total = total + one_sided + one_sided.T
    return modes.to_theta(total / L**2)


def gaussian_kl(covariance, target_covariance, mean=None, target_mean=None):
    """KL(q || p) between two Gaussians, in nats (Mandt's eq. 17).

        1/2 [tr(P^-1 Sigma) + (m - m_p)' P^-1 (m - m_p) - D + log|P| - log|Sigma|]

    Args:
        covariance: Sigma of q, what the sampler has, [D, D].
        target_covariance: P of p, the posterior's, [D, D].
        mean: m of q, [D]. Defaults to None: zeros.
        target_mean: m_p of p, [D]. Defaults to None: zeros.

    Returns:
        A float.

    Raises:
        ValueError: If a covariance is not positive definite or shapes disagree.
    """
    Sigma = _symmetric("covariance", covariance)
    D = len(Sigma)
    factors = {}
    for name, matrix in (("covariance", Sigma), ("target_covariance", target_covariance)):
        factors[name] = _cholesky(name, _symmetric(name, matrix, D))
    shift = np.zeros(D)
    for name, value, sign in (("mean", mean, 1.0), ("target_mean", target_mean, -1.0)):
        if value is not None:
            value = np.asarray(value, float)
            if value.shape != (D,):
                raise ValueError(f"`{name}` should have shape ({D},). Received: {value.shape}")
            shift = shift + sign * value
    L, L_target = factors["covariance"], factors["target_covariance"]
    # tr(P^-1 Sigma) is the squared Frobenius norm of the ratio of the two factors.
    ratio = scipy.linalg.solve_triangular(L_target, L, lower=True)
    distance = scipy.linalg.solve_triangular(L_target, shift, lower=True)
    log_ratio = 2.0 * np.sum(np.log(np.diagonal(ratio)))
    return float(0.5 * (np.sum(ratio**2) + np.sum(distance**2) - D - log_ratio))


def gaussian_posterior(x, y, *, model="linear", prior_precision=1.0, noise_std=1.0, T=1.0):
    """The Gaussian posterior of a linear model: exact for regression, at the mode for classes.

        U(theta) = -sum_i log p(y_i | x_i' theta) + theta' Lambda theta / 2
        mean = argmin U,     A = U'' / N,     covariance = T A^-1 / N

    The mode is found by Newton's method. There is no intercept: append a column of ones for one.

    Args:
        x: Features, [N, D].
        y: [N]: real for `"linear"`, 0 or 1 for `"logistic"`, classes 0, ..., K - 1 for `"softmax"`.
            `"linear"` also takes [N, K].
        model: `"linear"`, `"logistic"` or `"softmax"`. Defaults to `"linear"`.
        prior_precision: Lambda, in posterior units: a number, [P] or [P, P] for the P weights in
            the order of a flattened kernel [D, K]. Defaults to `1.0`.
        noise_std: sigma of `"linear"`, in units of y. Defaults to `1.0`.
        T: Temperature, positive. Defaults to `1.0`.

    Returns:
        A `GaussianPosterior`: mean, covariance, A and C.

    Raises:
        ValueError: If an argument is outside its range, or no mode is determined: collinear
            features, separable classes, or softmax (whose classes can shift together), all
            without a prior.
    """
    if model not in _MODELS:
        raise ValueError(f"`model` should be one of {tuple(_MODELS)}. Received: model={model!r}")
    x, y = _rows(x, y)
    T = real_number("T", T, positive=True)
    sigma = real_number("noise_std", noise_std, positive=True)
    targets = _targets(model, y)
    likelihood = _MODELS[model]
    N, D = x.shape
    K = targets.shape[1]
    Lambda = _expand("prior_precision", prior_precision, D * K)

    def loss(theta):
        nll = likelihood(x @ theta.reshape(D, K), targets, sigma)[0]
        return nll + theta @ Lambda @ theta / (2.0 * N)

    def derivatives(theta):
        _, residuals, weights = likelihood(x @ theta.reshape(D, K), targets, sigma)
        gradient = (x.T @ residuals).reshape(-1) / N + Lambda @ theta / N
        hessian = np.empty((D, K, D, K))
        for j in range(K):
            for k in range(j + 1):
                hessian[:, j, :, k] = hessian[:, k, :, j] = (x * weights(j, k)[:, None]).T @ x / N
        return residuals, gradient, hessian.reshape(D * K, D * K) + Lambda / N

    theta, converged = np.zeros(D * K), False
    _, _, start = derivatives(theta)
    for _ in range(200):
        residuals, gradient, A = derivatives(theta)
        # Scaled to a unit diagonal: a feature in small units is no free direction.
        scale = np.sqrt(np.outer(np.diagonal(A), np.diagonal(A)))
        if np.any(scale == 0) or np.linalg.eigvalsh(A / scale)[0] <= 1e-15 * len(A):
            break
        if converged:
            covariance = T * _inverse(A) / N
            return GaussianPosterior(theta, covariance, A, _gradient_covariance(x, residuals))
        step = scipy.linalg.solve(A, gradient, assume_a="pos")
        # Newton's step squares this error of 1e-6 in the outputs. On the way to a mode at infinity
        # it never gets so short: each step adds about 1 to the outputs.
        converged = step @ start @ step <= 1e-12 * max(1.0, theta @ start @ theta)
        size = 1.0
        if not converged:
            old, gain = loss(theta), 1e-4 * gradient @ step
            # Near the mode the gain drowns in the rounding of the loss.
            while loss(theta - size * step) > old - size * gain + 1e-12 * max(1.0, old):
                size /= 2.0
        theta = theta - size * step
    raise ValueError(
        "`prior_precision` should make the mode unique and finite: without a prior the data leave "
        "a direction free (collinear features, separable classes, or the common shift of all "
        f"classes of a softmax). Received: prior_precision={prior_precision!r}. "
        "Use a positive precision."
    )


def sandwich_ratio(A, C):
    """tr(A^-1 C) / D: how far iterate averages, and scalar and diagonal steps, are off.

    The mean over whitened directions of the variance of long iterate averages, A^-1 C A^-1 / N, in
    units of the posterior's, A^-1 / N. 1 where the model is right and the prior weak. The variance
    of constant SGD with scalar or diagonal steps depends on the same mismatch of C and A.

    Args:
        A: Hessian of the mean loss, prior included, [D, D].
        C: Per-example gradient covariance, [D, D].

    Returns:
        A float.
    """
    A = _symmetric("A", A)
    C = _covariance("C", C, len(A))
    return float(np.trace(scipy.linalg.cho_solve((_cholesky("A", A), True), C)) / len(A))


def relaxation_time(A, H, *, momentum=0.0):
    """Steps in which the slowest direction forgets: 1 / (smallest eigenvalue of H A).

    A chain needs many of these for burn-in, and gives about one independent draw in two of them.
    With momentum it is (1 - momentum) times that, to first order in the step. A direction whose
    eigenvalue p is near 2 flips sign at every step; its size is forgotten in 1 / (2 - p) steps.

    Args:
        A: Hessian of the mean loss, prior included, [D, D].
        H: Preconditioner with the step in it, a number, [D] or [D, D].
        momentum: 1 - mu in Keras' sense. Defaults to `0.0`.

    Returns:
        A float, in steps.

    Raises:
        ValueError: If A or H is not positive definite, or the chain is unstable.
    """
    modes = _modes(A, H, momentum, discrete=True)
    return float((1.0 - modes.momentum) / modes.p.min())


def discretization_bias(*, N, S, T=1.0):
    """Relative excess variance of constant SGD with the full preconditioner where C = A.

        Sigma = (T / N) (A - A H A / 2)^-1,   H A = 2 S T / N:   bias 1 / (1 - S T / N) - 1

    For other C the first equation holds with H = (2 S T / N) C^-1, the preconditioner without
    Lambda; the bias then differs between directions.

    Args:
        N: Rows of data.
        S: Rows of a batch.
        T: Temperature, positive. Defaults to `1.0`.

    Returns:
        A float, 0.01 for one per cent.

    Raises:
        ValueError: If S T >= N, where the chain is unstable.
    """
    N, S, T = _scales(N, S, T)
    if not S * T < N:
        raise ValueError(
            "`S` should be below N / T: constant SGD at its optimal step is unstable from there. "
            f"Received: S={S}, N={N}, T={T:g}. Use smaller batches."
        )
    return S * T / (N - S * T)


class _Modes(NamedTuple):
    """The chain in coordinates theta = V phi in which H A = V diag(p) V^-1 and V V' = H.

    There it falls apart into one pair (phi_i, v_i) for each i, coupled by the noise alone.
    """

    V: np.ndarray
    V_inverse: np.ndarray
    p: np.ndarray
    momentum: float
    discrete: bool

    def noise(self, C, Q, factor):
        """Covariance of one step's noise; `factor` is that of C in the noise of a batch."""
        D = len(self.p)
        noise = np.zeros((D, D))
        if C is not None:
            # V^-1 H = V', so H need not be multiplied out.
            noise += factor * self.V.T @ _covariance("C", C, D) @ self.V
        if Q is not None:
            noise += self.V_inverse @ _covariance("Q", _expand("Q", Q, D)) @ self.V_inverse.T
        return noise

    def response(self):
        """Stationary covariance of phi for unit noise, [D, D]: see the public docstrings."""
        p, q, m = self.p[:, None], self.p, self.momentum
        mu = 1.0 - m
        if self.discrete:
            mixed = m * (p**2 + q**2 - 2.0 * m * p * q) / (1.0 - m**2)
            return 1.0 / (mu * (p + q) - p * q + mixed)
        if m == 0:
            return 1.0 / (p + q)
        return 1.0 / (mu * (p + q) + (p - q) ** 2 / (2.0 * mu))

    def covariance(self, noise):
        return self.to_theta(self.response() * noise)

    def to_theta(self, phi):
        return _symmetrize(self.V @ phi @ self.V.T)

    def transition(self):
        """One step of (phi_i, v_i), or its generator: [D, 2, 2]; [D, 1, 1] without momentum."""
        p, m = self.p, self.momentum
        if m == 0:
            return (1.0 - p if self.discrete else -p)[:, None, None]
        one = np.ones_like(p)
        if self.discrete:
            rows = [[1.0 - p, m * one], [-p, m * one]]
        else:
            rows = [[0.0 * one, one], [-p, (m - 1.0) * one]]
        return np.moveaxis(np.array(rows), -1, 0)

    def lag_zero(self, noise):
        """Covariance of (phi_i, v_i) with phi_j: [D, D, 2], or [D, D, 1] without momentum."""
        p, q, m = self.p[:, None], self.p, self.momentum
        phi = self.response() * noise
        if m == 0:
            return phi[..., None]
        if self.discrete:
            v = phi * (q - m * p) / (1.0 - m**2)
        else:
            v = phi * (q - p) / (2.0 * (1.0 - m))
        return np.stack([phi, v], axis=-1)


def _modes(A, H, momentum, discrete):
    A = _symmetric("A", A)
    m = _momentum(momentum)
    R = _cholesky("H", _expand("H", H, len(A)))
    p, U = scipy.linalg.eigh(R.T @ A @ R)
    if not p[0] > 0:
        raise ValueError(
            "`A` should be positive definite: the Hessian of the mean loss at a mode, with the "
            f"prior's precision / N in it. Received: smallest eigenvalue of H A = {p[0]:.4g}. "
            "A prior makes it so in directions that the data leave free."
        )
    V_inverse = scipy.linalg.solve_triangular(R, np.eye(len(A)), lower=True)
    modes = _Modes(R @ U, U.T @ V_inverse, p, m, discrete)
    limit = 2.0 * (1.0 + m)
    # At the limit itself p is right only to rounding.
    if discrete and not p[-1] < limit * (1.0 - 1e-13):
        radius = np.max(np.abs(np.linalg.eigvals(modes.transition())))
        remedy = f"Multiply H by less than {limit / p[-1]:.4g}"
        if np.ndim(H) == 0:
            remedy += f": the largest stable step is {limit * float(H) / p[-1]:.4g}"
        raise ValueError(
            "`H` should keep the chain stable: the spectral radius of a step (I - H A, without "
            f"momentum) below 1, the eigenvalues of H A below {limit:g}. Received: spectral radius "
            f"{radius:.4g}, largest eigenvalue of H A {p[-1]:.4g}. {remedy}."
        )
    return modes


def _lag_sum(F, L, discrete):
    """sum_{k=1}^{L-1} (L - k) F^k, or the integral of (L - s) exp(F s) over (0, L), for each F.

    As the corner of a power of a larger matrix (Van Loan 1978): the geometric sums in closed form
    cancel where L (I - F) is small.
    """
    k = F.shape[-1]
    chain = np.zeros((len(F), 3 * k, 3 * k))
    chain[:, :k, k : 2 * k] = chain[:, k : 2 * k, 2 * k :] = np.eye(k)
    if discrete:
        chain[:, :k, :k] = F
        chain[:, k : 2 * k, k : 2 * k] = chain[:, 2 * k :, 2 * k :] = np.eye(k)
        return F @ np.linalg.matrix_power(chain, L)[:, :k, 2 * k :]
    chain[:, :k, :k] = L * F
    return L**2 * scipy.linalg.expm(chain)[:, :k, 2 * k :]


def _batch_factor(C, S, N, replacement):
    """What C is multiplied by in the covariance of a batch's mean gradient."""
    if C is None:
        return 0.0
    if S is None:
        raise ValueError(
            "`S`, the rows of a batch, is needed with `C`. Received: S=None. Give S, or C=None "
            "for full batches."
        )
    S = positive_integer("S", S)
    if replacement:
        return 1.0 / S
    if N is None:
        raise ValueError(
            "`N`, the rows of data, is needed with replacement=False. Received: N=None"
        )
    N = positive_integer("N", N)
    if S > N:
        raise ValueError(
            "`S` should be at most N without replacement. "
            f"Received: S={S}, N={N}. Use replacement=True or smaller batches."
        )
    return (N - S) / (S * max(N - 1, 1))


def _gradient_noise(C, S, E):
    C = _covariance("C", C)
    noise = C / S
    if E is not None:
        noise = noise + _covariance("gradient_noise", _expand("gradient_noise", E, len(C)))
    return noise


def _fisher_mask(fisher, blocks, D):
    """Which entries of C the form uses: ones and zeros, [D, D]."""
    if (blocks is not None) != (fisher == "block"):
        raise ValueError(
            "`blocks`, the sizes of the blocks, goes with fisher='block' and is needed there. "
            f"Received: blocks={blocks!r}, fisher={fisher!r}"
        )
    if fisher == "full":
        return np.ones((D, D))
    if fisher == "diagonal":
        return np.eye(D)
    if fisher == "block":
        sizes = [positive_integer("blocks", size) for size in blocks]
        if sum(sizes) != D:
            raise ValueError(f"`blocks` should sum to D = {D}. Received: blocks={blocks!r}")
        return scipy.linalg.block_diag(*(np.ones((size, size)) for size in sizes))
    raise ValueError(
        f"`fisher` should be 'full', 'diagonal' or 'block'. Received: fisher={fisher!r}"
    )


def _diagonal_sgfs(J, B, Lambda, N, T, max_step):
    if not np.all(J > 0):
        raise ValueError(_singular(f"coordinates {np.flatnonzero(J <= 0).tolist()}"))
    H = 2.0 * N / (J + B)
    if not np.any(B):
        H = np.minimum(H, np.divide(N, Lambda, out=np.full_like(H, np.inf), where=Lambda > 0))
    if max_step is not None:
        H = np.minimum(H, max_step)
    return Step(H, T * H / N * np.maximum(2.0 - J * H / N, 0.0))


def _uncut(J, Lambda, N, T, largest_share):
    """B = 0: H = 2 N J^-1, or N / Lambda where Lambda's share of J is above `largest_share`."""
    try:
        R = scipy.linalg.cholesky(J, lower=True)
    except np.linalg.LinAlgError:
        raise ValueError(_singular("some direction")) from None
    R_inverse = scipy.linalg.solve_triangular(R, np.eye(len(J)), lower=True)
    share, W = scipy.linalg.eigh(R_inverse @ Lambda @ R_inverse.T)
    # `share` is Lambda's part of J in the direction, up to rounding in [0, 1].
    h = np.where(share > largest_share, 1.0 / np.maximum(share, 0.5), 2.0)
    V = R_inverse.T @ W
    return Step(N * (V * h) @ V.T, T * (V * (2.0 * h - h**2)) @ V.T)


def _singular(where):
    return (
        "`C` should be positive where `prior_precision` is 0, so that gamma N C + Lambda has an "
        f"inverse. Received: zero in {where}. Use a positive prior precision."
    )


def _linear(f, y, sigma):
    residuals = (f - y) / sigma**2
    nll = 0.5 * np.sum((f - y) ** 2) / (len(y) * sigma**2)
    return nll, residuals, lambda j, k: np.full(len(y), float(j == k) / sigma**2)


def _logistic(f, y, sigma):
    p = scipy.special.expit(f)
    nll = np.mean(np.logaddexp(0.0, f) - y * f)
    return nll, p - y, lambda j, k: (p * scipy.special.expit(-f))[:, 0]


def _softmax(f, y, sigma):
    log_p = scipy.special.log_softmax(f, axis=1)
    p = np.exp(log_p)
    nll = -np.sum(y * log_p) / len(y)
    return nll, p - y, lambda j, k: p[:, j] * (float(j == k) - p[:, k])


# Of the outputs f, [N, K]: mean negative log likelihood, its derivative in each row, and a
# function of two outputs j, k that gives the second derivative in each row, [N].
_MODELS = {"linear": _linear, "logistic": _logistic, "softmax": _softmax}


def _targets(model, y):
    """y as [N, K], one-hot for softmax."""
    if model == "linear":
        return y.reshape(len(y), -1)
    y = y.reshape(len(y), -1)
    if y.shape[1] != 1:
        raise ValueError(f"`y` should have shape [N] for model={model!r}. Received: {y.shape}")
    if model == "logistic":
        if not np.all((y == 0) | (y == 1)):
            raise ValueError(
                "`y` should hold 0 and 1 for model='logistic'. "
                f"Received: values from {y.min():g} to {y.max():g}"
            )
        return y
    if not np.all((y >= 0) & (y == np.floor(y))):
        raise ValueError(
            "`y` should hold the classes 0, 1, ..., K - 1 for model='softmax'. "
            f"Received: values from {y.min():g} to {y.max():g}"
        )
    return np.eye(int(y.max()) + 1)[y[:, 0].astype(int)]


def _gradient_covariance(x, residuals):
    """Covariance over the rows of x_i (outer) residual_i, [D K, D K], divisor N."""
    gradients = (x[:, :, None] * residuals[:, None, :]).reshape(len(x), -1)
    gradients = gradients - gradients.mean(0)
    return gradients.T @ gradients / len(x)


def _rows(x, y):
    x, y = np.asarray(x, float), np.asarray(y, float)
    if x.ndim != 2 or len(x) == 0 or not np.all(np.isfinite(x)):
        raise ValueError(f"`x` should be finite, of shape [N, D]. Received: shape {x.shape}")
    if y.ndim not in (1, 2) or len(y) != len(x) or not np.all(np.isfinite(y)):
        raise ValueError(
            f"`y` should be finite, with one entry for each of the {len(x)} rows of x. "
            f"Received: shape {y.shape}"
        )
    return x, y


def _scales(N, S, T):
    return positive_integer("N", N), positive_integer("S", S), real_number("T", T, positive=True)


def _momentum(momentum):
    return real_number("momentum", momentum, minimum=0.0, below=1.0)


def _symmetric(name, value, size=None):
    """`value` as a symmetric float64 matrix; a number stands for [1, 1]."""
    matrix = np.asarray(value, float)
    if matrix.ndim == 0:
        matrix = matrix.reshape(1, 1)
    wanted = "[D, D]" if size is None else f"({size}, {size})"
    if matrix.ndim != 2 or len(set(matrix.shape)) != 1 or size not in (None, len(matrix)):
        raise ValueError(
            f"`{name}` should have shape {wanted}. Received: shape {np.shape(value)}. "
            "Give a diagonal as np.diag(...)."
        )
    # Loose enough for a matrix that was computed in float32.
    if not np.all(np.isfinite(matrix)) or np.any(
        np.abs(matrix - matrix.T) > 1e-5 * np.max(np.abs(matrix))
    ):
        raise ValueError(
            f"`{name}` should be finite and symmetric. Received: a matrix that is not. "
            f"For rounding errors alone, give ({name} + {name}.T) / 2."
        )
    return _symmetrize(matrix)


def _expand(name, value, size):
    """A number, a diagonal or a matrix as the matrix [size, size]."""
    array = np.asarray(value, float)
    if array.ndim == 2:
        return _symmetric(name, array, size)
    if array.ndim > 2 or array.shape not in ((), (size,)) or not np.all(np.isfinite(array)):
        raise ValueError(
            f"`{name}` should be a finite number, a diagonal of shape ({size},) or a matrix of "
            f"shape ({size}, {size}). Received: {value!r}"
        )
    return array * np.eye(size)


def _covariance(name, value, size=None):
    matrix = _symmetric(name, value, size)
    smallest, largest = np.linalg.eigvalsh(matrix)[[0, -1]]
    if smallest < -1e-5 * abs(largest):
        raise ValueError(
            f"`{name}` should be positive semi-definite. Received: eigenvalues from {smallest:.4g} "
            f"to {largest:.4g}"
        )
    return matrix


def _cholesky(name, matrix):
    try:
        return scipy.linalg.cholesky(matrix, lower=True)
    except np.linalg.LinAlgError:
        raise ValueError(
            f"`{name}` should be positive definite. Received: smallest eigenvalue "
            f"{np.linalg.eigvalsh(matrix)[0]:.4g}"
        ) from None


def _inverse(matrix):
    """Inverse of a positive definite matrix, symmetric to the last bit."""
    try:
        factor = scipy.linalg.cholesky(matrix, lower=True)
    except np.linalg.LinAlgError:
        raise ValueError(_singular("some direction")) from None
    root = scipy.linalg.solve_triangular(factor, np.eye(len(matrix)), lower=True)
    return root.T @ root


def _symmetrize(matrix):
    return (matrix + matrix.T) / 2.0
