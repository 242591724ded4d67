"""Annealing of a float learning rate."""

import math
import warnings

import keras
from keras import ops

from keras_sgmcmc import compilation
from keras_sgmcmc.callbacks.step_callback import base_optimizer, execution_block


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class StepSizeAnnealing(keras.callbacks.Callback):
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
        optimizer, schedule = base_optimizer(self.model), self.schedule
        rate = optimizer._learning_rate
        if not isinstance(rate, keras.Variable):
            raise ValueError(
                "`StepSizeAnnealing` needs an optimizer whose `learning_rate` is a number, and "
                "this one has a schedule or a function of its own. Choose one of the two: a number "
                f"with this callback, or the schedule alone. Received: learning_rate={rate!r}"
            )
        self._value = None
        block = execution_block(self.model)
        if block > 1:
            warnings.warn(
                f"`steps_per_execution={self.model.steps_per_execution}` runs {block} updates "
                f"between two callbacks: `StepSizeAnnealing` changes the step once in {block} "
                "updates. Pass the schedule as `learning_rate` to anneal at every one.",
                stacklevel=2,
            )

        def set_rate():
            value = ops.cast(schedule(optimizer.iterations), rate.dtype)
            rate.assign(value)
            return value

        def call_function():
            step = int(optimizer.iterations.numpy())
            value = float(schedule(step))
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"`schedule` should return a number >= 0. Received: schedule({step}) = {value}"
                )
            rate.assign(value)
            return value

        is_schedule = isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
        # Operation by operation, outside a graph, a schedule costs several times as much.
        self._anneal = compilation.traced(set_rate) if is_schedule else call_function

    def on_train_batch_begin(self, batch, logs=None):
        self._value = self._anneal()

    def on_train_batch_end(self, batch, logs=None):
        self._log(logs)

    def on_epoch_end(self, epoch, logs=None):
        self._log(logs)

    def _log(self, logs):
        if logs is not None and self._value is not None:
            logs["learning_rate"] = float(self._value)

    def get_config(self):
        return {"schedule": keras.saving.serialize_keras_object(self.schedule)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["schedule"]))
