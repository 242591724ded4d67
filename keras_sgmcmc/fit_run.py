"""One `fit` as the callbacks see it: its data, its checks, and the step that they are traced into.

Keras makes `model.train_function`, calls `on_train_begin`, and reads the attribute at every batch.
So a wrapper that is put there when training begins meets the data, which no callback does, and may
run another step than the plain one.
"""

import contextlib
import logging
from typing import NamedTuple

import keras
import tensorflow as tf
from keras import tree

from keras_sgmcmc import fused, guards
from keras_sgmcmc.data import Minibatches
from keras_sgmcmc.optimizers.base import Sampler

_logger = logging.getLogger(__name__)

# What passes batches on one by one: operations of users, and what a strategy adds to them.
_PASSING = {
    "_AutoShardDataset",
    "_MapDataset",
    "_OptionsDataset",
    "_ParallelMapDataset",
    "_PrefetchDataset",
    "_RebatchDataset",
    "_RestructuredDataset",
}
# Compositions that a callback keeps, so that changing between a few sets of callbacks is free.
_KEPT = 4


def join(callback, in_graph=False):
    """The `FitRun` of the fit that begins: for a callback's `on_train_begin`.

    Args:
        callback: A callback with a `model` and an `optimizer`.
        in_graph: Whether the callback is an `InGraphCallback`, to be traced into the step.

    Raises:
        ValueError: If the model is compiled for several replicas in a way that Keras can't run.
    """
    model, optimizer = callback.model, callback.optimizer
    _check_replicas(model)
    run = model.train_function
    if not (isinstance(run, FitRun) and run.admits(callback)):
        run = FitRun(model, optimizer, run.plain if isinstance(run, FitRun) else run)
        # There is none in a loop of the user's own.
        if run.plain is not None:
            model.train_function = run
    run.members.append(callback)
    if in_graph:
        run.in_graph.append(callback)
    return run


def _check_replicas(model):
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas == 1:
        return
    given = {"steps_per_execution": model.steps_per_execution, "jit_compile": model.jit_compile}
    for name, plain in (("steps_per_execution", 1), ("jit_compile", False)):
        if given[name] != plain:
            raise ValueError(
                f"Keras can't run `{name}={given[name]}` on {replicas} replicas, and the callbacks "
                f"of keras_sgmcmc don't try. Compile the model with `{name}={plain}`. "
                f"Received: {name}={given[name]}"
            )


