"""How good predicted class probabilities are: functions of arrays.

`Posterior.predictive_quality` gives them all for a Posterior. Probabilities have the classes along
the last axis, [..., K]; of shape [n] or [..., 1] they are those of class 1 of two. Targets are
classes 0, ..., K - 1 of shape [...] or [..., 1], or one-hot of shape [..., K].

    p = posterior.predict(x)
    metrics.expected_calibration_error(p, y)
    each = posterior.predict(x, reduce=None)
    metrics.mutual_information(each, weights=posterior.draw_weights)
"""

import numpy as np
import scipy.special

from keras_sgmcmc.validation import positive_integer


def negative_log_likelihood(probabilities, y):
    """Mean of -log p(y_i), in nats. A proper score: least for the true probabilities.

    Probabilities are averaged over draws first. One of exactly 0 gives inf, which float32 rounds
    to sooner than `Posterior.log_predictive_density` does, that sums in log space.

    Args:
        probabilities: Array [..., K].
        y: Targets.

    Returns:
        A float.

    Raises:
        ValueError: If these are no probabilities, or the targets do not fit.
    """
    p, y = _checked(probabilities, y)
    with np.errstate(divide="ignore"):
        return float(-np.mean(np.log(p[np.arange(len(p)), y])))


def brier_score(probabilities, y):
    """Mean of sum_k (p_ik - [y_i = k])^2, between 0 and 2 (Brier 1950).

    For two classes it is twice the squared error of the probability of class 1. A proper score,
    which punishes confident errors less than the log likelihood does.

    Args, Returns, Raises: As `negative_log_likelihood`.

    Reference:
        G. W. Brier, "Verification of forecasts expressed in terms of probability", Monthly Weather
        Review 78, 1950, eq. 2.
    """
    p, y = _checked(probabilities, y)
    return float(np.mean(np.sum((p - np.eye(p.shape[1])[y]) ** 2, axis=1)))


def expected_calibration_error(probabilities, y, *, bins=15):
    """How far confidence and accuracy differ on average, by TensorFlow Probability.

        ECE = sum_b n_b/n |accuracy_b - confidence_b|

    over bins of equal width of the confidence, the probability of the likeliest class (Guo et al.
    2017, eq. 3). Not a proper score: constant predictions of the base rates have ECE 0. It is
    biased upwards where bins hold few rows.

    Args:
        probabilities: Array [..., K].
        y: Targets.
        bins: Number of bins. Defaults to `15`, as in the paper.

    Returns:
        A float between 0 and 1.

    Raises:
        ValueError: As `negative_log_likelihood`, or if `bins` is out of range.

    Reference:
        C. Guo, G. Pleiss, Y. Sun, K. Q. Weinberger, "On calibration of modern neural networks",
        ICML 2017.
    """
    import tensorflow_probability as tfp

    bins = positive_integer("bins", bins)
    p, y = _checked(probabilities, y)
    logits = np.log(np.maximum(p, np.finfo("float32").tiny)).astype("float32")
    return float(tfp.stats.expected_calibration_error(bins, logits=logits, labels_true=y))


def predictive_entropy(probabilities):
    """Entropy of the averaged prediction, -sum_k p_ik log p_ik, in nats: total uncertainty.

    Args:
        probabilities: Array [..., K].

    Returns:
        Array [...], between 0 and log K.

    Raises:
        ValueError: If these are no probabilities.
    """
    return np.sum(scipy.special.entr(_probabilities(probabilities)), axis=-1)


def mutual_information(probabilities, *, weights=None):
    """What a label would tell of the weights, in nats: the part of the entropy that data can cure.

        I_i = H[sum_s w_s p_is] - sum_s w_s H[p_is]

    The predictive entropy less that which single draws have (Houlsby et al. 2011, eq. 2, "BALD").

    Args:
        probabilities: Of each draw, [S, ..., K].
        weights: Non-negative weights of the draws, [S]. Defaults to None, all alike.

    Returns:
        Array [...], between 0 and log K.

    Raises:
        ValueError: If these are no probabilities, or there is not one weight for each draw.

    Reference:
        N. Houlsby, F. Huszár, Z. Ghahramani, M. Lengyel, "Bayesian active learning for
        classification and preference learning", 2011.
    """
    probabilities = np.asarray(probabilities, "float64")
    if probabilities.ndim < 2:
        raise ValueError(
            "`probabilities` should be those of each draw, [S, n, K], as "
            f"posterior.predict(x, reduce=None) gives. Received: shape {probabilities.shape}"
        )
    if probabilities.ndim == 2:
        probabilities = probabilities[..., None]
    p = _probabilities(probabilities)
    if weights is not None and np.shape(weights) != p.shape[:1]:
        raise ValueError(
            f"`weights` should have shape {p.shape[:1]}. Received: shape {np.shape(weights)}"
        )
    total = predictive_entropy(np.average(p, axis=0, weights=weights))
    return total - np.average(predictive_entropy(p), axis=0, weights=weights)


def _probabilities(probabilities):
    """[..., K] of float64, K at least 2."""
    p = np.asarray(probabilities, "float64")
    if p.ndim == 1 or (p.ndim and p.shape[-1] == 1):
        p = p.reshape(p.shape if p.ndim == 1 else p.shape[:-1])
        p = np.stack([1.0 - p, p], axis=-1)
    # Loose enough for half precision.
    if p.ndim < 2 or not p.size or not np.all(p >= 0) or np.any(np.abs(p.sum(-1) - 1.0) > 1e-2):
        raise ValueError(
            "`probabilities` should be >= 0 and sum to 1 along the last axis, [..., K], or be "
            "those of class 1 of two, [n] or [..., 1]. "
            f"Received: shape {np.shape(probabilities)}. Logits go through a softmax first."
        )
    return p


def _checked(probabilities, y):
    """Probabilities [m, K] and classes [m]."""
    p, y = _probabilities(probabilities), np.asarray(y)
    if y.shape == p.shape and np.all((y == 0) | (y == 1)) and np.all(y.sum(-1) == 1):
        y = y.argmax(-1)
    classes = p.shape[-1]
    good = y.shape in (p.shape[:-1], (*p.shape[:-1], 1))
    if not (good and np.all((y >= 0) & (y < classes) & (y == np.floor(y)))):
        raise ValueError(
            f"`y` should hold classes 0 to {classes - 1} in the shape {p.shape[:-1]}, or one-hot "
            f"in {p.shape}. Received: shape {y.shape}"
        )
    return p.reshape(-1, classes), y.reshape(-1).astype(int)
