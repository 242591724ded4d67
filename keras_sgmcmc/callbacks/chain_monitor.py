"""Stops a chain that diverges."""

import math

import keras
from keras import ops

from keras_sgmcmc import compilation, guards
from keras_sgmcmc.callbacks.step_callback import StepCallback
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.validation import positive_integer

# Unstable steps multiply the distance from the mode by |1 - eta h| each; 2.5 for eta h makes that
# 57 in ten steps. Nothing else makes the largest weight grow so twice in a row.
_GROWTH = 30.0


class DivergenceError(RuntimeError):
    """A chain has diverged.

    Attributes:
        step: The optimizer step at which it was seen.
        variable: Path of the variable.
    """

    def __init__(self, message, step, variable):
        super().__init__(message)
        self.step = step
        self.variable = variable


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class ChainMonitor(StepCallback):
    """Stop the run when a weight is not finite or grows without bound.

    Every `every` steps, and when an epoch ends, the largest absolute weight of every variable is
    computed on the device. The run stops if one isn't finite, or if one has grown more than 30
    times from check to check twice in a row: an unstable step (learning rate times curvature above
    2) is found long before it overflows.

    It also checks, at the first batch, that what is compiled means the posterior that the sampler's
    arguments say: see `docs/gotchas.md`. `PosteriorSamples` brings a monitor of its own.

    Args:
        every: Steps between two checks. Defaults to `10`.

    Raises:
        DivergenceError: In training; it names the step and the variable.
        ValueError: At the first batch, if the compiled loss is not the mean over rows of a negative
            log-likelihood.
    """

    def __init__(self, every=10):
        super().__init__()
        self.every = positive_integer("every", every)

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self._rows = guards.RowCount(self.model)
        self._previous = None
        self._growing = None

    def on_first_batch(self, step):
        guards.check_loss(self.model)
        self._variables = list(self.model.trainable_variables)
        self._largest = compilation.traced(
            lambda: ops.stack([_largest_absolute(variable) for variable in self._variables])
        )

    def next_due(self, step):
        return step + self.every

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if self._rows is not None:
            self._rows.batch_ended(batch, self.params.get("steps"))

    def on_due(self, step, logs):
        self.check(step)

    def on_epoch_end(self, epoch, logs=None):
        step = self.current_step()
        self.check(step, growth=False)
        if self._rows is not None:
            if isinstance(self.optimizer, Sampler):
                self._rows.check(self.optimizer.train_size)
            self._rows = None

    def check(self, step, growth=True):
        """Raise `DivergenceError` if the chain has diverged by `step`."""
        largest = [float(value) for value in ops.convert_to_numpy(self._largest())]
        for value, variable in zip(largest, self._variables, strict=True):
            if not math.isfinite(value):
                raise self._error(step, variable, "is not finite")
        if not growth:
            return
        growing = set()
        if self._previous is not None:
            growing = {
                i
                for i, (now, before) in enumerate(zip(largest, self._previous, strict=True))
                if before > 0 and now > _GROWTH * before
            }
        diverging = growing & (self._growing or set())
        if diverging:
            i = max(diverging, key=lambda i: largest[i])
            raise self._error(
                step, self._variables[i], f"grows without bound (largest weight {largest[i]:.3g})"
            )
        self._previous, self._growing = largest, growing

    def _error(self, step, variable, what):
        return DivergenceError(
            f"The chain has diverged: at step {step} variable {variable.path} {what}. Draws taken "
            "before are kept. Use a smaller `learning_rate`: it must stay below 2 divided by the "
            "largest curvature of the mean loss, and far below for accurate variances.",
            step,
            variable.path,
        )

    def get_config(self):
        return {"every": self.every}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def _largest_absolute(variable):
    value = ops.convert_to_tensor(variable)
    magnitude = ops.where(ops.isfinite(value), ops.abs(value), math.inf)
    return ops.cast(ops.max(magnitude, initial=0.0), "float64")
