"""Many training steps as one compiled program, over batches that are gathered ahead."""

import logging
import math

import keras
import tensorflow as tf

_logger = logging.getLogger(__name__)

# What one block of stacked batches may take; two more are gathered ahead.
_BLOCK_BYTES = 32 * 2**20
# What the data may take on a GPU or TPU for a program to gather its batches there itself.
_RESIDENT_BYTES = 2**30
# Batches from which on it does so on a CPU: to write and read them once more then costs more than
# another thread saves.
_LARGE_BATCH_BYTES = 2**20
_LONGEST_BLOCK = 1000
# Operations of a step up to which a loop inside XLA is faster on a CPU: it loses the threads of
# large products.
_CPU_OPERATIONS = 1e8


def reason_against(model, source, iterator):
    """Why the steps of a fit can't be fused, or should not be; None if they should.

    The model may have to be built for the reasons that lie in its layers.
    """
    if model.steps_per_execution == 1:
        return "steps_per_execution=1"
    if model.run_eagerly:
        return "run_eagerly=True"
    distributed = isinstance(iterator, tf.distribute.DistributedIterator)
    if distributed or tf.distribute.has_strategy():
        return "a distribution strategy"
    if source is None or getattr(iterator, "minibatches", None) is not source:
        return "the data are not `minibatches` themselves"
    if not source.fuse:
        return "`minibatches(fuse=False)`"
    layers = model._flatten_layers()
    unable = [layer.name for layer in layers if not layer.supports_jit]
    if unable:
        return f"XLA can't compile {unable}"
    if _has_accelerator():
        return None
    slow = [layer.name for layer in layers if is_slow_in_a_loop(layer)]
    if slow:
        return f"on a CPU a loop inside XLA makes {slow} slow"
    weights = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    if source.batch_size * getattr(model, "operations_a_row", 6 * weights) > _CPU_OPERATIONS:
        return "on a CPU a loop inside XLA makes large products slow"
    return None


def is_slow_in_a_loop(layer):
    """Whether a loop compiled by XLA for a CPU, which loses the threads, makes a layer slow."""
    if isinstance(layer, keras.layers.RNN | keras.layers.Bidirectional):
        return True
    return any("Conv" in kind.__name__ for kind in type(layer).__mro__)


class FusedSteps:
    """A step, repeated on the batches of a block, as one program.

    It is compiled at once, before it runs on anything.

    Args:
        step: Function of a batch that returns logs.
        stream: A `Stream` of such batches.
    """

    def __init__(self, step, stream):
        def traced(batch):
            return tf.nest.map_structure(tf.convert_to_tensor, step(batch))

        # A function of its own: the shapes of its logs are needed before the loop is traced.
        traced = tf.function(traced, autograph=False)
        spec, resident = stream.spec, stream.resident
        logs = traced.get_concrete_function(spec).structured_outputs

        def run(first, last, *block):
            def one(index, logs):
                del logs
                batch = tf.nest.pack_sequence_as(spec, _batch(block, index, resident))
                return index + 1, traced(batch)

            nothing = tf.nest.map_structure(lambda out: tf.zeros(out.shape, out.dtype), logs)
            return tf.while_loop(
                lambda index, logs: index < last, one, [first, nothing], parallel_iterations=1
            )[1]

        function = tf.function(run, jit_compile=True, autograph=False)
        nothing = tf.constant(0), tf.constant(0), *stream.block()[1]
        # The one trace by itself: to find it among several takes time at every call.
        self._run = function.get_concrete_function(*nothing)
        self._run(*nothing)

    def __call__(self, stream, count):
        """Run `count` steps on the batches of a `Stream`; the logs of the last."""
        while count:
            first, block = stream.block()
            last = min(first + count, stream.length)
            logs = self._run(tf.constant(first), tf.constant(last), *block)
            stream.advance(last - first)
            count -= last - first
        return logs


class Stream:
    """Batches of `minibatches` from a position on, in blocks that are made ahead.

    A block is the stacked parts of its batches; where the data are `resident`, the numbers of the
    rows of its batches, and the parts of the data that they are rows of.

    Attributes:
        position: Index of the next batch.
        spec: The `element_spec` of a batch.
        length: Batches in a block.
        resident: Whether the program gathers the batches from the data.
        key: What a program for these blocks depends on.
    """

    def __init__(self, source, longest):
        self.position, self.spec, self._source = source.position, source.element_spec, source
        self._parts = tf.nest.flatten(source.tensors)
        size = sum(part.dtype.size * part.shape.num_elements() for part in self._parts)
        batch = size // source.train_size * source.batch_size
        self.length = min(longest, source.steps, _LONGEST_BLOCK)
        if _has_accelerator():
            self.resident = size <= _RESIDENT_BYTES
        else:
            self.resident = batch >= _LARGE_BATCH_BYTES
        if self.resident:
            self._parts = [tf.identity(part) for part in self._parts]
        else:
            self.length = max(1, min(self.length, _BLOCK_BYTES // max(1, batch)))
        rows = source.train_size if self.resident else None
        self.key = repr((self.spec, self.length, rows))
        self._blocks, self._current = iter(()), (-self.length, None)

    def block(self):
        """Where in its block the next batch is, and the block: a list of tensors."""
        if not 0 <= self.position - self._current[0] < self.length:
            following = next(self._blocks, None)
            # Each knows its place, so that neither a jump nor an interrupt leaves a wrong one.
            if following is None or int(following[0]) != self.position:
                self._blocks = self._blocks_from(self.position)
                following = next(self._blocks)
            first, *block = following
            self._current = int(first), block + (self._parts if self.resident else [])
        first, block = self._current
        return self.position - first, block

    def advance(self, count):
        """Count batches as consumed."""
        self.position += count
        self._source.skip(count)

    def _blocks_from(self, position):
        def make(first):
            if self.resident:
                return first, tf.cast(self._source.rows(first, self.length), tf.int32)
            return first, *tf.nest.flatten(self._source.batches(first, self.length))

        firsts = tf.data.Dataset.counter(position, self.length, dtype=tf.int64)
        return iter(firsts.map(make).prefetch(2))


def _batch(block, index, resident):
    """The parts of batch number `index` of a block."""
    if not resident:
        return [part[index] for part in block]
    rows, *parts = block
    return [tf.gather(part, rows[index]) for part in parts]


def _has_accelerator():
    return any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))


def fused_steps(function, step, model, stream):
    """The `FusedSteps` that belong to a train function, kept on it; None if XLA can't make them.

    An error in the step itself is left to Keras' own loop, in which it comes again.
    """
    kept = vars(function).setdefault("fused_steps", {})
    if stream.key not in kept:
        try:
            kept[stream.key] = FusedSteps(step, stream)
        except Exception as error:
            kept[stream.key] = None
            _logger.debug(
                "Steps of `%s` are not fused, since they can't be compiled: %s", model.name, error
            )
        else:
            _logger.debug(
                "Steps of `%s` are fused, up to %d in a program", model.name, stream.length
            )
    return kept[stream.key]
