"""Effective numbers of draws, R-hat and standard errors of arrays, and Ahn's errors of moments."""

import warnings

import numpy as np

from keras_sgmcmc.validation import real_number

# Names here -> names in ArviZ.
_METHODS = {"bulk": "bulk", "tail": "tail", "mean": "mean", "square": "sd"}


def import_arviz():
    """ArviZ, or an error that says how to get it."""
    try:
        with warnings.catch_warnings():
            # It announces its next major version on every import.
            warnings.simplefilter("ignore", FutureWarning)
            import arviz
    except ImportError as error:
        raise ImportError(
            "Diagnostics need ArviZ: pip install 'keras-sgmcmc[diagnostics]' "
            "(or 'arviz>=0.23,<0.24')."
        ) from error
    return arviz


def effective_sample_size(draws, *, method="bulk", weights=None):
    """Number of independent draws that would estimate as well, by ArviZ.

        ESS = C n / tau,    tau = 1 + 2 sum_t rho_t

    over all C chains of n draws, from Geyer's initial monotone sequence of the autocorrelations
    rho_t of the split chains (Vehtari et al. 2021, eq. 10 to 13). Weighted draws count by Kish's
    number times 1/tau:

        ESS = kish_sample_size(weights) / tau

    Weights and autocorrelation are taken as unrelated, which holds for the weights of a slowly
    decreasing step.

    Args:
        draws: Array [chains, draws, ...], or [draws] for a scalar of one chain. Takes about 1 ms an
            element; `Posterior.summary` looks at a part of them.
        method: What is to be estimated. `"bulk"` (the default): the location, after normalising
            ranks, so that it exists for any distribution; `"tail"`: the 5 % and 95 % quantiles, the
            lesser; `"mean"`: the mean; `"square"`: the mean squared deviation, i.e. the variance.
        weights: Non-negative weights of the draws, [chains, draws], of any scale. Defaults to None,
            all alike.

    Returns:
        Array [...] of float64, a number of draws. NaN for elements that never change or are not
        finite.

    Raises:
        ValueError: If there are fewer than 4 draws a chain, or an argument is out of range.
        ImportError: If ArviZ is not installed.

    Warns:
        If an element never changes, or is not finite.

    References:
        A. Vehtari, A. Gelman, D. Simpson, B. Carpenter, P.-C. Bürkner, "Rank-normalization,
        folding, and localization: an improved R-hat", Bayesian Analysis 16, 2021.
        L. Kish, "Survey Sampling", 1965.

    Example:

    >>> predictions = posterior.by_chain(posterior.predict(x, reduce=None))
    >>> effective_sample_size(predictions, method="mean").min()
    """
    if method not in _METHODS:
        raise ValueError(
            f"`method` should be one of {tuple(_METHODS)}. Received: method={method!r}"
        )
    draws = _by_chain(draws)
    arviz = import_arviz()
    ess = _each(draws, lambda series: arviz.ess(series, method=_METHODS[method]))
    return ess if weights is None else ess * _kish_share(weights, draws)


def kish_sample_size(weights):
    """Number of draws of equal weight that independent draws of these weights are worth.

        n_eff = (sum_s w_s)^2 / sum_s w_s^2        (Kish 1965)

    Args:
        weights: Non-negative weights of any shape and scale, not all zero.

    Returns:
        A float between 1 and the number of draws.

    Raises:
        ValueError: If a weight is negative or not finite, or all are zero.
    """
    weights = np.asarray(weights, "float64")
    if not (np.all(np.isfinite(weights) & (weights >= 0)) and weights.sum() > 0):
        raise ValueError(
            "`weights` should be finite, not negative, and not all zero. "
            f"Received: weights={weights}"
        )
    weights = weights / weights.max()
    return float(weights.sum() ** 2 / np.sum(weights**2))


def autocorrelation_time(draws, *, cost=1.0):
    """Draws, or what they cost, for one independent draw.

        tau = cost C n / ESS,    ESS that of the mean

    With the seconds of a draw as its cost, tau is what Ahn et al. 2012 call ATUC, the
    autocorrelation time per unit of computation, by which samplers of unlike steps compare. With
    the thinning interval it is a number of optimizer steps.

    Args:
        draws: Array [chains, draws, ...], or [draws].
        cost: Cost of a draw, in any unit. Defaults to `1.0`.

    Returns:
        Array [...], in units of `cost`. NaN for elements that never change.

    Raises:
        ValueError, ImportError: As `effective_sample_size`.
    """
    cost = real_number("cost", cost, positive=True)
    draws = _by_chain(draws)
    count = draws.shape[0] * draws.shape[1]
    return cost * count / effective_sample_size(draws, method="mean")


def monte_carlo_standard_error(draws, *, weights=None):
    """Standard error of the mean of the draws as an estimate of the posterior mean.

        MCSE = sd / sqrt(ESS),    ESS that of the mean

    The standard deviation has the divisor n - 1, also that of weighted draws.

    Args:
        draws: Array [chains, draws, ...], or [draws].
        weights: As for `effective_sample_size`. Defaults to None.

    Returns:
        Array [...], in the units of the draws. NaN for elements that never change.

    Raises:
        ValueError, ImportError: As `effective_sample_size`.
    """
    draws = _by_chain(draws)
    ess = effective_sample_size(draws, method="mean", weights=weights)
    return standard_error(draws, ess, weights)


