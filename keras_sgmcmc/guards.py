"""Checks that what is compiled and fed means the posterior that the sampler's arguments say."""

import math
import warnings

import keras
import numpy as np
import tensorflow as tf
from keras import ops, tree

from keras_sgmcmc import likelihoods
from keras_sgmcmc.data import Minibatches
from keras_sgmcmc.optimizers.base import Sampler


def check_loss(model):
    """Refuse or warn about compiled losses that are not the mean of a negative log-likelihood.

    The outputs of a subclassed model have no known shape, so less can be said of them. A loss that
    the model computes by itself, in `compute_loss` or `train_step`, isn't seen.

    Raises:
        ValueError: If a loss is a sum over rows, or averages a row's own log-likelihood over time
            steps or labels without a loss weight that multiplies it back.
    """
    for loss, weight, shape in _compiled_losses(model):
        if loss is None:
            continue
        if isinstance(loss, str) and loss.lower() in ("crossentropy", "ce"):
            # Keras goes by the shapes of the targets, for the last axis alone.
            loss = "binary_crossentropy" if shape and shape[-1] == 1 else "categorical_crossentropy"
        loss = keras.losses.get(loss)
        _check_reduction(loss)
        _check_scale(loss, 1.0 if weight is None else float(weight), shape)


def _compiled_losses(model):
    """Loss, loss weight and shape (None where not known) of every output of `model`."""
    # `get_compile_config` would serialize the losses, which not all of them bear.
    compiled = getattr(model, "_compile_config", None)
    config = compiled.config if compiled else {}
    given, weights = config.get("loss"), config.get("loss_weights")
    if given is None:
        return []
    outputs = _outputs(model)
    if outputs is None:
        losses, weights = tree.flatten(given), tree.flatten(weights)
        shapes = [None] * len(losses)
        if len(weights) != len(losses):
            weights = [None] * len(losses)
    else:
        names = getattr(model, "output_names", None)
        losses = likelihoods.align(given, outputs, names)
        weights = likelihoods.align(weights, outputs, names)
        shapes = [tuple(output.shape) for output in tree.flatten(outputs)]
    return [
        (part, weight, shape)
        for loss, weight, shape in zip(losses, weights, shapes, strict=True)
        # Several losses of one output add up.
        for part in (loss if isinstance(loss, list | tuple) else [loss])
    ]


def _outputs(model):
    """The symbolic outputs in their structure; None for a subclassed model, which has none."""
    try:
        return model.outputs[0] if isinstance(model, keras.Sequential) else model.output
    except (AttributeError, IndexError, ValueError):
        return None


def _name(loss):
    return getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__)


def _check_reduction(loss):
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction not in ("sum_over_batch_size", "mean"):
        raise ValueError(
            "The samplers need the mean of the loss over the rows of a batch, but the compiled "
            f"loss `{_name(loss)}` has reduction={reduction!r}, which scales the likelihood "
            "(a sum by the batch size, a weighted mean by the weights). Use "
            "reduction='sum_over_batch_size'."
        )


def _check_scale(loss, weight, shape):
    """Compare the loss weight with the number of terms that the loss averages in a row."""
    name = _name(loss)
    try:
        density = likelihoods.likelihood(loss, shape[-1] if shape else None)
    except ValueError:
        density = None
    gaussian = isinstance(density, likelihoods.MeanSquaredError)
    if gaussian or isinstance(density, likelihoods.MeanAbsoluteError):
        known = shape is not None and None not in shape[1:]
        count = math.prod(shape[1:]) if known else None
        if gaussian:
            noise = "Gaussian noise of variance "
            noise += f"{count / (2 * weight):g}" if known else "d / 2 for d outputs"
            remedy = "`keras_sgmcmc.GaussianNegativeLogLikelihood(noise_std)`"
        else:
            noise = "Laplace noise of scale "
            noise += f"{count / weight:g}" if known else "d for d outputs"
            remedy = "`keras_sgmcmc.NegativeLogLikelihood`"
        warnings.warn(
            f"As a negative log-likelihood the loss `{name}` has no parameter for the noise and "
            f"averages over outputs: it means {noise}. Use {remedy} to say the noise you mean.",
            stacklevel=2,
        )
        return
    if isinstance(density, likelihoods.FromLoss):
        inner = ()
    elif isinstance(density, likelihoods.Categorical):
        inner = shape and shape[1:-1]
    elif isinstance(density, likelihoods.Bernoulli):
        inner = shape and shape[1:]
    else:
        inner = _try_rows(loss, shape)
    if inner is None:
        return
    if None in inner or math.prod(inner) not in (1, weight):
        remedy = "use `keras_sgmcmc.NegativeLogLikelihood`, which sums over them"
        if None not in inner:
            remedy = f"multiply back with `loss_weights=[{math.prod(inner)}]`, or {remedy}"
        raise ValueError(
            f"The loss `{name}` averages the log-likelihood of a row over {inner} time steps "
            f"or labels, which tempers the likelihood: {remedy}. "
            f"Received: output shape {shape}, loss weight {weight:g}"
        )
    if math.prod(inner) == 1 and weight != 1:
        warnings.warn(
            f"The loss weight {weight:g} of `{name}` raises the likelihood to that power: the "
            "draws are not from the posterior of the model unless you mean it.",
            stacklevel=2,
        )


