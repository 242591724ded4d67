"""Checks that what is compiled and fed means the posterior that the sampler's arguments say."""

import math
import warnings

import keras
import numpy as np
import tensorflow as tf
from keras import ops, tree

from keras_sgmcmc import likelihoods


def check_loss(model, targets=None):
    """Refuse or warn about compiled losses that are not the mean of a negative log-likelihood.

    The outputs of a subclassed model have no known shape, so less can be said of them. A loss that
    the model computes by itself, in `compute_loss` or `train_step`, isn't seen.

    Args:
        model: A compiled model.
        targets: What the model is fitted to, as a structure of `tf.TensorSpec`. Defaults to None:
            losses that aren't known are then tried less.

    Raises:
        ValueError: If a loss is a sum over rows, or averages a row's own log-likelihood over time
            steps or labels without a loss weight that multiplies it back.
    """
    for losses, weight, shape, target in _compiled_losses(model, targets):
        # Several losses of one output add up.
        for loss in losses if isinstance(losses, list | tuple) else [losses]:
            if loss is None or weight == 0:
                continue
            if isinstance(loss, str) and loss.lower() in ("crossentropy", "ce"):
                # Keras goes by the shapes of the targets, for the last axis alone.
                kind = "binary" if shape and shape[-1] == 1 else "categorical"
                loss = f"{kind}_crossentropy"
            loss = keras.losses.get(loss)
            _check_reduction(loss)
            _check_scale(loss, 1.0 if weight is None else float(weight), shape, target)


def _compiled_losses(model, targets):
    """Loss, loss weight, shape and target of every output of `model`, None where not known."""
    # `get_compile_config` would serialize the losses, which not all of them bear.
    compiled = getattr(model, "_compile_config", None)
    config = compiled.config if compiled else {}
    losses, weights = config.get("loss"), config.get("loss_weights")
    if losses is None:
        return []
    if hasattr(model, "stacked_chains"):
        model = model.template
    outputs = _outputs(model)
    names = getattr(model, "output_names", None)
    try:
        columns = [likelihoods.align(c, outputs, names) for c in (losses, weights, targets)]
        columns.insert(2, [tuple(output.shape) for output in tree.flatten(outputs)])
    except (AttributeError, ValueError):
        flat = tree.flatten(losses)
        unknown = [None] * len(flat)
        columns = [flat, tree.flatten(weights), unknown, tree.flatten(targets)]
        columns = [c if len(c) == len(flat) else unknown for c in columns]
    return list(zip(*columns, strict=True))


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


def _check_scale(loss, weight, shape, target):
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
        inner = _try_loss(loss, shape, target)
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


def _try_loss(loss, shape, target):
    """Try a loss that isn't known on made-up numbers.

    Returns:
        Shape of the values of a row, over which Keras takes a mean; None if that can't be told.
    """
    known = shape is not None and hasattr(target, "shape")
    output_row = _row_shape((None, 3) if shape is None else shape)
    outputs = np.linspace(0.1, 0.9, 2 * math.prod(output_row)).reshape([2, *output_row])
    if known:
        row = _row_shape(target.shape)
        # For functions Keras makes up for a last axis of length 1.
        same = [*row, 1] == output_row or row == [*output_row, 1]
        candidates = [output_row if same and not isinstance(loss, keras.losses.Loss) else row]
    else:
        # Like the outputs, or class labels with or without an axis.
        candidates = [output_row, [*output_row[:-1], 1], output_row[:-1]]
    function = loss.call if isinstance(loss, keras.losses.Loss) else loss

    def value(row, batches):
        targets = 0.9 * outputs if row == output_row else np.zeros([2, *row])
        arrays = (np.concatenate([array] * batches) for array in (targets, outputs))
        return function(*(ops.cast(array, keras.config.floatx()) for array in arrays))

    for row in candidates:
        try:
            once, twice = value(row, 1), value(row, 2)
            break
        except Exception:  # whatever the user's function raises on numbers it isn't meant for
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
    if not known:
        return None
    inner = tuple(once.shape[1:])
    return (None,) if inner and None in shape[1:] else inner


def _row_shape(shape):
    return [2 if size is None else size for size in tuple(shape)[1:]]


def check_data(optimizer, minibatches, batch_size):
    """Warn where the data that a fit begins with are not what a sampler's arguments say.

    Args:
        optimizer: A sampler.
        minibatches: The `Minibatches` that the data come from; None for other data.
        batch_size: Rows that a step gets from them; None if not known.
    """
    name = type(optimizer).__name__
    if minibatches is None:
        if optimizer.uses_batch_noise:
            warnings.warn(
                f"`{name}` turns the noise of the batches into posterior noise, which needs "
                "batches that are drawn independently. These are not from "
                "`keras_sgmcmc.minibatches`: where rows are reshuffled, as `fit(x, y)` does, the "
                "noise cancels over an epoch and the variance comes out wrong (0.41 to 0.49 "
                "measured, where 1 is right). Fit "
                "`keras_sgmcmc.minibatches(x, y, batch_size)`.",
                stacklevel=2,
            )
        return
    train_size = optimizer.train_size
    if train_size is not None and train_size != minibatches.train_size:
        warnings.warn(
            f"`train_size={train_size}` of the optimizer is not the {minibatches.train_size} rows "
            "of `minibatches`: the posterior is that of a data set of another size. Pass "
            "`train_size=data.train_size`.",
            stacklevel=2,
        )
    expected = getattr(optimizer, "batch_size", None)
    if expected is None or batch_size is None:
        return
    accumulated = optimizer.gradient_accumulation_steps or 1
    rows = batch_size * accumulated
    if expected != rows:
        times = f", in {accumulated} batches of {batch_size}" if accumulated > 1 else ""
        warnings.warn(
            f"`batch_size={expected}` of the optimizer is not the {rows} rows that `minibatches` "
            f"bring to an update{times}: `{name}` reckons with the noise of batches of another "
            f"size. Pass `batch_size={rows}`.",
            stacklevel=2,
        )


class FitGuard:
    """The checks of one `fit`: of the compiled loss, and of the rows that its first epoch feeds.

    Rows are counted by Keras' own loss tracker.
    """

    def __init__(self, model, optimizer):
        self._model, self._optimizer = model, optimizer
        self._loss_checked = self._independent = False
        self._targets = self._length = self._first = self._rows = None

    def first_batch(self, iterator, minibatches):
        """Check the loss before the first update, if the model is built, and look at the data."""
        spec = getattr(iterator, "element_spec", None)
        if isinstance(spec, tuple):
            _, self._targets, _ = keras.utils.unpack_x_y_sample_weight(spec)
        dataset = getattr(iterator, "_dataset", None)
        if dataset is not None:
            self._length = int(dataset.cardinality())
        self._independent = minibatches is not None
        if self._model.built:
            self._check_loss()

    def _check_loss(self):
        self._loss_checked = True
        check_loss(self._model, self._targets)

    def batch_ended(self, batch, steps):
        """Count the rows of the first block of batches, and of the epoch when it ends."""
        if self._first is None:
            if not self._loss_checked:
                self._check_loss()
            block = self._model.steps_per_execution
            self._first = self._rows_so_far() / min(block, steps or block)
        if steps is not None and batch + 1 >= steps:
            self._rows, self._steps = self._rows_so_far(), steps

    def epoch_ended(self):
        """Warn if `train_size` is not the number of rows, or if batches are uneven."""
        train_size = self._optimizer.train_size
        if train_size is None or self._independent or not self._rows or self._counts_batches():
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
