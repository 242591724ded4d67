"""The precision of the prior, and the noise of a Gaussian likelihood, learned while sampling."""

import math
import warnings

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from keras_sgmcmc import compilation
from keras_sgmcmc.callbacks.in_graph_callback import InGraphCallback
from keras_sgmcmc.callbacks.step_callback import StepCount, execution_block
from keras_sgmcmc.likelihoods import align
from keras_sgmcmc.losses import GaussianNegativeLogLikelihood
from keras_sgmcmc.noise_covariance import statistic
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.schedules import PowerDecay
from keras_sgmcmc.validation import positive_integer, real_number

_UPDATES = ("gradient", "closed_form")
# Of a precision that still moves: the change of its logarithm from quarter to quarter.
_STILL = 0.1


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class PriorPrecisionEM(InGraphCallback):
    """Variational EM for the precisions of a Gaussian prior, by the chain that samples the weights.

    The E-step is the sampler: theta is a draw from the posterior under the present precisions. For
    a group of D weights with precision lambda and a Gamma(shape, rate) prior on it, the M-step on
    one draw is

        lambda* = (shape - 1 + D/2) / (rate + |theta|^2 / 2),

    of which one of the following steps of size rho_k is taken, the k-th at
    `start + (k + 1) every` steps:

    | `update` | |
    |---|---|
    | `"gradient"` | log lambda <- log lambda + rho (1 + 2 (shape - 1)/D) (1 - lambda / lambda*) |
    | `"closed_form"` | 1/lambda <- (1 - rho) / lambda + rho / lambda* |

    The first is Mandt et al.'s (eq. 26) on log lambda, scaled by its Fisher information D/2 and at
    most 1 at a time; the second is the M-step over a running mean of |theta|^2, which forgets what
    was gathered under an old lambda. Both have the same fixed point: with shape 1 and rate 0, the
    maximum of the evidence p(y | lambda), if the sampler is exact. At temperature T the prior is
    N(0, T / lambda), and |theta|^2 stands for |theta|^2 / T.

    Groups are those of the optimizer's `GaussianPrior`; the precisions are its variables, which are
    saved with it. Weights that the sampler does not move by noise do not count: all of them in its
    warm-up, and those without gradient noise (dead inputs) under `ConstantSGD`.

    The steps have to sum to 50 or more for a precision that begins a factor of 1,000 too high,
    where the weights hardly tell, be small enough for the noise of |theta|^2 not to drive it off,
    and become small against the inverse of the chain's autocorrelation time, in updates. The
    default sums to 50 after 2,600 updates. A precision is kept within `bounds`, and within what the
    step of the optimizer bears; a warning says so. Without a hyperprior, groups of weights that the
    data do not need run to the upper bound.

    History and the progress bar show `prior_precision` (`prior_precision/group` if there are
    several) and `noise_std`; `history` has all updates.

    Args:
        update: `"gradient"` or `"closed_form"`. Defaults to `"gradient"`.
        start: Steps to discard first, counted by `optimizer.iterations`: the burn-in. Defaults to
            `1000`.
        every: Steps between two updates. Defaults to `10`.
        step_size: rho: a `LearningRateSchedule` of the number k of the update, or a number in
            (0, 1]. Defaults to None: `schedules.PowerDecay(1.9, 1000.0, 0.6)`, 0.03 at first.
        shape: Shape of the Gamma prior on every precision. Defaults to `1.0`.
        rate: Its rate, in units of the squared weight. Defaults to `0.0`: flat, with `shape=1`.
        bounds: Lowest and highest precision. Defaults to `(1e-6, 1e8)`.
        learn_noise_std: Whether to learn `noise_std` of the model's
            `GaussianNegativeLogLikelihood` too: by the same steps for 1/sigma^2, with the mean
            squared residual of the batch (before its step) for |theta|^2 / D, and a flat prior.
            Defaults to `False`.

    Attributes:
        history: dict of arrays with an entry for each update in this process: `"step"`, a group's
            name, `"noise_std"`.

    Raises:
        ValueError: If an argument is out of range; at the first batch, if the optimizer is not a
            sampler with a Gaussian prior, if `start` is within its warm-up, if a group is too small
            for `shape`, or if the loss has no `noise_std` to learn.

    Example:

    >>> optimizer = sg.SGLD(1e-3, train_size=len(x), prior=sg.GaussianPrior(groups="layer"))
    >>> em = sg.callbacks.PriorPrecisionEM(start=5_000)
    >>> model.fit(sg.minibatches(x, y, 100), epochs=100, callbacks=[em])
    >>> optimizer.prior_precision

    Reference: S. Mandt, M. D. Hoffman, D. M. Blei, "Stochastic gradient descent as approximate
    Bayesian inference", JMLR 18, 2017, section 4.3.
    """

    def __init__(
        self,
        update="gradient",
        start=1000,
        every=10,
        step_size=None,
        shape=1.0,
        rate=0.0,
        *,
        bounds=(1e-6, 1e8),
        learn_noise_std=False,
    ):
        super().__init__()
        if update not in _UPDATES:
            raise ValueError(f"`update` should be one of {_UPDATES}. Received: update={update!r}")
        self.update = update
        self.start = positive_integer("start", start, minimum=0)
        self.every = positive_integer("every", every)
        if step_size is None:
            step_size = PowerDecay(1.9, 1000.0, 0.6)
        elif not callable(step_size):
            step_size = real_number("step_size", step_size, positive=True)
            if step_size > 1:
                raise ValueError(
                    f"`step_size` should be in (0, 1]. Received: step_size={step_size}"
                )
        self.step_size = step_size
        self.shape = real_number("shape", shape, positive=True)
        self.rate = real_number("rate", rate, minimum=0.0)
        lower, upper = (real_number("bounds", bound, positive=True) for bound in bounds)
        if not lower < upper:
            raise ValueError(f"`bounds` should be (lower, higher). Received: bounds={bounds}")
        self.bounds = (lower, upper)
        self.learn_noise_std = bool(learn_noise_std)
        self._learned = None
        self._steps, self._updates, self._reported = [], 0, set()

    @property
    def history(self):
        if self._learned is None:
            raise RuntimeError(
                "`PriorPrecisionEM` knows nothing before the first batch: pass it to "
                "`model.fit(..., callbacks=[...])` first."
            )
        found = {"step": np.array(self._steps, "int64")}
        for learned in self._learned:
            shape = (len(self._steps), *learned.variable.shape)
            found[learned.name] = np.reshape(np.array(learned.values, "float32"), shape)
        return found

    # The step.

    def create_state(self):
        self._check_optimizer()
        groups = self.optimizer.prior_groups
        # Updates that may fall between two calls of the callback, and one for the next.
        self._slots = execution_block(self.model) // self.every + 2
        self._learned = [
            _Precision(self, name, variable, groups[name], alone=len(groups) == 1)
            for name, variable in self.optimizer.prior_precision.items()
        ]
        if self.learn_noise_std:
            self._learned += self._noise_levels()
        if not self._learned:
            raise ValueError(
                "`PriorPrecisionEM` learns the precisions of a Gaussian prior, and the optimizer "
                "has none: give it `prior=1.0` or a `GaussianPrior` with a precision. "
                f"Received: prior={self.optimizer.prior}"
            )
        self._steps, self._updates, self._reported = [], self._first, set()

    def _check_optimizer(self):
        if not isinstance(self.optimizer, Sampler):
            raise ValueError(
                "`PriorPrecisionEM` takes its draws from a sampler of keras_sgmcmc, such as "
                f"`SGLD`. Received: optimizer={type(self.optimizer).__name__}"
            )
        warmup = getattr(self.optimizer, "warmup_steps", 0)
        if self.start < warmup:
            raise ValueError(
                f"`start` is within the warm-up of {type(self.optimizer).__name__}, whose steps "
                f"draw nothing. Take `start={warmup}` or more. Received: start={self.start}"
            )
        if float(keras.ops.convert_to_numpy(self.optimizer.temperature)) == 0:
            raise ValueError(
                "`PriorPrecisionEM` needs draws, and at `temperature=0` there are none."
            )

    def _noise_levels(self):
        losses = {
            id(loss): loss
            for loss in tree.flatten(self.model.loss)
            if isinstance(loss, GaussianNegativeLogLikelihood)
        }
        if not losses:
            raise ValueError(
                "`learn_noise_std=True` needs the loss `GaussianNegativeLogLikelihood`, whose "
                f"`noise_std` it learns. Received: loss={self.model.loss!r}"
            )
        levels = []
        for number, loss in enumerate(losses.values()):
            name = "noise_std" if number == 0 else f"noise_std_{number}"
            # Keras' files have no place for a loss.
            self.optimizer.keep(name, loss.noise_std)
            levels.append(_NoiseLevel(self, name, loss))
        return levels

    def wrap(self, step):
        levels = [learned for learned in self._learned if isinstance(learned, _NoiseLevel)]

        def wrapped(data):
            number, updates = self.next_update()
            squares = self._residuals(levels, data, updates & self._is_due(number))
            before = tf.convert_to_tensor(self.optimizer.iterations)
            logs = step(data)
            number = tf.convert_to_tensor(self.optimizer.iterations)
            compilation.conditionally(
                (number > before) & self._is_due(number), lambda: self._move(number, squares)
            )
            return logs

        return wrapped

    def _is_due(self, number):
        return (number > self.start) & ((number - self.start) % self.every == 0)

    def _residuals(self, levels, data, due):
        """Sum of the squared residuals of each level and their number, at the present weights."""
        if not levels:
            return []
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)

        def sums():
            outputs = self.model(x, training=False)
            names = getattr(self.model, "output_names", None)
            losses, targets, weighting, flat = (
                align(given, outputs, names) for given in (self.model.loss, y, weights, outputs)
            )
            return [
                level.sums(zip(losses, targets, flat, weighting, strict=True)) for level in levels
            ]

        def zeros():
            return [tuple(tf.zeros_like(level.variable) for _ in range(2)) for level in levels]

        found = tf.cond(due, sums, zeros)
        if compilation.replicas() > 1:
            context = tf.distribute.get_replica_context()
            found = context.all_reduce(tf.distribute.ReduceOp.SUM, found)
        return found

    def _move(self, number, squares):
        updates = (number - self.start) // self.every - 1
        rho = self.step_size(updates) if callable(self.step_size) else self.step_size
        rho = tf.cast(rho, "float32")
        slot = updates % self._slots
        residuals = iter(squares)
        for learned in self._learned:
            given = next(residuals) if isinstance(learned, _NoiseLevel) else ()
            learned.move(rho, slot, *given)

    def stepped(self, precision, rho, inverse, weight):
        """A precision after a step of size rho towards 1 / inverse."""
        if self.update == "closed_form":
            rho = tf.minimum(rho, 1.0)
            return 1.0 / ((1.0 - rho) / precision + rho * inverse)
        change = tf.clip_by_value(rho * weight * (1.0 - precision * inverse), -1.0, 1.0)
        return precision * tf.exp(change)

    # Around the step.

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self._first = None
        # Values may have been changed since the last fit.
        self._next = 0

    def on_train_batch_begin(self, batch, logs=None):
        if self._first is None:
            self._count = StepCount(self.model)
            self._first = self._updates = self._updates_made()

    def on_train_batch_end(self, batch, logs=None):
        if self._learned is None:
            return
        self._count.advance()
        if self._count.has_reached(self._next):
            self._collect()
        if logs is not None:
            logs.update(self._logs)

    def on_epoch_end(self, epoch, logs=None):
        if self._learned is not None and logs is not None:
            logs.update(self._logs)

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        if self._learned is not None:
            self._warn_of_travel()

    def _updates_made(self):
        return max(0, self._count.value - self.start) // self.every

    def _collect(self):
        """Fetch the updates that were made."""
        updates = self._updates_made()
        slots = [number % self._slots for number in range(self._updates, updates)]
        numbers = range(self._updates + 1, updates + 1)
        self._steps += [self.start + self.every * number for number in numbers]
        self._updates = updates
        for learned in self._learned:
            learned.collect(slots)
            if learned.held and learned.name not in self._reported:
                self._reported.add(learned.name)
                warnings.warn(f"{learned.held}. {_BOUND_REMEDY}", stacklevel=3)
        self._look()

    def _look(self):
        """Note what the logs are to show until the next update."""
        self._next = self.start + self.every * (self._updates + 1)
        self._logs = {}
        for learned in self._learned:
            self._logs.update(learned.logs())

    def _warn_of_travel(self):
        """Warn if a precision has not come to rest."""
        quarter = (self._updates - self._first) // 4
        if quarter < 10:
            return
        for learned in self._learned:
            values = np.log(np.array(learned.values[-2 * quarter :]))
            before, after = values[:quarter].mean(0), values[quarter:].mean(0)
            change = np.max(np.abs(after - before) - 2 * values[quarter:].std(0))
            if change > _STILL:
                warnings.warn(
                    f"{learned.title} still moves: it was {np.exp(np.max(before)):.3g} on average "
                    f"in the third quarter of the updates and {np.exp(np.max(after)):.3g} in the "
                    "last. Train longer, or begin nearer.",
                    stacklevel=3,
                )

    def get_config(self):
        step_size = self.step_size
        if callable(step_size):
            step_size = keras.saving.serialize_keras_object(step_size)
        return {
            "update": self.update,
            "start": self.start,
            "every": self.every,
            "step_size": step_size,
            "shape": self.shape,
            "rate": self.rate,
            "bounds": list(self.bounds),
            "learn_noise_std": self.learn_noise_std,
        }

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        if isinstance(config["step_size"], dict):
            config["step_size"] = keras.saving.deserialize_keras_object(config["step_size"])
        return cls(**config)