class FitRun:
    """The wrapper around `model.train_function` that the callbacks of one `fit` share.

    At the first batch, before an element is taken, it looks at the iterator, checks what is fed
    against the optimizer, and moves `minibatches` to the batch that the optimizer's count asks for.
    Then it steps aside, unless there are in-graph callbacks, or steps to fuse: on `minibatches`
    the steps of `steps_per_execution` run as one compiled program where that is faster. Such a run
    stops where a callback has to act (`StepCallback.exact_step`), unless there is only one and all
    that it wants can be written down (`StepCallback.recorded`), and at the end of an epoch.
    `train_on_batch`, whose iterator is a Python generator, always gets the plain step, also in the
    middle of a fit.

    Attributes:
        plain: The function that Keras made of the model's own step; None if there is none yet.
        members: The callbacks that joined.
        in_graph: Those that are traced into the step; the first is the innermost.
        source: From the first batch on, the `Minibatches` that the data come from, or None.
        batch_size: From then on, the rows of a step on all replicas; None if they aren't known.
        history: `model.history`, which is new in every `fit`.
        fuses: Whether steps are fused, None before the first batch.
    """

    def __init__(self, model, optimizer, plain):
        self.model, self.optimizer, self.plain = model, optimizer, plain
        self.members, self.in_graph = [], []
        self.source = self.batch_size = None
        self.history = getattr(model, "history", None)
        self._guard = self._composition = None
        self._begun = self._closed = False
        self.fuses = None
        self._stream = self._iterator = self._recording = self._recorded = None

    def admits(self, callback):
        """Whether `callback` can join: it belongs to the same fit, and isn't in it yet.

        A `CallbackList` of the user's own may bring the history of an interrupted fit again.
        """
        return self._is_current() and all(member is not callback for member in self.members)

    def _is_current(self):
        return not self._closed and self.history is getattr(self.model, "history", None)

    def guard(self):
        """A `FitGuard` for the first callback that asks; None for others, or if none is needed."""
        if self._guard is not None or not isinstance(self.optimizer, Sampler):
            return None
        self._guard = guards.FitGuard(self.model, self.optimizer)
        return self._guard

    def close(self):
        """Leave nothing on the model: for `on_train_end`."""
        self._closed = True
        self._step_aside()

    def _step_aside(self):
        if self.model.train_function is self:
            self.model.train_function = self.plain

    def __call__(self, iterator):
        if not isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
            return self.plain(iterator)
        if not self._is_current():
            self._step_aside()
            return self.plain(iterator)
        if not self._begun:
            self._begin(iterator)
            self._begun = True
        if self.fuses:
            steps = self._fused_steps()
            if steps is not None:
                return self._run_fused(steps, iterator)
            self.fuses = False
        if not self.in_graph:
            self._step_aside()
            return self.plain(iterator)
        return self._composed().function(iterator)

    # Fused steps.

    def _fused_steps(self):
        """The program that takes the place of Keras' loop; None if there is none."""
        function, step = self.plain, self.model.train_step
        if self.in_graph:
            composed = self._composed()
            function, step = composed.function, composed.step
        if self._stream is None:
            self._stream = fused.Stream(self.source, self.model.steps_per_execution)
        return fused.fused_steps(
            function, step, self.model, self.optimizer, self._stream, self._recorded
        )

    def _run_fused(self, steps, iterator):
        """What Keras would do in one call, to the batch: never beyond the end of an epoch.

        The iterator is left alone; the batches are those that it would have brought.
        """
        if self._iterator is not iterator:
            self._iterator, self._taken, self._done, self._calls = iterator, 0, 0, 0
            self._first = self.source.position
        total = next((n for n in (m.params.get("steps") for m in self.members) if n), None)
        if total is not None and self._done >= total:
            self._done = 0  # the same iterator in the next epoch, under `steps_per_epoch`
        self._calls += 1
        count, left = self.model.steps_per_execution, self.source.steps - self._taken
        if left == 0:
            raise StopIteration
        # Keras takes every call for a full one, and drops an iterator that it thinks is exhausted.
        if self._calls * count >= self.source.steps:
            count = left
        count = min(count, left)
        # A tensor of the last program, which is waited for only where a callback may have to act.
        self._batches = None
        if total is not None:
            count = min(count, total - self._done)
        self._done += count
        if steps.record is not None:
            self._recording.begin_record(steps.record)
        while count:
            # No more than there is room for in a record.
            most = self.model.steps_per_execution if steps.record else self._batches_to_next_stop()
            some = min(count, most)
            self._stream.position = self._first + self._taken
            try:
                logs, self._batches = steps(self._stream, some)
            finally:
                if steps.record is not None:
                    # Also those of a program that was interrupted.
                    self._recording.take(steps.record.fetch())
            self._taken += some
            count -= some
            if count and steps.record is None:
                step = int(self._batches) // (self.optimizer.gradient_accumulation_steps or 1)
                for member in self._stopping():
                    member.arrive(step=step)
        return logs

    def _stopping(self):
        return [m for m in self.members if getattr(m, "exact_step", lambda: None)() is not None]

    def _batches_to_next_stop(self):
        """Batches up to the next step at which a callback has to act."""
        stops = [member.exact_step() for member in self._stopping()]
        if not stops:
            return self.model.steps_per_execution
        if self._batches is None:
            self._batches = self.optimizer._iterations.numpy()
        batches = min(stops) * (self.optimizer.gradient_accumulation_steps or 1)
        return max(1, batches - int(self._batches))

    # The data.

    def _begin(self, iterator):
        self.source, regrouped = _source(iterator)
        self.batch_size = _batch_size(iterator, self.source)
        # A step of the user's own may train some of the variables only.
        plain = type(self.model).train_step is keras.Model.train_step
        with self.model.distribute_strategy.scope(), tf.init_scope():
            if self.in_graph:
                _build(self.model, iterator)
                for callback in self.in_graph:
                    callback.prepare()
            elif plain and _is_built(self.model):
                # Variables that are made in the step would have it traced twice.
                _build_optimizer(self.model)
        if isinstance(self.optimizer, Sampler):
            guards.check_data(self.optimizer, self.source, self.batch_size)
        if self._guard is not None:
            self._guard.first_batch(iterator, self.source)
        if self.source is not None and not regrouped:
            self._position()
        self._choose_fusing(iterator)

    def _choose_fusing(self, iterator):
        model = self.model
        against = fused.reason_against(model, self.source, iterator)
        if against is None and not self.in_graph:
            # What is in it, and how large it is, are known once it's built.
            try:
                _build(model, iterator)
            except ValueError as error:
                against = str(error)
            else:
                against = fused.reason_against(model, self.source, iterator)
        self.fuses = against is None
        if against is not None and model.steps_per_execution > 1:
            _logger.debug("Steps of `%s` are not fused: %s", model.name, against)
        if self.fuses:
            for member in self.members:
                if hasattr(member, "begin_if_built"):
                    member.begin_if_built()
            stopping = self._stopping()
            if len(stopping) == 1:
                (self._recording,) = stopping
                self._recorded = self._recording.recorded()

    def _position(self):
        """Let step t see batch t, also if a chain was restored, broken off, or evaluated on."""
        if self.optimizer is None or self.source.positioned:
            return
        # Batches, of which gradient accumulation makes several an update.
        batches = int(self.optimizer._iterations.numpy())
        if batches > 0:
            self.source.move(batches)

    # The composed step.

    def _composed(self):
        callbacks = tuple(self.in_graph)
        if self._composition is None or not self._composition.serves(self.plain, callbacks):
            self._composition = self._known(callbacks) or self._compose(callbacks)
        return self._composition

    def _known(self, callbacks):
        kept = callbacks[0].compositions
        return next((known for known in kept if known.serves(self.plain, callbacks)), None)

    def _compose(self, callbacks):
        # Read first: `retrace` may be called while `wrap` runs.
        versions = tuple(callback.version for callback in callbacks)
        step = self.model.train_step
        for callback in callbacks:
            step = callback.wrap(step)
            if not callable(step):
                raise TypeError(
                    f"`{type(callback).__name__}.wrap` should return a function of the data. "
                    f"Received: {step!r}. Return `step` to leave it as it is."
                )
        try:
            with _step_on(self.model, step):
                self.model.make_train_function(force=True)
            function = self.model.train_function
            made = _Composition(self.plain, callbacks, versions, step, function)
        finally:
            self.model.train_function = self
        # By a callback, not by the model: what only an abandoned callback knows goes with it.
        kept = [known for known in callbacks[0].compositions if known.may_serve(self.plain, made)]
        callbacks[0].compositions = [made, *kept[: _KEPT - 1]]
        return made


