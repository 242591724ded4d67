"""Base class of callbacks whose work is traced into every training step."""

import weakref

import keras
import tensorflow as tf

from keras_sgmcmc import fit_run
from keras_sgmcmc.callbacks.step_callback import base_optimizer
from keras_sgmcmc.optimizers.base import Sampler


class InGraphCallback(keras.callbacks.Callback):
    """A callback that sees every batch and acts at every step, inside the compiled step.

    Keras calls its callbacks between the steps, without the batch, and under `steps_per_execution`
    only once in a block of steps. An in-graph callback wraps the training step itself instead: what
    it does is traced, compiled and repeated with it, in every mode of `compile`.

    Subclasses override `wrap`, and `create_state` if they need variables. Overridden
    `on_train_begin` and `on_train_end` should call `super()`.

    - Several in-graph callbacks go into one trace; the first in the list is the innermost.
    - The model's own step is what the first one wraps, a `train_step` of its own too.
    - The step is traced once for a set of callbacks, also if `fit` is called again;
      `model.compile` makes a new trace.
    - Nothing is left on the model: a fit without the callback, `train_on_batch` (also in the middle
      of a fit), `evaluate`, files and copies have the plain step.
    - Logs that the wrapped step returns reach History and the progress bar. If it adds some, Keras
      logs the values of the last batch as those of the epoch.

    Raises:
        ValueError: When training begins, if the optimizer is a `MultiOptimizer`, or if the model is
            compiled with `jit_compile=True` or `steps_per_execution` above 1 for several replicas,
            which Keras can't run; at the first batch, if the model can't be built without it.

    Example:

    >>> class LargestInput(sg.callbacks.InGraphCallback):
    ...     def create_state(self):
    ...         self.largest = keras.Variable(0.0, trainable=False)
    ...
    ...     def wrap(self, step):
    ...         def wrapped(data):
    ...             self.largest.assign(ops.maximum(self.largest, ops.max(data[0])))
    ...             return step(data)
    ...
    ...         return wrapped
    """

    # Not in `__init__`, which subclasses forget to call.
    version = 0
    compositions = ()
    _home = None
    _run = None

    def create_state(self):
        """Make variables, if `wrap` needs any: called before the first step with this callback.

        Called once for a model (not in every fit), with the model and its optimizer built and in
        the scope of the model's distribution strategy. Another model gets a state of its own.
        """

    def wrap(self, step):
        """A step that does the callback's work around `step`, or inside it.

        Called when the step is composed, not for every batch. An update may be skipped by loss
        scaling or put off by gradient accumulation: compare `optimizer.iterations` before and after
        `step` to see whether there was one.

        Args:
            step: Function of a batch, as Keras gives it to `train_step` (one replica's part of it),
                that trains on it and returns the dict of logs. To be called once.

        Returns:
            A function of the same kind, which is traced.
        """
        return step

    def next_update(self):
        """For a wrapped step, before the update: its number, and whether this batch completes it.

        Returns:
            The value that `optimizer.iterations` will have (if loss scaling does not skip the
            update), and False for the batches that gradient accumulation only adds up; tensors.
        """
        batches = tf.convert_to_tensor(self.optimizer._iterations) + 1
        accumulated = self.optimizer.gradient_accumulation_steps or 1
        return batches // accumulated, batches % accumulated == 0

    def keep(self, name, variables):
        """Save variables of `create_state` with a sampler's state, and restore what it brought.

        Keras' own optimizers have no place for them: with these a chain that goes on begins anew.
        """
        if isinstance(self.optimizer, Sampler):
            for position, variable in enumerate(variables):
                self.optimizer.keep(f"{name}.{position}", variable)

    def retrace(self):
        """Ask for `wrap` to be called, and the step to be traced, anew at the next batch."""
        self.version += 1

    @property
    def optimizer(self):
        """The optimizer that updates the model, under the wrapper of mixed precision."""
        return base_optimizer(self.model)

    def prepare(self):
        """Call `create_state` if the model is not the one it was called for."""
        if self._home is None or self._home() is not self.model:
            self.create_state()
            self._home = weakref.ref(self.model)
            self.retrace()

    def on_train_begin(self, logs=None):
        self._run = fit_run.join(self, in_graph=True)

    def on_train_end(self, logs=None):
        if self._run is not None:
            self._run.close()
            self._run = None

    def __getstate__(self):
        # Graphs are neither copied nor pickled; the model of a copy is another.
        state = dict(self.__dict__)
        for name in ("compositions", "_home", "_run"):
            state.pop(name, None)
        return state
