"""Closed forms that the samplers are held to, in NumPy and independent of the package.

Conventions: theta <- theta - H (gradient of the mean loss + prior) + noise, N rows, temperature T;
A is the Hessian of the mean loss with the prior's Lambda / N in it.
"""

import numpy as np
import scipy.linalg


def increment_variance(step, train_size, temperature=1.0, preconditioner=1.0):
    """Variance of one step without gradient: 2 T H / N."""
    return 2.0 * temperature * step * preconditioner / train_size


def scalar_stationary_variance(curvature, step, train_size, temperature=1.0):
    """Full-batch Langevin chain on curvature h: T / (N h (1 - eta h / 2))."""
    return temperature / (train_size * curvature * (1.0 - step * curvature / 2.0))


def linear_posterior(x, y, noise_std, precision):
    """Mean [D, targets] and covariance [D, D] of Bayesian linear regression."""
    precision_matrix = x.T @ x / noise_std**2 + precision * np.eye(x.shape[1])
    covariance = np.linalg.inv(precision_matrix)
    return covariance @ (x.T @ y) / noise_std**2, covariance


def linear_chain_covariance(x, y, noise_std, precision, H, batch_size, temperature=1.0):
    """Exact stationary covariance of SGLD with preconditioner H on Bayesian linear regression.

    Batches are drawn independently and with replacement, so the batch noise at theta has the
    covariance C(theta) / S of per-example gradients, which is quadratic in theta. With
    theta ~ (m, Sigma) the stationary Sigma is the fixed point of the linear equation

        Sigma = (I - H A) Sigma (I - H A)' + H (C(m) + K(Sigma)) H / S + 2 T H / N,
        K(Sigma) = mean_i a_i Sigma a_i - a Sigma a,   a_i = x_i x_i' / sigma^2,  a = mean_i a_i.

    y is one target, [N]; H is [D, D].
    """
    n, d = x.shape
    mean, _ = linear_posterior(x, y[:, None], noise_std, precision)
    a = np.einsum("ni,nj->nij", x, x) / noise_std**2
    a_mean = a.mean(0)
    curvature = a_mean + precision / n * np.eye(d)
    gradients = x * (x @ mean - y[:, None]) / noise_std**2
    C = np.cov(gradients.T, bias=True).reshape(d, d)
    contraction = np.eye(d) - H @ curvature
    spread = np.einsum("nij,nkl->ikjl", a, a).reshape(d * d, d * d) / n - np.kron(a_mean, a_mean)
    operator = (
        np.eye(d * d) - np.kron(contraction, contraction) - np.kron(H, H) @ spread / batch_size
    )
    constant = H @ C @ H / batch_size + 2.0 * temperature * H / n
    return np.linalg.solve(operator, constant.reshape(-1)).reshape(d, d)


def whitened_eigenvalues(covariance, estimate):
    """Eigenvalues of Sigma^-1 Sigma_hat: all 1 where the estimate is right."""
    return scipy.linalg.eigh(estimate, covariance, eigvals_only=True)
