"""What the callbacks share: they act at true optimizer steps, however Keras groups batches."""

import warnings

import keras


def base_optimizer(model):
    """The optimizer that updates the model, under the wrapper that mixed precision puts on it."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ValueError(
            "The callbacks of keras_sgmcmc need one optimizer with one count of steps; a "
            "`MultiOptimizer` has several. Compile the model with one sampler for all variables. "
            f"Received: optimizer={optimizer!r}"
        )
    return optimizer


class StepCallback(keras.callbacks.Callback):
    """Base class of callbacks that act at certain optimizer steps.

    Batch indices say little: under `steps_per_execution` they jump, under gradient accumulation
    they outrun the updates, and a step that loss scaling skips moves no weight. The one count is
    `optimizer.iterations`, which is first read at the first batch, because `BackupAndRestore`
    restores it when training begins, and then after every batch.

    Subclasses implement `begin`, `next_due` and `on_due`.

    Attributes:
        step: The value of `optimizer.iterations` now.
        begun: Whether `begin` was called in this fit.
    """

    def begin(self):
        """Called once in a fit: before its first update, as soon as the model has its variables.

        For a model that is built by its first batch that is after the first update.
        """

    def next_due(self):
        """The next step after `self.step` at which `on_due` is wanted."""
        raise NotImplementedError

    def on_due(self, logs):
        """Called after the first batch at or after the due step."""
        raise NotImplementedError

    @property
    def optimizer(self):
        return base_optimizer(self.model)

    @property
    def execution_block(self):
        """Most updates that run between two calls of a callback."""
        accumulated = self.optimizer.gradient_accumulation_steps or 1
        return max(1, self.model.steps_per_execution // accumulated)

    def warn_if_coarsened(self, name, interval):
        """Warn where Keras calls back less often than, or out of step with, `interval` updates."""
        block = self.execution_block
        if interval % block:
            coarsened = -(-interval // block) * block
            spacing = f"becomes {coarsened}" if interval < block else f"varies, {coarsened} at most"
            warnings.warn(
                f"`steps_per_execution={self.model.steps_per_execution}` runs {block} updates "
                f"between two callbacks, so the interval asked for by `{name}={interval}` "
                f"{spacing}. Choose a multiple of {block}.",
                stacklevel=2,
            )

    def last_step(self):
        """The step at which this `fit` will end; None if Keras does not know."""
        batches, epochs = self.params.get("steps"), self.params.get("epochs")
        if batches is None or epochs is None:
            return None
        batches *= epochs - self._first_epoch
        return self._first_step + batches // (self.optimizer.gradient_accumulation_steps or 1)

    def on_train_begin(self, logs=None):
        self.begun = False
        self._first_epoch = self._first_step = None
        self.execution_block  # noqa: B018  refuses an optimizer without a count of steps

    def on_epoch_begin(self, epoch, logs=None):
        if self._first_epoch is None:
            self._first_epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self._first_step is None:
            self._first_step = self.step = int(self.optimizer.iterations)
            if all(layer.built for layer in self.model._flatten_layers()):
                self._begin()

    def on_train_batch_end(self, batch, logs=None):
        if not self.begun:
            self._begin()
        self.step = int(self.optimizer.iterations)
        if self.step >= self._due:
            self.on_due(logs)
            self._due = self.next_due()

    def _begin(self):
        self.begun = True
        self.begin()
        self._due = self.next_due()

    def is_last_batch(self, batch):
        """Whether an epoch ends with this batch; False if Keras does not know its length."""
        return batch + 1 >= (self.params.get("steps") or float("inf"))