def _try_rows(loss, shape):
    """Try a loss that isn't known on made-up numbers.

    Returns:
        Shape of the values of a row, over which Keras takes a mean; None if that can't be told.
    """
    function = loss.call if isinstance(loss, keras.losses.Loss) else loss
    inner = [2 if size is None else size for size in (shape or (None, 3))[1:]]
    outputs = np.linspace(0.1, 0.9, 2 * math.prod(inner)).reshape([2, *inner])

    def value(targets, batches):
        arrays = (np.concatenate([array] * batches) for array in (targets, outputs))
        return function(*(ops.cast(array, keras.config.floatx()) for array in arrays))

    # The targets may be of the outputs' shape, or class labels with or without an axis.
    for targets in (0.9 * outputs, np.zeros([2, *inner[:-1], 1]), np.zeros([2, *inner[:-1]])):
        try:
            once, twice = value(targets, 1), value(targets, 2)
            break
        except Exception:
            continue
    else:
        return None
    if len(once.shape) == 0:
        once, twice = float(once), float(twice)
        if once != 0 and math.isclose(twice, 2 * once, rel_tol=1e-4):
            raise ValueError(
                f"The loss `{_name(loss)}` returns a sum over the rows of the batch (doubling the "
                "batch doubles it), which multiplies the likelihood by the batch size. Return the "
                "loss of each row, or their mean."
            )
        return None
    if shape is None:
        return None
    inner = tuple(once.shape[1:])
    return (None,) if inner and None in shape[1:] else inner


def fit_guard(model, optimizer):
    """A `FitGuard` for the fit that begins; None if it needs none or another callback has it."""
    if not isinstance(optimizer, Sampler):
        return None
    present = getattr(model.train_function, "guard", None)
    if present is not None and present.history is getattr(model, "history", None):
        return None
    return FitGuard(model, optimizer)


class FitGuard:
    """Compares `train_size` with the rows that the first epoch of one `fit` feeds.

    Keras' own loss tracker counts rows. The iterator over the data is looked at once, when it
    passes at the first batch: a wrapper around `model.train_function` steps aside then.
    """

    def __init__(self, model, optimizer):
        self._model, self._optimizer = model, optimizer
        # Unique to the fit, whichever of its callbacks asks.
        self.history = getattr(model, "history", None)
        self._source = self._length = self._first = self._rows = None
        inner = model.train_function
        if inner is None:  # a loop of the user's own
            return

        def train_function(iterator):
            model.train_function = inner
            self._look_at(getattr(iterator, "_dataset", None))
            return inner(iterator)

        train_function.guard = self
        model.train_function = train_function

    def _look_at(self, dataset):
        if dataset is None:
            return
        self._length = int(dataset.cardinality())
        upstream = [dataset]
        while upstream:
            dataset = upstream.pop()
            if isinstance(dataset, Minibatches):
                self._source = dataset.train_size
                return
            upstream.extend(dataset._inputs())

    def batch_ended(self, batch, steps):
        """Count the rows of the first block of batches, and of the epoch when it ends."""
        if self._first is None:
            block = self._model.steps_per_execution
            self._first = self._rows_so_far() / min(block, steps or block)
        if steps is not None and batch + 1 >= steps:
            self._rows, self._steps = self._rows_so_far(), steps

    def epoch_ended(self):
        """Warn if `train_size` is not the number of rows, or if batches are uneven."""
        train_size = self._optimizer.train_size
        if train_size is None:
            return
        if self._source is not None:
            if self._source != train_size:
                warnings.warn(
                    f"`train_size={train_size}` of the optimizer is not the {self._source} rows of "
                    "`minibatches`: the posterior is that of a data set of another size. Pass "
                    "`train_size=data.train_size`.",
                    stacklevel=2,
                )
            return
        if not self._rows or self._counts_batches():
            return
        # Where `steps_per_epoch` cuts epochs, they say nothing about the number of rows. (The
        # datasets that Keras makes of arrays don't know their length.)
        whole = self._length in (self._steps, tf.data.UNKNOWN_CARDINALITY)
        if whole and abs(self._rows - train_size) > 0.05 * train_size:
            warnings.warn(
                f"An epoch feeds {self._rows:.0f} rows, but the optimizer has "
                f"train_size={train_size}. It is the number of rows trained on: without the "
                "validation split, without repeats and augmented copies. If an epoch is one pass "
                f"over the data, pass `train_size={self._rows:.0f}`.",
                stacklevel=2,
            )
        # Half a row, and what float32 can't count.
        if abs(self._first * self._steps - self._rows) > 0.5 + 1e-6 * self._rows:
            warnings.warn(
                f"The batches of an epoch are uneven ({self._first:g} rows at first, "
                f"{self._rows:.0f} in {self._steps} batches): the rows of a short batch count "
                "more. Drop the remainder, choose a batch size that divides the number of rows, or "
                "draw batches with `keras_sgmcmc.minibatches`.",
                stacklevel=2,
            )

    def _rows_so_far(self):
        for metric in self._model.metrics:
            if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
                return float(ops.convert_to_numpy(ops.convert_to_tensor(metric.count)))
        return 0.0

    def _counts_batches(self):
        # As the loss tracker of a model's own train_step does that updates it without weights.
        own = type(self._model).train_step is not keras.Model.train_step
        return own and self._rows == self._steps
