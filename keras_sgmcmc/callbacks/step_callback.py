"""What the callbacks share: they act at true optimizer steps, however Keras groups batches."""

import math
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


def execution_block(model):
    """Most updates that run between two calls of a callback."""
    accumulated = base_optimizer(model).gradient_accumulation_steps or 1
    return -(-model.steps_per_execution // accumulated)


class StepCount:
    """The count of a model's updates, `optimizer.iterations`, read only when it may matter.

    To read a variable between two batches costs as much as all else that a callback does there.
    What another callback does by `train_on_batch` is noticed at the next reading.

    Attributes:
        block: Most updates between two calls of a callback; infinite if it isn't known.
        most: Upper bound of the count now.
    """

    def __init__(self, model):
        self._optimizer, self.block = base_optimizer(model), execution_block(model)
        # A step of the user's own may update several times.
        if type(model).train_step is not keras.Model.train_step:
            self.block = math.inf
        self._read()

    def _read(self):
        self._value = self.most = int(self._optimizer.iterations.numpy())

    def advance(self, value=None):
        """Note that batches were trained on, at most those between two calls of a callback.

        The new `value` may be known.
        """
        if value is None:
            self.most += self.block
        else:
            self._value = self.most = value

    @property
    def value(self):
        """The count now."""
        if self.most != self._value:
            self._read()
        return self._value

    def has_reached(self, step):
        """Whether `value` is `step` or more."""
        return self.most >= step and self.value >= step


class StepCallback(keras.callbacks.Callback):
    """Base class of callbacks that act at certain optimizer steps.

    Batch indices say little: under `steps_per_execution` they jump, under gradient accumulation
    they outrun the updates, and a step that loss scaling skips moves no weight. The one count is
    `optimizer.iterations`, which is first read at the first batch, because `BackupAndRestore`
    restores it when training begins, and then when a step may be due.

    Subclasses implement `begin`, `next_due` and `on_due`.

    Attributes:
        begun: Whether `begin` was called in this fit.
    """

    def __init__(self):
        super().__init__()
        # A `CallbackList` of the user's own need not set it.
        self.params = {}

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
    def step(self):
        """The value of `optimizer.iterations` now."""
        return self._count.value

    def exact_step(self):
        """The next step at which fused steps must stop for this callback; None for none.

        Elsewhere Keras decides how many steps there are between two calls.
        """

    def recorded(self):
        """Variables whose values a program may write down at the exact steps, instead of stops.

        None for stops; else a pair: the variables, and the most steps between two fetches. Such a
        class has `begin_record`, and `take` for what was written down (see `PosteriorSamples`).
        """

    def warn_if_coarsened(self, name, interval):
        """Warn where Keras calls back less often than, or out of step with, `interval` updates."""
        block = execution_block(self.model)
        if interval % block:
            coarsened = -(-interval // block) * block
            outcome = f"becomes {coarsened}" if interval < block else f"varies, up to {coarsened}"
            warnings.warn(
                f"`steps_per_execution={self.model.steps_per_execution}` runs {block} updates "
                f"between two callbacks: the interval of {interval} steps from `{name}` {outcome}. "
                f"Choose a multiple of {block}.",
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
        self._first_epoch = self._first_step = self._count = None
        base_optimizer(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        if self._first_epoch is None:
            self._first_epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self._first_step is None:
            self._count = StepCount(self.model)
            self._first_step = self.step
            self.begin_if_built()

    def begin_if_built(self):
        """Call `begin` if it's time: before the first update, once the model has its variables."""
        if not self.begun and all(layer.built for layer in self.model._flatten_layers()):
            self._begin()

    def on_train_batch_end(self, batch, logs=None):
        if not self.begun:
            self._begin()
        self.arrive(logs)

    def arrive(self, logs=None, step=None):
        """Act if a step at which to act has come; the step may be known."""
        self._count.advance(step)
        if self._count.has_reached(self._due):
            self.on_due(logs)
            self._due = self.next_due()

    def _begin(self):
        self.begun = True
        self.begin()
        self._due = self.next_due()
