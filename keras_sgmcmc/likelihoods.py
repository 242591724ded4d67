"""From a compiled loss to the density p(y | x, theta) whose negative logarithm it is.

A posterior predictive needs more than the loss's value: the mean of y given the network's outputs
(a probability, where the outputs are logits), its variance, and the normalised log density. Losses
that are no density of y keep their mean and refuse the rest.

| loss | density of y given the outputs f, d of them a row |
|---|---|
| sparse or one-hot categorical crossentropy | categorical, p = f or softmax(f) |
| binary crossentropy | independent Bernoullis, p = f or sigmoid(f) |
| mean squared error, 1/d sum (y - f)^2 | N(f, sigma^2), sigma^2 = d/2: it has no factor 1/2 |
| mean absolute error, 1/d sum abs(y - f) | Laplace of scale d, variance 2 d^2 |
| a loss with `log_prob`, `predictive_mean` and `predictive_variance` | its own |

d counts all axes but the first, because Keras averages over all of them. A crossentropy over
several positions (time steps, pixels, labels) is averaged as well, which tempers the posterior by
their number; the density here is the untempered one, the sum over positions.
"""

import inspect
import math

import keras
import numpy as np
from keras import ops, tree

from keras_sgmcmc.losses import _match_shape

_REMEDY = (
    "Compile with keras_sgmcmc.NegativeLogLikelihood(make_distribution), or with "
    "keras_sgmcmc.GaussianNegativeLogLikelihood(noise_std) for regression."
)


class Likelihood:
    """The density p(y | outputs) behind a loss.

    `outputs` is the network's output for a batch, a floating tensor of shape (batch, ...).
    """

    def log_prob(self, y, outputs):
        """Normalised log density of each row, summed over all its outputs: shape (batch,)."""
        raise NotImplementedError

    def mean(self, outputs):
        """Mean of y given the outputs; class probabilities in classification."""
        return outputs

    def variance(self, outputs):
        """Variance of y given the outputs (of the class indicators, p (1 - p)), like `mean`."""
        raise NotImplementedError

    def outputs(self, mean):
        """Outputs whose mean is the NumPy array `mean`: the inverse of `mean`."""
        return mean


class _Probabilities(Likelihood):
    def __init__(self, from_logits):
        self.from_logits = from_logits

    def variance(self, outputs):
        p = self.mean(outputs)
        return p * (1.0 - p)


class Categorical(_Probabilities):
    """Classes along the last axis. y: integers without that axis, or one-hot with it."""

    # The crossentropies of keras.ops find the logits behind a softmax layer, as in training, so
    # that a probability that underflows still has a logarithm.
    def log_prob(self, y, outputs):
        if len(y.shape) < len(outputs.shape) or y.shape[-1] == 1 < outputs.shape[-1]:
            loss = ops.sparse_categorical_crossentropy(y, outputs, self.from_logits)
        else:
            y = ops.cast(y, outputs.dtype)
            loss = ops.categorical_crossentropy(y, outputs, self.from_logits)
        return -_sum_over_outputs(loss)

    def mean(self, outputs):
        if self.from_logits and not _are_probabilities(outputs):
            return ops.softmax(outputs, axis=-1)
        return outputs

    def outputs(self, mean):
        return np.log(np.maximum(mean, np.finfo(mean.dtype).tiny)) if self.from_logits else mean


class Bernoulli(_Probabilities):
    """Independent binary outputs. y: 0 or 1, in the shape of the outputs."""

    def log_prob(self, y, outputs):
        y = _match(y, outputs)
        return -_sum_over_outputs(ops.binary_crossentropy(y, outputs, self.from_logits))

    def mean(self, outputs):
        if self.from_logits and not _are_probabilities(outputs):
            return ops.sigmoid(outputs)
        return outputs

    def outputs(self, mean):
        if not self.from_logits:
            return mean
        info = np.finfo(mean.dtype)
        p = np.clip(mean, info.tiny, 1.0 - info.epsneg)
        return np.log(p) - np.log1p(-p)


class MeanSquaredError(Likelihood):
    """N(f, d/2) for each of the d outputs of a row."""

    def log_prob(self, y, outputs):
        d = _outputs_per_row(outputs)
        square = ops.square(_match(y, outputs) - outputs)
        return -_sum_over_outputs(square / d + 0.5 * ops.log(math.pi * d))

    def variance(self, outputs):
        return 0.5 * _outputs_per_row(outputs) * ops.ones_like(outputs)


