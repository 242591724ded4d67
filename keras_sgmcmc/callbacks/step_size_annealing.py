"""Annealing of a float learning rate."""

import math
import warnings

import keras

from keras_sgmcmc import compilation
from keras_sgmcmc.callbacks.step_callback import StepCallback


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class StepSizeAnnealing(StepCallback):
    """Set the learning rate of an optimizer from a schedule of its true step.

    For an optimizer made with a number as its learning rate; an optimizer made with a schedule
    anneals by itself, inside the compiled step. Before every batch the learning rate becomes
    `schedule(optimizer.iterations)`, so a resumed run goes on where it stopped. Under
    `steps_per_execution` it stays the same within a block, with a warning.

    Logs: `learning_rate`, the rate of the batch (of the last batch, in an epoch's logs).

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`, for instance
            `keras_sgmcmc.schedules.PowerDecay`, or a function of the step (a Python integer) that
            returns a number >= 0.

    Raises:
        ValueError: When training begins, if the optimizer has a schedule or a callable as its
            learning rate; at a batch, if a function returns something else than a number >= 0.

    Example:

    >>> model.compile(optimizer=sg.SGLD(1e-2, train_size=n), loss=loss)
    >>> annealing = sg.callbacks.StepSizeAnnealing(sg.schedules.BlockDecay(1e-2, every=1000))
    >>> model.fit(data, epochs=10, callbacks=[annealing])
    """

    def __init__(self, schedule):
        super().__init__()
        if not callable(schedule):
            raise ValueError(
                "`schedule` should be a LearningRateSchedule or a function of the step. "
                f"Received: schedule={schedule!r}"
            )
        self.schedule = schedule

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self._rate = self.optimizer._learning_rate
        if not isinstance(self._rate, keras.Variable):
            raise ValueError(
                "`StepSizeAnnealing` needs an optimizer whose `learning_rate` is a number, and "
                "this one has a schedule or a function of its own. Choose one of the two: a number "
                "with this callback, or the schedule alone. "
                f"Received: learning_rate={self._rate!r}"
            )
        if self.execution_block > 1:
            warnings.warn(
                f"`steps_per_execution={self.model.steps_per_execution}` runs "
                f"{self.execution_block} updates between two callbacks: `StepSizeAnnealing` "
                f"changes the step once in {self.execution_block} updates. Pass the schedule as "
                "`learning_rate` to anneal at every one.",
                stacklevel=2,
            )
        self._anneal = self._call_function
        if isinstance(self.schedule, keras.optimizers.schedules.LearningRateSchedule):
            # As a graph, because operation by operation it would cost a third of a small step.
            iterations, rate, schedule = self.optimizer, self._rate, self.schedule
            self._anneal = compilation.traced(
                lambda: rate.assign(schedule(iterations.iterations))
            )

    def _call_function(self):
        step = int(self.optimizer.iterations)
        value = float(self.schedule(step))
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(
                f"`schedule` should return a number >= 0. Received: schedule({step}) = {value}"
            )
        self._rate.assign(value)

    def on_train_batch_begin(self, batch, logs=None):
        self._anneal()

    def on_train_batch_end(self, batch, logs=None):
        self._log(logs)

    def on_epoch_end(self, epoch, logs=None):
        self._log(logs)

    def _log(self, logs):
        if logs is not None:
            logs["learning_rate"] = float(self._rate)

    def get_config(self):
        return {"schedule": keras.saving.serialize_keras_object(self.schedule)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["schedule"]))
