"""Checks that what is compiled and fed means the posterior that the sampler's arguments say."""

import math
import warnings

import keras
import numpy as np
from keras import ops, tree

_SQUARED = {"mse", "mean_squared_error"}
_AVERAGED_OVER_LAST_AXIS = _SQUARED | {
    "mae",
    "mean_absolute_error",
    "bce",
    "binary_crossentropy",
}
_CATEGORICAL = {"categorical_crossentropy", "sparse_categorical_crossentropy"}


def check_loss(model):
    """Refuse or warn about compiled losses that are not the mean of a negative log-likelihood.

    Raises:
        ValueError: If a loss is a sum over rows, or averages a row's own log-likelihood over time
            steps or labels without a loss weight that multiplies it back.
    """
    losses, weights, shapes = _flat(model)
    for loss, weight, shape in zip(losses, weights, shapes, strict=True):
        if loss is not None:
            _check_reduction(loss)
            _check_scale(loss, weight, shape)
            _check_function(loss, shape)


def _flat(model):
    """Loss, loss weight and output shape of each output, None where unknown."""
    config = {"loss": model.loss, "weights": getattr(model, "loss_weights", None)}
    compiled = getattr(model, "_compile_loss", None)
    if compiled is not None:
        config["weights"] = compiled._user_loss_weights
    names = list(getattr(model, "output_names", None) or [])

    def in_order(value):
        if isinstance(value, dict):
            return [value.get(name) for name in names] if names else list(value.values())
        return list(value) if isinstance(value, list | tuple) else [value]

    losses = in_order(config["loss"])
    weights = in_order(config["weights"])
    weights += [None] * (len(losses) - len(weights))
    try:
        shapes = tree.flatten_up_to(
            model.output, tree.map_structure(lambda t: tuple(t.shape), model.output)
        )
    except (AttributeError, ValueError):
        # A subclassed model does not know its outputs.
        shapes = []
    if len(shapes) != len(losses):
        shapes = [None] * len(losses)
    return losses, weights[: len(losses)], shapes


def loss_name(loss):
    """Keras' snake-case name of a loss given as string, function or object."""
    if isinstance(loss, str):
        return keras.losses.get(loss).__name__
    if isinstance(loss, keras.losses.Loss):
        function = getattr(loss, "fn", None)
        return getattr(function, "__name__", type(loss).__name__)
    return getattr(loss, "__name__", type(loss).__name__)


def _check_reduction(loss):
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction not in ("sum_over_batch_size", "mean"):
        raise ValueError(
            f"The samplers need the mean of the loss over the rows of a batch, but the compiled "
            f"loss {loss_name(loss)} has reduction={reduction!r}, which scales the likelihood "
            "(a sum by the batch size, a weighted mean by the weights). Use "
            "reduction='sum_over_batch_size'."
        )


def _check_scale(loss, weight, shape):
    name = loss_name(loss)
    weight = 1.0 if weight is None else float(weight)
    inner = None if shape is None else shape[1:]
    if inner is not None and name in _CATEGORICAL:
        inner = inner[:-1]
    elif name not in _AVERAGED_OVER_LAST_AXIS:
        inner = ()
    unknown = inner is None or None in inner
    averaged = None if unknown else math.prod(inner)
    if name in _SQUARED:
        variance = "d / 2 for d outputs" if unknown else f"{averaged / (2 * weight):g}"
        warnings.warn(
            f"The loss {name!r} has no factor 1/2 and averages over outputs: it means Gaussian "
            f"noise of variance {variance}. Use "
            "`keras_sgmcmc.GaussianNegativeLogLikelihood(noise_std)` to say the noise you mean.",
            stacklevel=4,
        )
    elif inner is not None and (unknown or not math.isclose(weight, averaged)) and inner != ():
        remedy = "sum over them with `keras_sgmcmc.NegativeLogLikelihood`"
        if not unknown:
            remedy = f"multiply back with `loss_weights=[{averaged}]`, or {remedy}"
        if unknown or averaged != 1:
            raise ValueError(
                f"The loss {name!r} averages the log-likelihood of a row over {inner} time steps "
                f"or labels, which tempers the likelihood: {remedy}. "
                f"Received: output shape {shape}, loss weight {weight:g}"
            )
    elif weight != 1.0 and (averaged is None or not math.isclose(weight, averaged)):
        warnings.warn(
            f"The loss weight {weight:g} of {name!r} raises the likelihood to that power: the "
            "draws are not from the posterior of the model unless you mean it.",
            stacklevel=4,
        )