class MeanAbsoluteError(Likelihood):
    """Laplace of mean f and scale d for each of the d outputs of a row."""

    def log_prob(self, y, outputs):
        d = _outputs_per_row(outputs)
        distance = ops.abs(_match(y, outputs) - outputs)
        return -_sum_over_outputs(distance / d + ops.log(2.0 * d))

    def variance(self, outputs):
        return 2.0 * ops.square(_outputs_per_row(outputs)) * ops.ones_like(outputs)


class FromLoss(Likelihood):
    """The density of a loss that states it by its own methods, such as this library's losses."""

    def __init__(self, loss):
        self.loss = loss

    def log_prob(self, y, outputs):
        return self.loss.log_prob(y, outputs)

    def mean(self, outputs):
        try:
            return self.loss.predictive_mean(outputs)
        except NotImplementedError as error:
            raise ValueError(
                f"The distribution of the loss `{self.loss.name}` has no mean to be averaged over "
                "draws. For classes use OneHotCategorical, whose mean is the vector of class "
                "probabilities, or keras.losses.SparseCategoricalCrossentropy(from_logits=True)."
            ) from error

    def variance(self, outputs):
        return self.loss.predictive_variance(outputs)

    def outputs(self, mean):
        # Only where the loss reads the mean back as itself, as a Gaussian around the outputs does.
        try:
            again = ops.convert_to_numpy(self.loss.predictive_mean(ops.convert_to_tensor(mean)))
        except Exception:  # make_distribution is the user's; any failure means "not an output"
            again = np.empty(0)
        if again.shape != mean.shape or not np.allclose(again, mean, rtol=1e-5, atol=1e-6):
            raise ValueError(
                f"The loss `{self.loss.name}` reads parameters of a distribution from the "
                "network's outputs, so an averaged prediction cannot be given to it. Use "
                "log_predictive_density(x, y) and predict(x) instead of evaluate."
            )
        return mean


class Unknown(Likelihood):
    """Outputs whose loss is no known density: a mean, if it's known whether they are logits.

    Args:
        reason: Why there is no density, the start of a sentence of the error.
        from_logits: Whether the outputs are logits; None if that is not known.
        binary: Whether logits belong to independent binary outputs, whatever their number.
    """

    def __init__(self, reason, from_logits, binary=False):
        self.reason = reason
        self.from_logits = from_logits
        self.binary = binary

    def log_prob(self, y, outputs):
        raise ValueError(f"{self.reason}, so the density of y is not known. {_REMEDY}")

    def variance(self, outputs):
        raise ValueError(f"{self.reason}, so the variance of y is not known. {_REMEDY}")

    def mean(self, outputs):
        if _are_probabilities(outputs) or self.from_logits is False:
            return outputs
        if self.from_logits is None:
            raise ValueError(
                f"{self.reason}, so it is not known whether the outputs are logits, and averaging "
                "logits is not averaging probabilities. Pass from_logits=True (softmax; sigmoid "
                "for one output) or from_logits=False (probabilities or regression)."
            )
        if self.binary or outputs.shape[-1] == 1:
            return ops.sigmoid(outputs)
        return ops.softmax(outputs, axis=-1)


class Untrained(Unknown):
    """An output of a compiled model that was given no loss: it adds nothing to the density."""

    def __init__(self):
        super().__init__("An output has no loss", from_logits=False)

    def log_prob(self, y, outputs):
        return ops.zeros(ops.shape(outputs)[:1], dtype=outputs.dtype)


_OF_KERAS_LOSS = {
    keras.losses.SparseCategoricalCrossentropy: Categorical,
    keras.losses.CategoricalCrossentropy: Categorical,
    keras.losses.BinaryCrossentropy: Bernoulli,
    keras.losses.MeanSquaredError: MeanSquaredError,
    keras.losses.MeanAbsoluteError: MeanAbsoluteError,
    keras.losses.sparse_categorical_crossentropy: Categorical,
    keras.losses.categorical_crossentropy: Categorical,
    keras.losses.binary_crossentropy: Bernoulli,
    keras.losses.mean_squared_error: MeanSquaredError,
    keras.losses.mean_absolute_error: MeanAbsoluteError,
}