_BOUND_REMEDY = (
    "The data say nothing against it. A hyperprior (`shape` and `rate`) keeps a precision finite, "
    "larger groups tell more, and a smaller learning rate bears a larger precision"
)


class _Learned:
    """A variable that EM moves, and its values after the last updates."""

    def __init__(self, callback, name, variable):
        self.callback, self.name, self.variable = callback, name, variable
        self.values, self.held = [], ""
        shape = (callback._slots, *variable.shape)
        self._last = statistic(shape, "em_values")
        self._last_bounds = statistic((callback._slots,), "em_bounds")

    def record(self, slot, value, bound):
        at = tf.one_hot(slot, self.callback._slots, on_value=True, off_value=False)
        self._last_bounds.assign(tf.where(at, bound, tf.convert_to_tensor(self._last_bounds)))
        at = tf.reshape(at, (-1, *[1] * len(value.shape)))
        value = tf.cast(value, "float32")
        self._last.assign(tf.where(at, value[None], tf.convert_to_tensor(self._last)))

    def collect(self, slots):
        values, bounds = self._last.numpy(), self._last_bounds.numpy()
        self.values += [values[slot] for slot in slots]
        reached = [bounds[slot] for slot in slots if bounds[slot] > 0]
        if reached:
            self.held = f"{self.title} is held at the bound {reached[0]:.4g}"

    def logs(self):
        value = keras.ops.convert_to_numpy(self.variable)
        if value.ndim == 0:
            return {self.key: float(value)}
        return {f"{self.key}_{i}": float(entry) for i, entry in enumerate(value)}


