"""Means over windows of iterates, as draws from the posterior."""

import contextlib
import logging
import math
import warnings

import keras
import numpy as np
import tensorflow as tf

from keras_sgmcmc import compilation, fit_run, stability, storage
from keras_sgmcmc.callbacks.chain_monitor import DivergenceError, same_variables
from keras_sgmcmc.callbacks.in_graph_callback import InGraphCallback
from keras_sgmcmc.callbacks.posterior_samples import read_only_copy, readable_bytes
from keras_sgmcmc.callbacks.step_callback import StepCount, execution_block
from keras_sgmcmc.noise_covariance import statistic
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.optimizers.observer import StepObserver
from keras_sgmcmc.posterior import Posterior
from keras_sgmcmc.validation import positive_integer

_logger = logging.getLogger("keras_sgmcmc")

# Weights up to which the whole Hessian is measured.
_LARGEST_HESSIAN = 200
# Step x smallest curvature x window above which a mean's variance is within 5 % of its limit.
_LONG_ENOUGH = 20.0


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class IterateAverages(InGraphCallback):
    """Iterate averages as a sampler (Mandt, Hoffman & Blei 2017, algorithm 1).

    With a constant step the mean of the weights over a window of L = N / S steps, one expected pass
    over N rows in batches of S, has to leading order the covariance

        A^-1 C A^-1 / N

    whatever the step, for the Hessian A of the mean loss and the covariance C of per-example
    gradients: the posterior's, A^-1 / N, where C = A. Every window after the burn-in gives a draw,
    which is the mean of all its iterates: steps burn_in + 1 to burn_in + L, and so on. See
    `theory.iterate_average_covariance` for the covariance of any window and step.

    The means are taken inside the training step, so that no iterate is missed under
    `steps_per_execution`. A step that loss scaling skips does not count. Any optimizer of Keras
    will do, without noise of its own; batches should be drawn independently (`minibatches`).

    For models of up to 200 weights on `minibatches` the curvature is measured when the burn-in is
    over, and a warning says if the step is too short for the window (or unstable), with one that
    would do, and if tr(A^-1 C) / D is outside 0.9 to 1.1, so that the draws have the sandwich
    covariance above and not the posterior's.

    Args:
        burn_in: Steps to discard, counted by `optimizer.iterations`.
        window: Steps in a mean. Defaults to None: N / S.
        max_samples: Largest number of draws to hold. Once it is reached every second one is
            dropped, and of the windows to come too. Defaults to None.
        directory: Where to write every draw as soon as its window ends; as for `PosteriorSamples`.
            Defaults to None: in memory.

    Raises:
        ValueError: If an argument is out of range; at the first batch, if `window` is None and N or
            S is not known, if no window can be completed, or if the model has weights that are not
            trained but move (the moving statistics of batch normalization: those of averaged
            weights would be others).
        DivergenceError: If a mean is not finite.

    Example:

    >>> data = sg.minibatches(x, y, 10)
    >>> averages = sg.callbacks.IterateAverages(burn_in=10_000)
    >>> model.compile(keras.optimizers.SGD(0.05), loss=sg.GaussianNegativeLogLikelihood(1.0))
    >>> model.fit(data, epochs=200, callbacks=[averages])
    >>> averages.posterior.predict_moments(x_test)

    Reference: S. Mandt, M. D. Hoffman, D. M. Blei, "Stochastic gradient descent as approximate
    Bayesian inference", JMLR 18, 2017, section 5.
    """

    def __init__(self, burn_in, window=None, max_samples=None, directory=None):
        super().__init__()
        self.burn_in = positive_integer("burn_in", burn_in, minimum=0)
        self.window = None if window is None else positive_integer("window", window)
        self.max_samples = None
        if max_samples is not None:
            self.max_samples = positive_integer("max_samples", max_samples, minimum=2)
        self.directory = storage.as_directory(directory, max_samples)
        self._store = None
        self._draws, self._steps = [], []
        self._variables = self._posterior = self._length = None
        self._stride, self._seen = 1, 0

    @property
    def posterior(self):
        """The means so far, as a `Posterior` of the model; `steps` are the last of each window."""
        if not self._draws:
            raise ValueError(
                "No window is complete yet: pass this callback to `model.fit`, for more than "
                "`burn_in` steps and a window."
            )
        if self._posterior is None:
            self._posterior = Posterior(
                self.model, self._variables, self._draws, self._steps, None, self._common
            )
        return self._posterior

    # The step.

    def create_state(self):
        variables = list(self.model.trainable_variables)
        moving = [
            weight.path
            for layer in fit_run.layers_with_statistics(self.model)
            for weight in layer._non_trainable_variables
        ]
        if moving:
            raise ValueError(
                "`IterateAverages` can't average a model whose layers keep statistics of their own "
                f"({moving}): they belong to the iterates, not to their mean. Use "
                "`LayerNormalization` or `GroupNormalization`, or freeze these layers."
            )
        if self._draws and not same_variables(variables, self._variables):
            raise ValueError(
                "The variables are not those of the means taken before: the model was changed, or "
                "layers were frozen or unfrozen. Use a new `IterateAverages`."
            )
        self._variables = variables
        drawn = {id(variable) for variable in variables}
        self._common = [(v, read_only_copy(v)) for v in self.model.variables if id(v) not in drawn]
        self._length = self._window_length()
        # Windows that may end between two calls of the callback, and one for the next.
        self._slots = execution_block(self.model) // self._length + 2
        self._mean = [statistic(v.shape, "window_mean", v.dtype) for v in variables]
        self._ended = [
            statistic((self._slots, *v.shape), "ended_windows", v.dtype) for v in variables
        ]
        self._ends = statistic((self._slots,), "ends", "int64")
        self._count = statistic((), "windows", "int64")
        self._filled = statistic((), "iterates_in_window", "int64")
        self._seen = 0
        self.keep("iterate_averages", [self._filled, *self._mean])

    def _window_length(self):
        if self.window is not None:
            return self.window
        optimizer, run = self.optimizer, self._run
        rows = getattr(optimizer, "train_size", None)
        rows = run.source.train_size if run.source is not None else rows
        if rows is None or run.batch_size is None:
            unknown = "number of rows" if rows is None else "batch size"
            raise ValueError(
                f"The window of `IterateAverages` is N / S steps, but the {unknown} can't be told "
                "from these data. Pass `window=`, or train on `keras_sgmcmc.minibatches`. "
                "Received: window=None"
            )
        batch = run.batch_size * (optimizer.gradient_accumulation_steps or 1)
        return max(1, round(rows / batch))

    def wrap(self, step):
        weights = sum(math.prod(v.shape) for v in self._variables)
        windows = _Windows(self)

        def wrapped(data):
            before = tf.convert_to_tensor(self.optimizer.iterations)
            with windows.observing():
                logs = step(data)
            number = tf.convert_to_tensor(self.optimizer.iterations)
            rest = [
                position for position in range(len(self._mean)) if position not in windows.entered
            ]

            def enter():
                for position in rest:
                    self._enter(position, self._variables[position], number, number > before)
                return self._count_iterate(number, number > before)

            complete = compilation.compiled_if_large(enter, weights if rest else 0)()
            compilation.conditionally(complete, self._end_window)
            return logs

        return wrapped

    def _place(self, number, counts):
        """Where step `number` is in its window, for an update that `counts` or not.

        Returns:
            Whether it is in a window at all, whether it begins one, and the iterates that the mean
            is of once this one has entered.
        """
        position = number - self.burn_in
        counts = counts & (position > 0)
        begins = (position - 1) % self._length == 0
        filled = tf.cast(tf.convert_to_tensor(self._filled), number.dtype)
        # A window that was entered in the middle, by a chain that goes on, stays empty.
        entered = tf.where(begins, tf.ones_like(filled), tf.where(filled > 0, filled + 1, filled))
        return counts, begins, entered

    def _enter(self, position, variable, number, counts):
        """Let an iterate enter the mean of its window: m <- m + (theta - m) / k."""
        counts, begins, entered = self._place(number, counts)
        mean = self._mean[position]
        old, theta = tf.convert_to_tensor(mean), tf.convert_to_tensor(variable)
        share = tf.cast(1, old.dtype) / tf.cast(tf.maximum(entered, 1), old.dtype)
        share = tf.where(counts, share, tf.zeros_like(share))
        # Not by the share alone, for what is left of another window may not be finite.
        start = tf.where(begins & counts, theta, old)
        mean.assign(start + share * (theta - start))

    def _count_iterate(self, number, counts):
        """Count an iterate that has entered, and return whether that completes the window."""
        counts, _, entered = self._place(number, counts)
        filled = tf.where(
            counts, entered, tf.cast(tf.convert_to_tensor(self._filled), entered.dtype)
        )
        self._filled.assign(tf.cast(filled, "int64"))
        last = (number - self.burn_in) % self._length == 0
        return counts & last & (entered == self._length)

    def _end_window(self):
        count = tf.convert_to_tensor(self._count)
        number = tf.cast(tf.convert_to_tensor(self.optimizer.iterations), "int64")
        slot = tf.one_hot(count % self._slots, self._slots, on_value=True, off_value=False)
        self._ends.assign(tf.where(slot, number, tf.convert_to_tensor(self._ends)))
        for ended, mean in zip(self._ended, self._mean, strict=True):
            mask = tf.reshape(slot, (self._slots, *[1] * len(mean.shape)))
            ended.assign(
                tf.where(mask, tf.convert_to_tensor(mean)[None], tf.convert_to_tensor(ended))
            )
        self._count.assign(count + 1)

    # Around the step.

    def _open_store(self, step):
        sampling = {"burn_in": self.burn_in, "window": self._length}
        self._store = storage.open_chain(
            self.directory,
            self.model,
            self.optimizer,
            self._variables,
            self._common,
            sampling,
            step,
        )
        self._draws = list(self._store.draws)
        self._steps = [draw.step for draw in self._draws]
        self._posterior = None

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self._begun, self._next, self._steps_made = False, 0, None

    def on_train_batch_begin(self, batch, logs=None):
        if self._steps_made is None:
            self._steps_made = StepCount(self.model)
            self._first = self._steps_made.value

    def on_train_batch_end(self, batch, logs=None):
        if self._length is None:
            return
        self._steps_made.advance()
        if not self._begun:
            self._begun = True
            if self.directory is not None:
                self._open_store(self._first)
            self._announce()
        if self._steps_made.has_reached(self._next):
            self._collect()
            windows = max(0, self._steps_made.value - self.burn_in) // self._length
            self._next = self.burn_in + (windows + 1) * self._length
        if logs is not None:
            self._log(logs, self._steps_made.most)

    def on_epoch_end(self, epoch, logs=None):
        if self._length is not None:
            self._collect()
            if self._store is not None:
                self._store.write_manifest()
            if logs is not None:
                self._log(logs, self._steps_made.value)

    def _log(self, logs, step):
        logs["draws"] = len(self._draws)
        logs["burn_in_left"] = max(0, self.burn_in - step)

    def _announce(self):
        size = sum(math.prod(m.shape) * tf.as_dtype(m.dtype).size for m in self._mean)
        message = (
            f"IterateAverages: means of {self._length} steps, from step {self.burn_in + 1} on, of "
            f"{readable_bytes(size)}"
        )
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        if steps and epochs and not self._draws:
            updates = steps * epochs // (self.optimizer.gradient_accumulation_steps or 1)
            last = self._first + updates
            count = max(0, last - self.burn_in) // self._length
            if count == 0:
                raise ValueError(
                    f"No window can be completed: training ends at step {last}, and with "
                    f"`burn_in={self.burn_in}` and windows of {self._length} steps the first ends "
                    f"at step {self.burn_in + self._length}. Train longer or reduce them."
                )
            count = min(count, self.max_samples or count)
            place = "in memory" if self.directory is None else f"in {self.directory}"
            message += f", at most {count} of them ({readable_bytes(count * size)}) {place}"
        _logger.info(message)

    def _collect(self):
        """Fetch the windows that have ended."""
        count = int(self._count.numpy())
        if count == self._seen:
            return
        ends, first = self._ends.numpy(), not self._draws
        for number in range(self._seen, count):
            slot = number % self._slots
            draw = [read_only_copy(ended[slot]) for ended in self._ended]
            for array, variable in zip(draw, self._variables, strict=True):
                if not np.all(np.isfinite(array)):
                    raise DivergenceError(
                        f"The mean of {variable.path} over the {self._length} steps up to step "
                        f"{ends[slot]} is not finite: the chain diverged. Take a smaller "
                        "learning rate. The draws before are kept.",
                        step=int(ends[slot]),
                        variable=variable.path,
                    )
            self._seen = number + 1
            if number % self._stride == 0:
                if self._store is not None:
                    draw = self._store.append(int(ends[slot]), draw, 1.0)
                self._draws.append(draw)
                self._steps.append(int(ends[slot]))
            if self.max_samples is not None and len(self._draws) > self.max_samples:
                self._draws, self._steps = self._draws[::2], self._steps[::2]
                self._stride *= 2
        self._posterior = None
        if first:
            self._check_step()

    def _check_step(self):
        """Warn if the step does not fit the window, or the noise not the curvature."""
        source, size = self._run.source, sum(math.prod(v.shape) for v in self._variables)
        if source is None or source.chains > 1:
            return
        if size > _LARGEST_HESSIAN or compilation.replicas() > 1:
            return
        if isinstance(self.optimizer, Sampler):
            if self.optimizer.uses_batch_noise and self.optimizer.noise_structure != "diagonal":
                return
            rates = [self.optimizer.step_size(i) for i in range(len(self._variables))]
        elif type(self.optimizer) is keras.optimizers.SGD:
            rate = float(self.optimizer.learning_rate) / (1 - self.optimizer.momentum)
            rates = [rate] * len(self._variables)
        else:
            return
        measured = stability.curvature_and_noise(self.model, self.optimizer, source)
        if measured is None or not all(np.all(np.isfinite(matrix)) for matrix in measured):
            return
        A, C = measured
        H = np.concatenate(
            [
                np.broadcast_to(np.asarray(r, "float64"), v.shape).ravel()
                for r, v in zip(rates, self._variables, strict=True)
            ]
        )
        values = np.linalg.eigvalsh(np.sqrt(H)[:, None] * A * np.sqrt(H)[None, :])
        if values[0] <= 0:
            return
        reach = values[0] * self._length
        if reach < _LONG_ENOUGH:
            factor = _LONG_ENOUGH / reach
            note = f"a {factor:.3g} times larger learning rate"
            if factor * values[-1] > 1.0:
                note += (
                    f" would do, but is {factor * values[-1]:.3g} times what the largest curvature "
                    f"allows: precondition, or take `window={math.ceil(factor * self._length)}`, "
                    "whose means vary less than the posterior"
                )
            warnings.warn(
                f"The step is short for windows of {self._length} steps: step x smallest curvature "
                f"x window is {reach:.3g}, and the variance of the means comes within 5 % of what "
                f"it should be from {_LONG_ENOUGH:g} on. Take {note}.",
                stacklevel=3,
            )
        if values[-1] > 1.5:
            warnings.warn(
                f"Step x largest curvature is {values[-1]:.3g}, and 2 is the end of stability: "
                f"take a learning rate that is {1.0 / values[-1]:.2g} times as large.",
                stacklevel=3,
            )
        ratio = float(np.trace(np.linalg.solve(A, C))) / size
        if not 0.9 <= ratio <= 1.1:
            warnings.warn(
                f"tr(A^-1 C) / D is {ratio:.3g} rather than 1: the model is not the one that the "
                "data come from, or the prior is strong. The means have the sandwich covariance "
                "A^-1 C A^-1 / N, and not the posterior's A^-1 / N.",
                stacklevel=3,
            )

    def get_config(self):
        return {
            "burn_in": self.burn_in,
            "window": self.window,
            "max_samples": self.max_samples,
            "directory": self.directory,
        }

    @classmethod
    def from_config(cls, config):
        return cls(**config)


class _Windows(StepObserver):
    """Lets the iterates of a sampler enter their means in the program that moves them.

    Attributes:
        entered: Positions of the variables for which it does.
    """

    def __init__(self, averages):
        self._averages, self.entered = averages, set()
        places = {id(v): position for position, v in enumerate(averages._variables)}
        # By number in the optimizer; not constrained ones, which Keras projects after the move.
        self._positions = {
            index: places[id(v)]
            for index, v in enumerate(averages.optimizer._trainable_variables)
            if id(v) in places and v.constraint is None
        }

    def observing(self):
        """A context for the step."""
        optimizer = self._averages.optimizer
        if (
            isinstance(optimizer, Sampler)
            and optimizer.jit_compile
            and not compilation.is_distributed()
        ):
            return optimizer.observed_by(self)
        return contextlib.nullcontext()

    def after_move(self, index, variable):
        position = self._positions.get(index)
        if position is None:
            return
        self.entered.add(position)
        number = tf.convert_to_tensor(self._averages.optimizer.iterations) + 1
        self._averages._enter(position, variable, number, True)
