"""Stops a chain that diverges."""

import math
import warnings

import keras
import numpy as np
from keras import ops

from keras_sgmcmc import compilation, fit_run
from keras_sgmcmc.callbacks.chain_health import ChainHealth
from keras_sgmcmc.callbacks.step_callback import StepCallback
from keras_sgmcmc.stability import step_curvature
from keras_sgmcmc.validation import positive_integer

# A chain diverges if its largest weight grows by a tenth a step, for so many steps in a row, each
# time that it is looked at, and a thousandfold in all. An unstable step multiplies the distance
# from the mode by |1 - eta h|, every step: 1.5 at eta h = 2.5, a thousandfold in 17. A chain that
# only travels, however far, grows linearly at most, and slower than this after ten steps.
_GROWTH = 1.1
_STEPS = 30
_TOTAL = 1000.0
# Growth is judged over at least so many steps, since batches differ.
_WINDOW = 10
# Share of the largest stable step above which a warning is due.
_CLOSE = 0.75


class DivergenceError(RuntimeError):
    """A chain has diverged.

    Attributes:
        step: The optimizer step at which it was seen.
        variable: Path of the variable.
    """

    def __init__(self, message, step=None, variable=None):
        super().__init__(message)
        self.step = step
        self.variable = variable


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class ChainMonitor(StepCallback):
    """Stop the run when a weight is not finite or grows without bound.

    The largest absolute weight of every variable is computed on the device every `every` steps, at
    the end of an epoch, and when the loss is not finite. The run stops if one isn't finite, or if
    they grow exponentially for 30 steps, which finds an unstable step (learning rate times
    curvature above 2.1 or so) long before it overflows.

    It stops by raising `DivergenceError` out of `fit`. A run that ended normally would look
    like a chain that can be used, and `keras.callbacks.BackupAndRestore` would delete its
    checkpoint: this way it keeps the last one before the error.

    The monitor also checks what is compiled and fed against the arguments of the sampler: that
    losses are means over rows of negative log-likelihoods, that `minibatches` are of `train_size`
    rows (and of `batch_size`, for a sampler that has one), or, of other data and after an epoch,
    that it has `train_size` rows and even batches. It warns, or refuses before the first update.
    History gets what `SGFS` and `ConstantSGD` report of their steps (`optimizer.noise_logs()`), and
    for their diagonal forms on `minibatches`, once the warm-up is over, `step_curvature`: the
    largest eigenvalue of H A at that time, with a warning if it is close to what makes the chain
    unstable.

    With `health=True` the progress bar and History show two numbers that should be 1, means over
    the later half of the chain that the monitor has seen, for the gradient g that the sampler gets
    with the prior's, its H and Q, D sampled weights, and the distance from their mean m:

    | name | ratio of means | 1 says |
    |---|---|---|
    | `configurational_temperature` | (theta - m)' N g / (D T) | as wide as the posterior |
    | `stationarity` | 2 (theta - m)' H g / ((H g)' H g + tr Q) | the burn-in is over |

    A warning, once, says if one is off by more than 0.1 and by four standard errors (of 20 batch
    means): the first at the end of an epoch, if the chain is stationary; the other when `fit` ends.
    Below 1 the chain still travels, or has directions that are slower than the run is long. For
    SGLD the first is 1 + |H g|^2 / tr Q times the other, which the noise of the batches and the
    length of the step make larger than 1. See `docs/diagnostics.md`. Models of more than
    100,000 weights are measured at every 20th step. Where H is a matrix, and with momentum, there
    is no `stationarity`; at T = 0 there is no temperature.

    `PosteriorSamples` is a monitor too, without the health.

    Args:
        every: Steps between two checks. Defaults to `10`.
        health: Whether to measure the health of the chain. It is traced into the step, as an
            `InGraphCallback` is, and holds the weights twice more. Draws do not change by it.
            Defaults to `False`.

    Raises:
        DivergenceError: In training; it names the step and the variable.
        ValueError: At the first batch, if the compiled loss is not the mean over rows of a negative
            log-likelihood; if the optimizer is a `MultiOptimizer`; if the model is compiled with
            `jit_compile=True` or `steps_per_execution` above 1 for several replicas, which Keras
            can't run; with `health=True`, if the optimizer is not a sampler, or under a
            distribution strategy.

    References: F. Wenzel et al., "How good is the Bayes posterior in deep neural networks
    really?", ICML 2020 (configurational temperature). S. Yaida, "Fluctuation-dissipation relations
    for stochastic gradient descent", ICLR 2019, arXiv:1810.00004 (stationarity).
    """

    def __init__(self, every=10, health=False):
        super().__init__()
        self.every = positive_integer("every", every)
        if not isinstance(health, (bool, np.bool_)):
            raise ValueError(f"`health` should be True or False. Received: health={health!r}")
        self.health = bool(health)
        self._health = ChainHealth() if self.health else None
        self._watched, self._read = [], (None, [])
        self._stability_checked, self._step_curvature = False, None

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self._run = fit_run.join(self)
        self._guard = self._run.guard()
        # Of several monitors the one that has the guard makes what is checked once.
        self._leads = self._guard is not None
        if self._health is not None:
            self._health.set_model(self.model)
            self._health.on_train_begin()

    def on_train_end(self, logs=None):
        if self._health is not None:
            self._health.warn(ended=True)
            self._health.on_train_end()
        self._run.close()
        self._run = None

    def begin(self):
        variables = [v for v in self.model.trainable_variables if math.prod(v.shape) > 0]
        if not variables:
            raise ValueError(
                "The model has no trainable variables, so there is nothing to sample. Unfreeze "
                "layers and compile the model again."
            )
        shown = self._shown()
        if not (same_variables(variables, self._watched) and same_variables(shown, self._read[1])):
            self._watched = variables

            def read():
                return ops.stack(list(map(_largest, variables))), [
                    ops.convert_to_tensor(variable) for variable in shown
                ]

            self._read = compilation.concrete(read), shown
        _, largest = self._look()
        self._checked = self._judged = self._growing_since = self.step
        self._previous = self._smallest = largest

    def _shown(self):
        """Variables whose values are wanted too, where the weights are looked at."""
        return []

    def next_due(self):
        return self._checked + self.every

    def on_due(self, logs):
        # First, since an unstable chain diverges within some steps.
        self._check_stability()
        if self.step >= self._checked + self.every:
            self.check()

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        steps = self.params.get("steps")
        if self._guard is not None:
            self._guard.batch_ended(batch, steps)
        # A last batch is checked here too, since `BackupAndRestore` may come first when the epoch
        # ends; and a loss that isn't finite is what weights that aren't give at the next batch.
        last = steps is not None and batch + 1 >= steps and self._checked < self.step
        loss = (logs or {}).get("loss")
        if last or (isinstance(loss, float) and not math.isfinite(loss)):
            self.check()
        if self._health is not None and logs is not None:
            logs.update(self._health.logs)

    def on_epoch_end(self, epoch, logs=None):
        if not self.begun:
            return
        self.check()
        if self._guard is not None:
            self._guard.epoch_ended()
            self._guard = None
        if self._health is not None:
            self._health.warn(ended=False)
            if logs is not None:
                logs.update(self._health.logs)
        if logs is not None and hasattr(self.optimizer, "noise_logs"):
            logs.update(self.optimizer.noise_logs())
            if self._step_curvature is not None:
                logs["step_curvature"] = self._step_curvature

    def _check_stability(self):
        """Once, after the warm-up, where a diagonal H may be too long for the curvature."""
        optimizer, source = self.optimizer, self._run.source
        if self._stability_checked or not self._leads or source is None:
            return
        diagonal = getattr(optimizer, "noise_structure", None) == "diagonal"
        if not diagonal or self.model.distribute_strategy.num_replicas_in_sync > 1:
            self._stability_checked = True
            return
        if optimizer.is_warming_up:
            return
        self._stability_checked = True
        self._step_curvature = step_curvature(self.model, optimizer, source)
        limit = optimizer.stability_limit
        if self._step_curvature is not None and self._step_curvature > _CLOSE * limit:
            warnings.warn(
                f"The largest eigenvalue of H A is {self._step_curvature:.3g}, and the chain is "
                f"unstable from {limit:g} on: in that direction the variance is too large, or "
                "grows without bound. A diagonal H doesn't know that weights are correlated: take "
                f"smaller batches, `max_step`, {optimizer.steadier}.",
                stacklevel=2,
            )

    def check(self):
        """Raise `DivergenceError` if the chain has diverged by now."""
        self._checked = self.step
        variable, largest = self._look()
        steps, before = self.step - self._judged, self._previous
        if steps < _WINDOW:
            return
        self._judged, self._previous = self.step, largest
        if not largest > before * _GROWTH**steps > 0:
            self._growing_since, self._smallest = self.step, largest
        elif self.step - self._growing_since >= _STEPS and largest > _TOTAL * self._smallest:
            raise self.error(
                variable,
                f"grows without bound, since step {self._growing_since} (largest weight now: "
                f"{largest:.3g})",
            )

    def _values(self):
        """The largest weight of each watched variable, and the values of those shown."""
        return self._read[0]()

    def _look(self):
        """The variable with the largest weight, and that weight, which has to be finite."""
        largest, self._values_seen = self._values()
        largest = ops.convert_to_numpy(largest)
        worst = int(np.argmax(largest))  # the first NaN, if there is one
        if not math.isfinite(largest[worst]):
            raise self.error(self._watched[worst], "is not finite")
        if self._health is not None:
            self._health.look(self.step)
        return self._watched[worst], float(largest[worst])

    def error(self, variable, what):
        """The `DivergenceError` for a variable that `what`."""
        return DivergenceError(
            f"The chain has diverged: at step {self.step} variable {variable.path} {what}. Use a "
            "smaller `learning_rate`: it must stay below 2 divided by the largest curvature of the "
            "mean loss, and far below for accurate variances.",
            self.step,
            variable.path,
        )

    def get_config(self):
        return {"every": self.every, "health": self.health}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def same_variables(some, others):
    """Whether two lists hold the same variables (not equal ones) in the same order."""
    return list(map(id, some)) == list(map(id, others))


def _largest(variable):
    # Two reductions, which NaN passes through, need no temporary arrays.
    value = ops.convert_to_tensor(variable)
    return ops.cast(ops.maximum(ops.max(value), -ops.min(value)), "float64")