class _Precision(_Learned):
    """The precision of a group of the prior."""

    def __init__(self, callback, name, variable, indices, alone):
        super().__init__(callback, name, variable)
        trained = {id(v) for v in callback.model.trainable_variables}
        variables = callback.optimizer._trainable_variables
        self._members = [(i, variables[i]) for i in indices if id(variables[i]) in trained]
        self.key = "prior_precision" if alone else f"prior_precision/{name}"
        self.title = f"The prior precision {name!r}"
        size = sum(math.prod(v.shape) for _, v in self._members)
        if callback.shape - 1 + size / 2 <= 0:
            raise ValueError(
                f"The M-step of the group {name!r} with {size} weights needs `shape` above "
                f"{1 - size / 2:g}. Received: shape={callback.shape}"
            )

    def move(self, rho, slot):
        optimizer, callback = self.callback.optimizer, self.callback
        square = count = 0.0
        upper = tf.constant(callback.bounds[1])
        for index, variable in self._members:
            theta = tf.convert_to_tensor(variable)
            sampled = tf.broadcast_to(optimizer.sampled(index), theta.shape)
            theta = tf.where(sampled, theta, tf.zeros_like(theta))
            square += tf.cast(tf.reduce_sum(tf.square(theta)), "float32")
            count += tf.reduce_sum(tf.cast(sampled, "float32"))
            upper = tf.minimum(upper, tf.cast(optimizer.largest_precision(index), "float32"))
        square /= tf.cast(optimizer.temperature, "float32")
        old = tf.convert_to_tensor(self.variable)
        size = tf.maximum(count, 1.0)
        weight = 1.0 + 2.0 * (callback.shape - 1.0) / size
        inverse = (2.0 * callback.rate + square) / (size * weight)
        new = callback.stepped(old, rho, inverse, weight)
        usable = (count > 0) & (weight > 0) & tf.math.is_finite(square)
        bounded = tf.clip_by_value(new, callback.bounds[0], tf.maximum(upper, callback.bounds[0]))
        new, held = tf.where(usable, bounded, old), usable & (new != bounded)
        self.variable.assign(new)
        self.record(slot, new, tf.where(held, new, 0.0))


