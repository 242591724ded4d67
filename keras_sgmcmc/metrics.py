"""How good predicted class probabilities are: functions of arrays, and Keras metrics.

Probabilities have the classes along the last axis, [..., K]; of shape [n] or [..., 1] they are
those of class 1 of two. Targets are classes 0, ..., K - 1 of shape [...] or [..., 1], or one-hot of
shape [..., K].

    p = posterior.predict(x)
    metrics.expected_calibration_error(p, y)
    each = posterior.predict(x, reduce=None)
    metrics.mutual_information(each, weights=posterior.draw_weights)

`Posterior.predictive_quality` gives them all for a Posterior. The classes are for
`compile(metrics=[...])`, so for `fit`, `model.evaluate` and `Posterior.evaluate`:

    model.compile(..., metrics=[metrics.BrierScore(), metrics.ExpectedCalibrationError()])

Keras has the negative log-likelihood as its crossentropy metrics, and the mutual information needs
the draws one by one.
"""

import keras
import numpy as np
import scipy.special
from keras import ops

from keras_sgmcmc.likelihoods import _are_probabilities
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


class _ClassMetric(keras.metrics.MeanMetricWrapper):
    """Mean over the predictions of a function of (y_true, y_pred, from_logits)."""

    def __init__(self, function, from_logits, name, dtype):
        super().__init__(function, name=name, dtype=dtype, from_logits=bool(from_logits))
        self.from_logits = bool(from_logits)

    def get_config(self):
        return {"name": self.name, "dtype": self.dtype, "from_logits": self.from_logits}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class BrierScore(_ClassMetric):
    """Weighted mean of sum_k (p_ik - [y_i = k])^2, as `brier_score`, over the batches of a run.

    Args:
        from_logits: Whether the model's outputs are logits, which go through a softmax, or a
            sigmoid where there is one. Defaults to False.
        name: Name of the metric.
        dtype: Dtype of the computation. Defaults to None, `keras.config.floatx()`.

    Raises:
        ValueError: If the shapes of targets and outputs do not fit.

    Example:

    ```python
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=[keras_sgmcmc.metrics.BrierScore(from_logits=True)])
    model.evaluate(np.zeros((8, 4)), np.zeros(8), verbose=0)
    ```
    """

    def __init__(self, from_logits=False, name="brier_score", dtype=None):
        super().__init__(_brier_scores, from_logits, name, dtype)
        self._direction = "down"


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class PredictiveEntropy(_ClassMetric):
    """Weighted mean of -sum_k p_ik log p_ik, in nats, as `predictive_entropy`. Reads no targets.

    Args, Raises: As `BrierScore`.
    """

    def __init__(self, from_logits=False, name="predictive_entropy", dtype=None):
        super().__init__(_entropies, from_logits, name, dtype)


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class ExpectedCalibrationError(keras.metrics.Metric):
    """How far confidence and accuracy differ on average, over the batches of a run.

        ECE = sum_b |sum_{i in b} w_i (correct_i - confidence_i)| / sum_i w_i

    over bins b of the confidence, as `expected_calibration_error`. The sums of the bins are kept,
    so that the result does not depend on how the rows are batched.

    Args:
        bins: Number of bins. Defaults to `15`.
        from_logits, name, dtype: As `BrierScore`.

    Raises:
        ValueError: If `bins` is out of range, the shapes of targets and outputs do not fit, or the
            outputs carry a mask; give weights of 0 instead.
    """

    def __init__(self, bins=15, from_logits=False, name="expected_calibration_error", dtype=None):
        super().__init__(name=name, dtype=dtype)
        self.bins = positive_integer("bins", bins)
        self.from_logits = bool(from_logits)
        self.gaps = self.add_variable((self.bins,), initializer="zeros", name="gaps")
        self.total = self.add_variable((), initializer="zeros", name="total")
        self._direction = "down"

    def update_state(self, y_true, y_pred, sample_weight=None):
        if getattr(y_pred, "_keras_mask", None) is not None:
            raise ValueError(
                "The outputs carry a mask (from Masking or mask_zero=True), which "
                f"`{self.name}` does not apply. Give those positions a `sample_weight` of 0 and "
                "make the last layers drop the mask."
            )
        p, target = _tensors(y_true, y_pred, self.from_logits)
        p, target = ops.cast(p, self.dtype), ops.cast(target, self.dtype)
        confidence = ops.max(p, axis=-1)
        likeliest = ops.one_hot(ops.argmax(p, axis=-1), p.shape[-1], dtype=self.dtype)
        correct = ops.sum(likeliest * target, axis=-1)
        weights = ops.ones_like(confidence)
        if sample_weight is not None:
            given = ops.convert_to_tensor(sample_weight, self.dtype)
            if len(given.shape) == len(weights.shape) + 1 and given.shape[-1] == 1:
                given = ops.squeeze(given, axis=-1)
            while len(given.shape) < len(weights.shape):
                given = ops.expand_dims(given, axis=-1)
            weights = weights * given
        index = ops.cast(ops.floor(confidence * self.bins), "int32")
        index = ops.clip(index, 0, self.bins - 1)
        gaps = ops.reshape(weights * (correct - confidence), (-1,))
        self.gaps.assign_add(ops.segment_sum(gaps, ops.reshape(index, (-1,)), self.bins))
        self.total.assign_add(ops.sum(weights))

    def result(self):
        return ops.divide_no_nan(ops.sum(ops.abs(self.gaps)), self.total)

    def get_config(self):
        config = {"name": self.name, "dtype": self.dtype}
        return {**config, "bins": self.bins, "from_logits": self.from_logits}


def _brier_scores(y_true, y_pred, from_logits):
    p, target = _tensors(y_true, y_pred, from_logits)
    return ops.sum(ops.square(p - target), axis=-1)


def _entropies(y_true, y_pred, from_logits):
    p = _probability_tensor(y_pred, from_logits)
    # p log p without its NaN at 0.
    return -ops.sum(p * ops.log(ops.maximum(p, np.finfo("float32").tiny)), axis=-1)


def _probability_tensor(outputs, from_logits):
    """[..., K], K at least 2."""
    from_logits = from_logits and not _are_probabilities(outputs)
    outputs = ops.convert_to_tensor(outputs)
    if keras.backend.standardize_dtype(outputs.dtype) != "float64":
        outputs = ops.cast(outputs, "float32")
    if len(outputs.shape) > 1 and outputs.shape[-1] > 1:
        return ops.softmax(outputs, axis=-1) if from_logits else outputs
    p = ops.sigmoid(outputs) if from_logits else outputs
    p = ops.expand_dims(p, axis=-1) if len(p.shape) == 1 else p
    return ops.concatenate([1.0 - p, p], axis=-1)


def _tensors(y, outputs, from_logits):
    """Probabilities and one-hot targets, both [..., K]."""
    p, y = _probability_tensor(outputs, from_logits), ops.convert_to_tensor(y)
    shape, received = tuple(p.shape), tuple(y.shape)
    if received[1:] == shape[1:]:
        return p, ops.cast(y, p.dtype)
    if received[1:] not in (shape[1:-1], (*shape[1:-1], 1)):
        raise ValueError(
            f"`y_true` should hold classes in the shape {shape[:-1]}, or one-hot in {shape}. "
            f"Received: y_true of shape {received}"
        )
    y = ops.squeeze(y, axis=-1) if len(received) == len(shape) else y
    return p, ops.one_hot(ops.cast(y, "int32"), shape[-1], dtype=p.dtype)


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
