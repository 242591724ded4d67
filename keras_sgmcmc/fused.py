"""Many training steps as one compiled program, over batches that are gathered outside it."""

import logging
import math

import keras
import tensorflow as tf

_logger = logging.getLogger(__name__)

# What one block of stacked batches may take; two more are gathered ahead.
_BLOCK_BYTES = 32 * 2**20
# Operations of a step up to which a loop inside XLA is faster on a CPU: it loses the threads of
# large products.
_CPU_OPERATIONS = 1e8


def reason_against(model, source, iterator):
    """Why the steps of a fit can't be fused, or should not be; None if they should."""
    if model.steps_per_execution == 1:
        return "steps_per_execution=1"
    if source is None or getattr(iterator, "minibatches", None) is not source:
        return "the data are not `minibatches` themselves"
    if not source.fuse:
        return "`minibatches(fuse=False)`"
    if model.run_eagerly:
        return "run_eagerly=True"
    if tf.distribute.has_strategy() or model.distribute_strategy.num_replicas_in_sync > 1:
        return "a distribution strategy"
    layers = model._flatten_layers()
    unable = [layer.name for layer in layers if not layer.supports_jit]
    if unable:
        return f"XLA can't compile {unable}"
    if any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU")):
        return None
    slow = [layer.name for layer in layers if _is_slow_in_a_loop(layer)]
    if slow:
        return f"on a CPU a loop inside XLA makes {slow} slow"
    weights = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    if 6 * source.batch_size * weights > _CPU_OPERATIONS:
        return "on a CPU a loop inside XLA makes large products slow"
    return None


def _is_slow_in_a_loop(layer):
    kinds = (keras.layers.RNN, keras.layers.Bidirectional)
    return isinstance(layer, kinds) or "Conv" in type(layer).__name__


class FusedSteps:
    """Runs a step on one batch of `minibatches` after the other, as one program.

    Args:
        step: Function of a batch that returns logs.
        source: The `Minibatches`.
        length: Batches that are gathered at once, at most.
    """

    def __init__(self, step, source, length):
        self.source = source
        spec = source.element_spec
        row_bytes = sum(
            part.dtype.size * part.shape.num_elements() for part in tf.nest.flatten(spec)
        )
        self._length = max(1, min(length, _BLOCK_BYTES // max(1, row_bytes)))
        # Traced once by itself, for the shapes of its logs, and for what it makes at first.
        logs = tf.function(step, autograph=False).get_concrete_function(spec).structured_outputs

        def run(first, last, *stacked):
            def one(index, logs):
                del logs
                batch = tf.nest.pack_sequence_as(spec, [part[index] for part in stacked])
                return index + 1, step(batch)

            nothing = tf.nest.map_structure(lambda out: tf.zeros(out.shape, out.dtype), logs)
            return tf.while_loop(
                lambda index, logs: index < last, one, [first, nothing], parallel_iterations=1
            )[1]

        self._run = tf.function(run, jit_compile=True, autograph=False)
        self._blocks = self._block = None
        self._position = None

    def __call__(self, count):
        """Run `count` steps; the logs of the last."""
        if self._position != self.source.position:
            self._position = self.source.position
            self._rewind()
        logs = None
        while count:
            if self._used == self._length:
                self._block, self._used = tf.nest.flatten(next(self._blocks)), 0
            last = min(self._used + count, self._length)
            logs = self._run(tf.constant(self._used), tf.constant(last), *self._block)
            taken = last - self._used
            self._used, count = last, count - taken
            self._position += taken
            self.source.move(self._position)
        return logs

    def _rewind(self):
        length, source = self._length, self.source
        blocks = tf.data.Dataset.counter(self._position, length, dtype=tf.int64)
        blocks = blocks.map(lambda first: source.batches(first, length))
        self._blocks, self._used = iter(blocks.prefetch(2)), length


def fused_steps(function, step, model, source):
    """The `FusedSteps` that belong to a train function, made once and kept on it."""
    kept = getattr(function, "fused_steps", None)
    if kept is None or kept.source is not source:
        kept = function.fused_steps = FusedSteps(step, source, model.steps_per_execution)
        _logger.debug("%d steps of `%s` run as one program", model.steps_per_execution, model.name)
    return kept
