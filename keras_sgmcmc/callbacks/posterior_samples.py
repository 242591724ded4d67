"""Collects draws of the weights while `fit` runs."""

import itertools
import logging
import math
import time
import warnings

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_sgmcmc import storage
from keras_sgmcmc.callbacks.chain_monitor import ChainMonitor, DivergenceError, same_variables
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.posterior import Posterior
from keras_sgmcmc.validation import positive_integer

_logger = logging.getLogger("keras_sgmcmc")

# Bytes written, all steps from draw to draw together, that take a CPU hardly less than a stop for a
# draw: networks of 50 KB to 600 KB are on a par from 2 to 2.5 MiB on.
_WORTH_A_STOP = 2 * 2**20
# What a program may write draws to.
_RECORD_BYTES = 16 * 2**20


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class PosteriorSamples(ChainMonitor):
    """Keep a thinned sample of the chain: the draws of a `Posterior`.

    A draw is taken at the optimizer steps burn_in + thinning, burn_in + 2 thinning, ... or, where
    the steps of `steps_per_execution` are not fused, at the first callback at or after each of
    them, with the true step number. It holds copies of the sampled variables and of the state that
    changes with them, such as the moving statistics of BatchNorm; frozen layers are kept once. The
    number of draws and their memory are announced before the first update (printed, or logged if
    `verbose=0`).

    The chain is watched, and the fit checked, as by a `ChainMonitor`: `DivergenceError` comes out
    of `fit`. Draws taken before stay, except for those of the steps in which the chain already
    grew, and none that isn't finite is ever stored.

    Logs: `draws`, the number held, and `burn_in_left`, the steps until sampling begins.

    Args:
        burn_in: Steps to discard, counted by `optimizer.iterations`: a chain that is resumed or
            fitted again doesn't burn in again.
        thinning: Steps from draw to draw. Defaults to `1`.
        max_samples: Largest number of draws to hold, or None. The interval is made a multiple of
            `thinning` so that at most so many fit into the run, evenly spaced; should training go
            on after that, every second draw is dropped and the interval doubled.
        directory: Where to write every draw as soon as it is taken, so that memory stays as it is
            and a killed process loses none but those of the program of fused steps that it was in:
            see `keras_sgmcmc.storage`, `Posterior.load`. Chains of other seeds may share it. A
            chain that goes on from a checkpoint finds its draws there, and moves aside those after
            the checkpoint's step, which it makes again. Defaults to None: in memory.
        step_weights: Whether draws are weighted by the step size, as averages under a decreasing
            step have to be (Welling & Teh 2011, eq. 11; Teh et al. 2016): without, they lean to the
            late draws, which are many where the chain is slow. Defaults to False.

    Raises:
        ValueError: If an argument is out of range; at the first batch, if no draw can come, or if
            the draws so far are of other variables; whatever `ChainMonitor` refuses.
        DivergenceError: In training, if the chain diverges.
        OSError: If `directory` can't be written to, or holds another chain of the same seed
            (`keras_sgmcmc.storage.StorageError`).

    Example:

    >>> samples = sg.callbacks.PosteriorSamples(burn_in=1000, thinning=100)
    >>> model.fit(data, epochs=20, callbacks=[samples])
    >>> probabilities = samples.posterior.predict(x_test)
    """

    def __init__(self, burn_in, thinning=1, max_samples=None, directory=None, step_weights=False):
        super().__init__()
        self.burn_in = positive_integer("burn_in", burn_in, minimum=0)
        self.thinning = positive_integer("thinning", thinning)
        self.max_samples = None
        if max_samples is not None:
            self.max_samples = positive_integer("max_samples", max_samples)
        self.directory = storage.as_directory(directory, max_samples)
        self.step_weights = bool(step_weights)
        self._interval = self.thinning
        self._variables = None
        self._draws, self._steps, self._sizes = [], [], []
        self._posterior = self._store = None
        self._pending, self._recorded = [], None
        # Of the intervals between draws of one fit: neither burn-in nor compilation is among them.
        self._clock, self._timed_seconds, self._timed_steps = None, 0.0, 0

    @property
    def posterior(self):
        """The draws so far, as a `Posterior` of the model.

        Its `seconds` are the number of draws times the wall time from draw to draw, so without
        burn-in and compilation.
        """
        if self._variables is None:
            raise ValueError("There is no draw yet: pass this callback to `model.fit` first.")
        self.take()
        if self._posterior is None:
            sizes = self._sizes if self.step_weights else None
            self._posterior = Posterior(
                self.model, self._variables, self._draws, self._steps, sizes, self._common
            )
            self._posterior.seconds = self._seconds()
        return self._posterior

    def _seconds(self):
        """Wall time of all draws at the pace of those that were timed, or None."""
        count = len(self._steps)
        if count < 2 or not self._timed_steps:
            return None
        steps = (self._steps[-1] - self._steps[0]) * count / (count - 1)
        return steps * self._timed_seconds / self._timed_steps

    def on_train_begin(self, logs=None):
        self.take()
        super().on_train_begin(logs)
        if not isinstance(self.optimizer, Sampler):
            warnings.warn(
                f"`{type(self.optimizer).__name__}` is not a sampler: its iterates are not draws "
                "from a posterior. Compile with `SGLD` or `pSGLD`.",
                stacklevel=2,
            )

    def _shown(self):
        return _drawn_variables(self.model)

    def _values(self):
        if self._recorded is None:
            return super()._values()
        of = dict(zip(map(id, self._variables), self._recorded, strict=True))
        largest = [np.abs(of[id(variable)]).max() for variable in self._watched]
        return np.array(largest, "float64"), self._recorded

    def _look(self):
        found = super()._look()
        if self.step < self._next_draw:
            # Nothing is to be drawn: held, they would make the next update copy all weights.
            self._values_seen = None
        return found

    def begin(self):
        self._next_draw = math.inf
        super().begin()
        variables = self._shown()
        if not self._draws:
            self._variables = variables
            drawn = {id(variable) for variable in variables}
            self._common = [
                (v, read_only_copy(v)) for v in self.model.variables if id(v) not in drawn
            ]
        elif not same_variables(variables, self._variables):
            raise ValueError(
                "The sampled variables are not those of the draws taken before: the model was "
                "changed, or layers were frozen or unfrozen. Use a new `PosteriorSamples`."
            )
        if self.directory is not None:
            self._open_store()
        self._frozen_checked = False
        self._clock = None
        self._plan()
        self._coarsening_checked = False
        self._next_draw = self._draw_after(self.step)

    def _open_store(self):
        names = ("burn_in", "thinning", "step_weights")
        self._store = storage.open_chain(
            self.directory,
            self.model,
            self.optimizer,
            self._variables,
            self._common,
            {name: getattr(self, name) for name in names},
            self.step,
        )
        self._draws = list(self._store.draws)
        self._steps = [draw.step for draw in self._draws]
        self._sizes = [draw.weight for draw in self._draws]
        self._posterior = None

    def _plan(self):
        """Choose the interval and announce, or refuse, what is to come."""
        last = self.last_step()
        if last is not None and not self._draws:
            self._interval = self.thinning
            possible = self._draws_until(last)
            if possible == 0:
                raise ValueError(
                    f"No draw can come: training ends at step {last}, and with `burn_in="
                    f"{self.burn_in}` and `thinning={self.thinning}` the first draw is due at step "
                    f"{self._draw_after(self.step)}. Train longer or reduce them (they count "
                    "updates, `optimizer.iterations`, not epochs), or leave this callback out of "
                    "a fit that only burns in."
                )
            if self.max_samples is not None:
                self._interval *= -(-possible // self.max_samples)
        size = sum(read_only_copy(variable).nbytes for variable in self._variables)
        message = (
            f"PosteriorSamples: draws of {readable_bytes(size)} at step "
            f"{self._draw_after(self.step)} and every {self._interval} from there"
        )
        if last is not None or self.max_samples is not None:
            count = self.max_samples
            if last is not None:
                count = len(self._draws) + self._draws_until(last)
                count = min(count, self.max_samples or count)
            place = "in memory" if self.directory is None else f"in {self.directory}"
            message += f", at most {count} draws ({readable_bytes(count * size)}) {place}"
        if self.params.get("verbose") and keras.config.is_interactive_logging_enabled():
            print(message)
        else:
            _logger.info(message)

    def _draw_after(self, step):
        taken = max(0, step - self.burn_in) // self._interval
        return self.burn_in + (taken + 1) * self._interval

    def _draws_until(self, last):
        return max(0, (last - self._draw_after(self.step)) // self._interval + 1)

    def exact_step(self):
        return self._next_draw if self.begun else None

    def next_due(self):
        return min(super().next_due(), self._next_draw)

    def recorded(self):
        block = self._count.block
        if not self._interval <= block < math.inf:
            return None
        if self.step_weights and callable(self.optimizer._learning_rate) and not self._scheduled():
            # What it depends on is that of another moment when draws are taken.
            return None
        size = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in self._variables)
        if size * self._interval > _WORTH_A_STOP or size * block > _RECORD_BYTES:
            return None
        return self._variables, block

    def begin_record(self, record):
        """Have draws written down by a program, from the next on."""
        record.begin(self._next_draw, self._interval)
        if self._clock is None and self.step >= self.burn_in:
            # The program is compiled by now.
            self._tick(self.step)

    def take(self, rows=()):
        """Take the draws that a program has written down: pairs of a step and the values then.

        Those that were left when this was interrupted come first.
        """
        if rows:
            self._tick(rows[-1][0])
        self._pending.extend(rows)
        try:
            while self._pending:
                step, self._recorded = self._pending.pop(0)
                self.arrive(step=step)
        except DivergenceError:
            self._pending.clear()
            raise
        finally:
            self._recorded = None

    def on_due(self, logs):
        super().on_due(logs)
        if self.step >= self._next_draw:
            self._draw()
            self._next_draw = self._draw_after(self.step)

    def _draw(self):
        if not self._frozen_checked:
            self._frozen_checked = True
            self._warn_if_frozen_moved()
        if self._values_seen is None:
            self._look()
        draw = [read_only_copy(value) for value in self._values_seen]
        self._values_seen = None
        if self._recorded is None:
            self._tick(self.step)
        for array, variable in zip(draw, self._variables, strict=True):
            if not np.all(np.isfinite(array)):
                raise self.error(variable, "is not finite")
        if self.max_samples is not None and len(self._draws) >= self.max_samples:
            self._interval *= 2
            self._keep([index % 2 == 1 for index in range(len(self._draws))])
            if (self.step - self.burn_in) % self._interval >= self._interval // 2:
                return
        weight = self._step_size() if self.step_weights else 1.0
        if self._store is not None:
            draw = self._store.append(self.step, draw, weight)
        self._draws.append(draw)
        self._steps.append(self.step)
        self._sizes.append(weight)
        self._posterior = None

    def _scheduled(self):
        # Keras' own optimizers count batches.
        rate = self.optimizer._learning_rate
        return isinstance(rate, LearningRateSchedule) and isinstance(self.optimizer, Sampler)

    def _step_size(self):
        if self._scheduled():
            # The optimizer may be further on.
            rate = self.optimizer._learning_rate(ops.convert_to_tensor(self.step, "int64"))
        else:
            rate = self.optimizer.learning_rate
        return float(ops.convert_to_numpy(rate))

    def _tick(self, step):
        now = time.perf_counter()
        if self._clock is not None:
            self._timed_seconds += now - self._clock[0]
            self._timed_steps += step - self._clock[1]
        self._clock = (now, step)

    def _keep(self, wanted):
        for kept in (self._draws, self._steps, self._sizes):
            kept[:] = itertools.compress(kept, wanted)
        self._posterior = None

    def check(self):
        """As in `ChainMonitor`; takes back the draws of a chain that was growing already."""
        try:
            super().check()
        except DivergenceError:
            if self._growing_since < self._judged:
                self._keep([step <= self._growing_since for step in self._steps])
                if self._store is not None:
                    self._store.take_back(self._growing_since)
            raise

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if not self._coarsening_checked:
            # Not before the first batch tells whether steps are fused, whose draws are exact.
            self._coarsening_checked = True
            if not self._run.fuses:
                self.warn_if_coarsened("thinning", self._interval)
        self._log(logs, self._count.most)

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if self.begun:
            self._log(logs, self.step)
        if self._store is not None:
            self._store.write_manifest(self._seconds())

    def _log(self, logs, step):
        if logs is not None:
            logs["draws"] = len(self._draws)
            logs["burn_in_left"] = max(0, self.burn_in - step)

    def _warn_if_frozen_moved(self):
        known = {id(variable) for variable in self.optimizer._trainable_variables}
        moved = [
            variable.path
            for variable, before in self._common
            if id(variable) in known and not np.array_equal(before, read_only_copy(variable))
        ]
        if moved:
            warnings.warn(
                f"{moved} are frozen, but the compiled step still updates them, and the draws "
                "don't hold them. Call `model.compile` after changing `trainable`.",
                stacklevel=2,
            )

    def get_config(self):
        return {
            "burn_in": self.burn_in,
            "thinning": self.thinning,
            "max_samples": self.max_samples,
            "directory": self.directory,
            "step_weights": self.step_weights,
        }


def read_only_copy(variable):
    """The value of a variable or tensor as an array of its own, which `Posterior` need not copy."""
    # An explicit copy, because what a tensor shows may be the live buffer.
    value = variable if isinstance(variable, np.ndarray) else ops.convert_to_tensor(variable)
    array = np.array(value, copy=True)
    array.setflags(write=False)
    return array


def _drawn_variables(model):
    """The variables that change from draw to draw: trainable ones, and the state of their layers.

    Frozen layers keep their statistics too. Seeds, which Keras doesn't count among the weights,
    have no part in predictions.
    """
    fixed = {
        id(variable)
        for layer in model._flatten_layers()
        if not layer.trainable
        for variable in layer.weights
    }
    state = [weight for weight in model.non_trainable_weights if id(weight) not in fixed]
    return [*model.trainable_weights, *state]


def readable_bytes(size):
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
