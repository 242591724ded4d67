"""Collects draws of the weights while `fit` runs."""

import logging
import warnings

import keras
import numpy as np
from keras import ops

from keras_sgmcmc.callbacks.chain_monitor import ChainMonitor
from keras_sgmcmc.callbacks.step_callback import StepCallback
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.posterior import Posterior
from keras_sgmcmc.validation import positive_integer

_logger = logging.getLogger("keras_sgmcmc")


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class PosteriorSamples(StepCallback):
    """Keep a thinned sample of the chain: the draws of a `Posterior`.

    A draw is taken at the optimizer steps burn_in + thinning, burn_in + 2 thinning, ... or, under
    `steps_per_execution`, at the first callback at or after each of them, with the true step
    number. It holds a copy of the sampled variables and of the non-trainable state that belongs to
    them, such as the moving statistics of BatchNorm; frozen layers are kept once. The number of
    draws and their memory are announced before the first step.

    The chain is watched by a `ChainMonitor`; a draw that isn't finite is never stored.

    Logs: `draws`, the number taken, and `burn_in_left`, the steps until sampling begins (an upper
    bound of steps done counts them down; 0 means that the chain is sampling).

    Args:
        burn_in: Steps to discard, counted by `optimizer.iterations`: a chain that is resumed or
            fitted again doesn't burn in again.
        thinning: Steps from draw to draw. Defaults to `1`.
        max_samples: Largest number of draws to hold, or None. The interval is made a multiple of
            `thinning` so that at most so many fit into the run, evenly spaced; should training go
            on after that, every second draw is dropped and the interval doubled.
        step_weights: Whether draws are weighted by the step size, as averages under a decreasing
            step have to be (Welling & Teh 2011, eq. 11; Teh et al. 2016). Defaults to False.

    Raises:
        ValueError: If an argument is out of range; at the first batch, if no draw can come.
        DivergenceError: In training, if the chain diverges.

    Example:

    >>> samples = sg.callbacks.PosteriorSamples(burn_in=1000, thinning=100)
    >>> model.fit(data, epochs=20, callbacks=[samples])
    >>> probabilities = samples.posterior.predict(x_test)
    """

    def __init__(self, burn_in, thinning=1, max_samples=None, step_weights=False):
        super().__init__()
        self.burn_in = positive_integer("burn_in", burn_in, minimum=0)
        self.thinning = positive_integer("thinning", thinning)
        self.max_samples = None
        if max_samples is not None:
            self.max_samples = positive_integer("max_samples", max_samples)
        self.step_weights = bool(step_weights)
        self._monitor = ChainMonitor()
        self._interval = self.thinning
        self._variables = None
        self._draws, self._steps, self._sizes = [], [], []

    @property
    def posterior(self):
        """The draws so far, as a `Posterior` of the model."""
        if self._variables is None:
            raise ValueError("There is no draw yet: pass this callback to `model.fit` first.")
        return Posterior(
            self.model,
            self._variables,
            self._draws,
            self._steps,
            self._sizes if self.step_weights else None,
        )

    def set_model(self, model):
        super().set_model(model)
        self._monitor.set_model(model)

    def set_params(self, params):
        super().set_params(params)
        self._monitor.set_params(params)

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self._monitor.on_train_begin(logs)
        if not isinstance(self.optimizer, Sampler):
            warnings.warn(
                f"`{type(self.optimizer).__name__}` is not a sampler: its iterates are not draws "
                "from a posterior. Compile with `SGLD` or `pSGLD`.",
                stacklevel=2,
            )

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        self._monitor.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        self._monitor.on_train_batch_begin(batch, logs)
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self._monitor.on_train_batch_end(batch, logs)
        super().on_train_batch_end(batch, logs)
        self._log(logs)

    def on_epoch_end(self, epoch, logs=None):
        self._monitor.on_epoch_end(epoch, logs)
        self._log(logs)

    def _log(self, logs):
        if logs is not None:
            logs["draws"] = len(self._draws)
            logs["burn_in_left"] = max(0, self.burn_in - self._step_bound)

    def on_first_batch(self, step):
        variables = _drawn_variables(self.model)
        if self._variables is None:
            self._variables = variables
        elif [id(v) for v in variables] != [id(v) for v in self._variables]:
            raise ValueError(
                "The sampled variables are not those of the draws taken before: the model was "
                "changed, or layers were frozen or unfrozen. Use a new `PosteriorSamples`."
            )
        self._frozen_but_known = _copies(_frozen_variables_the_optimizer_knows(self.model))
        self.warn_if_coarsened("thinning", self.thinning)
        last = self.last_step(step)
        if last is not None and not self._draws and self.max_samples is not None:
            possible = self._due_between(step, last, self.thinning)
            self._interval = self.thinning * max(1, -(-possible // self.max_samples))
        self._announce(step, last)

    def _announce(self, step, last):
        size = sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in self._variables)
        if last is None:
            message = (
                f"The length of the epochs is unknown; a draw is taken every {self._interval} steps"
            )
            message += f" after step {self.burn_in} and takes {_readable(size)}."
        else:
            count = self._due_between(step, last, self._interval)
            if count == 0:
                raise ValueError(
                    f"No draw can come: training ends at step {last}, and with `burn_in="
                    f"{self.burn_in}` and `thinning={self.thinning}` the next draw is due at step "
                    f"{self.next_due(step)}. Train longer or reduce them; they count updates "
                    "(`optimizer.iterations`), not epochs."
                )
            if self.max_samples is not None:
                count = min(count, self.max_samples)
            message = (
                f"{count} draws of {_readable(size)} each ({_readable(count * size)} in all) will "
                f"be taken by step {last}, one every {self._interval} steps after step "
                f"{max(self.burn_in, step)}."
            )
        _logger.info(message)
        if self.params.get("verbose"):
            print(message)

    def _due_between(self, step, last, interval):
        def taken_by(end):
            return max(0, end - self.burn_in) // interval

        return taken_by(last) - taken_by(step)

    def next_due(self, step):
        taken = max(0, step - self.burn_in) // self._interval
        return self.burn_in + (taken + 1) * self._interval

    def on_due(self, step, logs):
        self._warn_if_frozen_moved()
        draw = _copies(self._variables)
        for array, variable in zip(draw, self._variables, strict=True):
            if not np.all(np.isfinite(array)):
                raise self._monitor._error(step, variable, "is not finite")
        if self.max_samples is not None and len(self._draws) >= self.max_samples:
            self._interval *= 2
            for kept in (self._draws, self._steps, self._sizes):
                del kept[::2]
            if (step - self.burn_in) % self._interval >= self._interval // 2:
                return
        self._draws.append(draw)
        self._steps.append(step)
        self._sizes.append(float(ops.convert_to_numpy(self.optimizer.learning_rate)))

    def _warn_if_frozen_moved(self):
        known = _frozen_variables_the_optimizer_knows(self.model)
        moved = [
            variable.path
            for variable, before in zip(known, self._frozen_but_known, strict=True)
            if not np.array_equal(before, ops.convert_to_numpy(variable))
        ]
        self._frozen_but_known = _copies(known)
        if moved:
            warnings.warn(
                f"The layers of {moved} are frozen, but the compiled step still updates them, and "
                "the draws don't hold them. Call `model.compile` after changing `trainable`.",
                stacklevel=2,
            )

    def get_config(self):
        return {
            "burn_in": self.burn_in,
            "thinning": self.thinning,
            "max_samples": self.max_samples,
            "step_weights": self.step_weights,
        }

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def _copies(variables):
    # Explicit copies: on a CPU the array may be a view of the live buffer.
    return [np.array(ops.convert_to_numpy(variable), copy=True) for variable in variables]


def _drawn_variables(model):
    """The variables that change from draw to draw: trainable ones, and the state of their layers.

    Layers that are frozen keep their statistics too, and the seeds of random layers (the unsigned
    integers) have no part in predictions.
    """
    fixed = {
        id(variable)
        for layer in model._flatten_layers()
        if not layer.trainable
        for variable in layer.variables
    }
    state = [
        variable
        for variable in model.non_trainable_variables
        if id(variable) not in fixed and not str(variable.dtype).startswith("uint")
    ]
    return list(model.trainable_variables) + state


def _frozen_variables_the_optimizer_knows(model):
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    trainable = {id(variable) for variable in model.trainable_variables}
    return [v for v in optimizer._trainable_variables if id(v) not in trainable]


def _readable(size):
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