def _check_function(loss, shape):
    """A function that reduces over rows by itself must take their mean."""
    if isinstance(loss, str | keras.losses.Loss) or shape is None:
        return
    name = loss_name(loss)
    shape = [dimension or 2 for dimension in shape[1:]]
    values = np.linspace(0.1, 0.9, 2 * math.prod(shape)).reshape([2, *shape])
    once = ops.convert_to_tensor(values, dtype=keras.config.floatx())
    twice = ops.concatenate([once, once])
    try:
        single, double = loss(once, once * 0.9), loss(twice, twice * 0.9)
    except Exception as error:
        warnings.warn(
            f"The loss function {name} could not be tried on numbers ({error}). It has to return "
            "the negative log-likelihood of each row, or its mean over rows, never the sum.",
            stacklevel=4,
        )
        return
    if len(single.shape) > 0:
        return
    if math.isclose(float(double), 2 * float(single), rel_tol=1e-4) and float(single) != 0:
        raise ValueError(
            f"The loss function {name} returns a sum over the rows of the batch (doubling the "
            "batch doubles it), which multiplies the likelihood by the batch size. Return the "
            "loss of each row, or their mean."
        )


class RowCount:
    """Compares `train_size` with the rows that the first epoch feeds.

    Keras' own loss tracker counts rows. The data are looked at once, at the first batch, to know
    those of `keras_sgmcmc.minibatches`, which say their size themselves.
    """

    def __init__(self, model):
        self._model = model
        self._minibatches = None
        self._first = self._rows = None
        inner = model.train_function

        def train_function(iterator):
            model.train_function = inner
            self._minibatches = getattr(iterator, "minibatches", None)
            return inner(iterator)

        model.train_function = train_function

    def _counted(self):
        tracker = next((metric for metric in self._model.metrics if metric.name == "loss"), None)
        count = getattr(tracker, "count", None)
        return None if count is None else round(float(ops.convert_to_numpy(count)))

    def batch_ended(self, batch, steps):
        if self._first is None:
            executed = self._model.steps_per_execution
            if steps is not None:
                executed = min(executed, steps)
            self._first = (self._counted(), executed)
        if steps is not None and batch + 1 >= steps:
            self._rows = (self._counted(), steps)

    def check(self, train_size):
        """Warn, when the first epoch has ended, if it and `train_size` disagree."""
        if train_size is None:
            return
        if self._minibatches is not None:
            if self._minibatches.train_size != train_size:
                warnings.warn(
                    f"`train_size={train_size}` of the optimizer is not the "
                    f"{self._minibatches.train_size} rows of `minibatches`: the posterior is that "
                    "of a data set of another size. Pass `train_size=data.train_size`.",
                    stacklevel=4,
                )
            return
        if self._rows is None or self._rows[0] is None:
            return
        rows, steps = self._rows
        if abs(rows - train_size) > 0.05 * train_size:
            warnings.warn(
                f"The first epoch fed {rows} rows, but the optimizer has train_size={train_size}. "
                "It is the number of rows trained on: without the validation split, without "
                "repeats and augmented copies. If an epoch is one pass over the data, pass "
                f"`train_size={rows}`.",
                stacklevel=4,
            )
        first, executed = self._first
        if first * steps != rows * executed:
            warnings.warn(
                f"The batches of an epoch are uneven ({first / executed:g} rows at first, {rows} "
                f"in {steps} batches): the rows of a short batch count more. Drop the remainder, "
                "choose a batch size that divides the number of rows, or draw batches with "
                "`keras_sgmcmc.minibatches`.",
                stacklevel=4,
            )