class _Composition(NamedTuple):
    """A train function with callbacks in it, beside the plain one of the same compilation."""

    plain: object
    callbacks: tuple
    versions: tuple
    step: object
    function: object

    def serves(self, plain, callbacks):
        return (
            self.plain is plain
            and len(self.callbacks) == len(callbacks)
            and all(one is other for one, other in zip(self.callbacks, callbacks, strict=True))
            and self.versions == tuple(callback.version for callback in callbacks)
        )

    def may_serve(self, plain, newer):
        """Whether it's of use in another fit, beside one that is `newer`."""
        return self.serves(plain, self.callbacks) and not self.serves(plain, newer.callbacks)


@contextlib.contextmanager
def _step_on(model, step):
    # Past `__setattr__`, in which Keras would track what it finds.
    attributes = vars(model)
    before = attributes.get("train_step")
    attributes["train_step"] = step
    try:
        yield
    finally:
        if before is None:
            del attributes["train_step"]
        else:
            attributes["train_step"] = before


def _build(model, iterator):
    """Build a model and its optimizer as its first batch would, without taking it."""
    if not _is_built(model):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(iterator.element_spec)
        # What is used in training alone is trained too.
        training = {"training": True} if model._call_has_training_arg else {}
        try:
            model(tree.map_structure(_symbolic, x), **training)
        except Exception as error:
            raise ValueError(
                f"The model `{model.name}` could not be built from the shapes of its data alone, "
                "which callbacks that are traced into its step need. Build it first: call it on a "
                f"batch, `model(x[:1])`. Received: data of {x}, and {type(error).__name__}: {error}"
            ) from error
    _build_optimizer(model)


def _is_built(model):
    layers = model._flatten_layers(include_self=type(model).call is not keras.Model.call)
    return all(layer.built for layer in layers)


def _build_optimizer(model):
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def layers_with_statistics(model):
    """The layers with weights that are not trained but move, as batch normalization has."""
    return [
        layer
        for layer in model._flatten_layers()
        if layer.trainable
        and layer._non_trainable_variables
        and not isinstance(layer, keras.layers.Normalization)
    ]


def _symbolic(spec):
    return keras.KerasTensor(spec.shape, spec.dtype.name)


def _is_distributed(iterator):
    return isinstance(iterator, tf.distribute.DistributedIterator)


def _source(iterator):
    """The `Minibatches` upstream of an iterator or None, and whether it may regroup their rows."""
    worker = getattr(iterator, "_iterators", [iterator])[0]
    upstream = [(getattr(worker, "_dataset", None), False)]
    while upstream:
        dataset, regrouped = upstream.pop()
        if isinstance(dataset, Minibatches):
            return dataset, regrouped
        regrouped = regrouped or type(dataset).__name__ not in _PASSING
        upstream.extend((above, regrouped) for above in getattr(dataset, "_inputs", list)())
    return None, False


def _batch_size(iterator, minibatches):
    """Rows of a step on all replicas; None if they aren't known."""
    if _is_distributed(iterator):
        return None if minibatches is None else minibatches.batch_size
    shapes = [spec.shape for spec in tree.flatten(iterator.element_spec) if hasattr(spec, "shape")]
    return next((shape[0] for shape in shapes if shape.rank), None)