class _NoiseLevel(_Learned):
    """The standard deviation of the noise in a Gaussian likelihood."""

    def __init__(self, callback, name, loss):
        super().__init__(callback, name, loss.noise_std)
        self.loss, self.key, self.title = loss, name, f"The noise level `{name}`"

    def sums(self, outputs):
        square = count = tf.zeros_like(self.variable)
        for loss, target, output, weights in outputs:
            if loss is not self.loss:
                continue
            squares = tf.square(loss.residual(target, output))
            by_row = (-1, *[1] * (len(squares.shape) - 1))
            weights = 1.0 if weights is None else tf.reshape(weights, by_row)
            weights = tf.cast(weights, squares.dtype) * tf.ones_like(squares)
            axes = list(range(len(squares.shape) - len(self.variable.shape)))
            square += tf.cast(tf.reduce_sum(weights * squares, axes), square.dtype)
            count += tf.cast(tf.reduce_sum(weights, axes), count.dtype)
        return square, count

    def move(self, rho, slot, square, count):
        lower, upper = self.callback.bounds
        old = tf.convert_to_tensor(self.variable)
        rho = tf.cast(rho, old.dtype)
        inverse = square / tf.where(count > 0, count, tf.ones_like(count))
        new = self.callback.stepped(1.0 / tf.square(old), rho, inverse, tf.ones_like(old))
        bounded = tf.clip_by_value(new, lower, upper)
        usable = tf.math.is_finite(inverse) & (count > 0)
        held = tf.reduce_any(usable & (new != bounded))
        new = tf.where(usable, tf.math.rsqrt(bounded), old)
        self.variable.assign(new)
        extreme = tf.cast(tf.reduce_min(new), "float32")
        self.record(slot, new, tf.where(held, extreme, 0.0))