def potential_scale_reduction(draws):
    """Rank-normalised split R-hat, by ArviZ: near 1 where the chains agree.

    The larger of R-hat of the ranks (do the chains agree in location?) and of the ranks of the
    distances from the median (in scale?), every chain split in halves (Vehtari et al. 2021,
    section 4). Want less than 1.01.

    Two halves of a single chain are compared as if they were chains. That sees a chain that still
    travels, and no mode that it never visits.

    Args:
        draws: Array [chains, draws, ...], or [draws].

    Returns:
        Array [...]. NaN for elements that never change or are not finite; inf where chains stand
        still at different values.

    Raises:
        ValueError: If there are fewer than 4 draws a chain, or fewer than 8 of a single one.
        ImportError: If ArviZ is not installed.

    Warns:
        If an element never changes, or is not finite.
    """
    draws = _by_chain(draws)
    if len(draws) == 1:
        half = draws.shape[1] // 2
        if half < 4:
            raise ValueError(
                "`draws` needs at least 8 draws of a single chain, whose halves are compared. "
                f"Received: shape {draws.shape}. Sample longer, or run several chains."
            )
        draws = np.concatenate([draws[:, :half], draws[:, -half:]])
    return _each(draws, import_arviz().rhat)


def relative_error_mean(mean, reference):
    """E1, the error of an estimated posterior mean (Ahn et al. 2012, eq. 14).

        E1 = sum_i |m_i - m*_i| / sum_i |m*_i|

    Args:
        mean: Estimated mean m, of any shape.
        reference: m*, what it should be, of that shape, not all zero.

    Returns:
        A float, 0 if they are equal.

    Raises:
        ValueError: If the shapes differ, or the reference is zero.
    """
    return _relative_error("mean", mean, reference)


def relative_error_covariance(covariance, reference):
    """E2, the error of an estimated posterior covariance (Ahn et al. 2012, eq. 14).

        E2 = sum_ij |V_ij - V*_ij| / sum_ij |V*_ij|

    Args:
        covariance: Estimated covariance V, [D, D].
        reference: V*, what it should be, of that shape, not all zero.

    Returns:
        A float, 0 if they are equal.

    Raises:
        ValueError: If the shapes differ, or the reference is zero.
    """
    return _relative_error("covariance", covariance, reference)


def _relative_error(name, value, reference):
    value, reference = np.asarray(value, "float64"), np.asarray(reference, "float64")
    if value.shape != reference.shape:
        raise ValueError(
            f"`{name}` and `reference` should have one shape. "
            f"Received: {value.shape} and {reference.shape}"
        )
    scale = np.sum(np.abs(reference))
    if not scale > 0:
        raise ValueError("`reference` should not be all zero: the error is relative to it.")
    return float(np.sum(np.abs(value - reference)) / scale)


def standard_error(draws, ess, weights):
    """sd / sqrt(ess) of draws [chains, draws, ...]."""
    count = draws.shape[0] * draws.shape[1]
    flat = draws.reshape(count, *draws.shape[2:])
    w = None if weights is None else np.asarray(weights, "float64").reshape(count)
    variance = np.average((flat - np.average(flat, axis=0, weights=w)) ** 2, axis=0, weights=w)
    return np.sqrt(variance * count / ((count - 1) * ess))


def _by_chain(draws):
    draws = np.asarray(draws, "float64")
    if draws.ndim == 1:
        draws = draws[None]
    if draws.ndim < 2 or not len(draws) or draws.shape[1] < 4:
        raise ValueError(
            "`draws` should have the shape [chains, draws, ...], with at least 4 draws a chain. "
            f"Received: shape {draws.shape}. Sample longer or thin less; a single chain of shape "
            "[draws, ...] goes in as draws[None], the draws of a Posterior as "
            "posterior.by_chain(draws)."
        )
    return draws


def moving(draws):
    """Which elements of draws [chains, draws, k] change at all, and which are finite, [k] each."""
    finite = np.all(np.isfinite(draws), axis=(0, 1))
    return np.any(draws != draws[:1, :1], axis=(0, 1)), finite


def _each(draws, function):
    """`function` of every element's series [chains, draws]."""
    flat = draws.reshape(*draws.shape[:2], -1)
    changes, finite = moving(flat)
    result = np.full(flat.shape[-1], np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        for i in np.flatnonzero(changes & finite):
            result[i] = function(flat[..., i])
    lost = int(np.sum(~(changes & finite)))
    if lost:
        warnings.warn(
            f"{lost} of {flat.shape[-1]} elements of `draws` never change or are not finite, so "
            "that NaN is all that can be said of them.",
            stacklevel=3,
        )
    return result.reshape(draws.shape[2:])[()]


def _kish_share(weights, draws):
    weights = np.asarray(weights, "float64")
    if weights.ndim == 1:
        weights = weights[None]
    if weights.shape != draws.shape[:2]:
        raise ValueError(
            f"`weights` should have one entry for each draw, shape {draws.shape[:2]}. "
            f"Received: shape {weights.shape}"
        )
    return kish_sample_size(weights) / weights.size