def likelihood(loss, last_axis):
    """The `Likelihood` of one loss (string, function or object) of outputs (..., last_axis)."""
    if loss is None:
        return Untrained()
    if tree.is_nested(loss):
        return Unknown("One output has several losses", from_logits=None)
    if isinstance(loss, str) and loss.lower() in ("crossentropy", "ce"):
        loss = "binary_crossentropy" if last_axis == 1 else "categorical_crossentropy"
    loss = keras.losses.get(loss)
    if hasattr(loss, "log_prob") and hasattr(loss, "predictive_mean"):
        return FromLoss(loss)
    kind = loss if inspect.isfunction(loss) else type(loss)
    name = getattr(kind, "__name__", str(kind))
    if getattr(loss, "axis", None) not in (None, -1):
        raise ValueError(f"The classes should be the last axis. Received: {name}(axis={loss.axis})")
    # Keras' own losses say by their attribute that they read logits; another's may not.
    is_keras = kind.__module__.partition(".")[0] == "keras"
    from_logits = getattr(loss, "from_logits", False if is_keras else None)
    reason = f"The loss `{name}` is not the negative logarithm of a density that is known here"
    cls = _OF_KERAS_LOSS.get(kind)
    for option, neutral in (("label_smoothing", 0), ("ignore_class", None)):
        value = getattr(loss, option, neutral)
        if value != neutral:
            reason = f"The loss `{name}` with {option}={value} is no density of y"
            cls = None
    if cls is None:
        return Unknown(reason, from_logits, binary=name.lower().startswith("binary"))
    return cls(from_logits) if issubclass(cls, _Probabilities) else cls()


def compiled_likelihoods(model, outputs, from_logits=None):
    """The `Likelihood` of every output of `model`, from the loss it was compiled with.

    Args:
        model: Keras model, compiled or not.
        outputs: Its outputs: a tensor, array or spec, or a list, tuple or dict of them.
        from_logits: Overrides what the losses say about outputs that may be logits; outputs that
            cannot be (those of a regression loss) keep their meaning. Defaults to None.

    Returns:
        List, one entry for each output in the order of `keras.tree.flatten(outputs)`.

    Raises:
        ValueError: If losses and outputs do not match, or `from_logits=True` fits no output.
    """
    compiled = getattr(model, "_compile_config", None)
    loss = compiled.config["loss"] if compiled else None
    flat = tree.flatten(outputs)
    if loss is None:
        found = [Unknown("The model is not compiled with a loss", from_logits=None) for _ in flat]
    else:
        losses = align(loss, outputs, getattr(model, "output_names", None))
        found = [likelihood(a, b.shape[-1]) for a, b in zip(losses, flat, strict=True)]
    if from_logits is not None:
        free = [a for a in found if hasattr(a, "from_logits") and not isinstance(a, Untrained)]
        if from_logits and not free:
            raise ValueError(
                "Outputs trained with a regression loss or a loss of their own distribution are "
                f"no logits. Received: from_logits=True, loss={loss!r}"
            )
        for a in free:
            a.from_logits = bool(from_logits)
    return found


def align(given, outputs, names=None):
    """Losses or targets, given by position or by name, as one entry for each flat output."""
    if not tree.is_nested(outputs):
        while isinstance(given, (list, tuple, dict)) and len(given) == 1:
            given = next(iter(given.values())) if isinstance(given, dict) else given[0]
        return [given]
    if isinstance(outputs, dict):
        names = sorted(outputs)
        outputs = [outputs[name] for name in names]
    if isinstance(given, dict):
        unknown = set(given) - set(names or ())
        if unknown:
            raise ValueError(
                f"The outputs are named {list(names or ())}. Received: {sorted(map(str, given))}"
            )
        given = [given.get(name) for name in names]
    elif not isinstance(given, (list, tuple)):
        given = [given] * len(outputs)
    if len(given) != len(outputs):
        raise ValueError(
            f"The model has {len(outputs)} outputs, which need one entry each. "
            f"Received: {len(given)} entries"
        )
    return [entry for pair in zip(given, outputs, strict=True) for entry in align(*pair)]


def _match(y, outputs):
    return _match_shape(ops.cast(y, outputs.dtype), outputs.shape, "The outputs have shape")


def _are_probabilities(outputs):
    """Whether the tensor visibly comes out of a softmax or a sigmoid; Keras leaves this mark."""
    return hasattr(outputs, "_keras_logits")


def _outputs_per_row(outputs):
    return ops.cast(math.prod(ops.shape(outputs)[1:]), outputs.dtype)


def _sum_over_outputs(values):
    return ops.sum(values, axis=tuple(range(1, len(values.shape))))
