"""Many training steps as one compiled program, over batches that are gathered ahead."""

import logging
import math

import keras
import numpy as np
import tensorflow as tf
from keras import ops

_logger = logging.getLogger(__name__)

# What one block of stacked batches may take; two more are gathered ahead.
_BLOCK_BYTES = 32 * 2**20
# What the data may take on a GPU or TPU for a program to gather its batches there itself.
_RESIDENT_BYTES = 2**30
# Batches from which on it does so on a CPU: to write and read them once more then costs more than
# another thread saves.
_LARGE_BATCH_BYTES = 2**18
_LONGEST_BLOCK = 1000
# Rows of 48 to 60 numbers take XLA for a CPU longer to gather than the same rows cut into shorter
# ones; up to 30 it makes no difference, from 64 on it is the other way round.
_SHORT_ROW, _LONG_ROW = 32, 64
# Chains whose rows one pass of a loop gathers: a pass has a cost of its own.
_CHAINS_A_PASS = 8
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
    if has_accelerator():
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


class Record:
    """The values that variables have at every `interval`th step, written down by a program.

    They stay where they are until they are fetched, also if the run is interrupted.

    Args:
        optimizer: The optimizer that counts the steps.
        variables: What to write down.
        size: Most steps that are written down between two fetches.
    """

    def __init__(self, optimizer, variables, size):
        self._optimizer, self._variables = optimizer, variables
        # The row after the last that is kept is written at every step.
        rows = size + 1
        with tf.init_scope():
            self._rows = [
                tf.Variable(tf.zeros([rows, *v.shape], v.dtype), trainable=False) for v in variables
            ]
            self._steps = tf.Variable(tf.zeros([rows], tf.int64), trainable=False)
            # TensorFlow keeps variables of 32-bit integers in main memory, where a program of
            # another device does not reach them.
            self._count, self._next, self._interval = (
                tf.Variable(value, dtype=tf.int64, trainable=False)
                for value in (0, tf.int64.max, 1)
            )

    def begin(self, step, interval):
        """Write down the steps from `step` on, `interval` apart."""
        self._next.assign(step)
        self._interval.assign(interval)

    def write(self):
        """In a program, before each step and after the last."""
        step = tf.cast(self._optimizer.iterations, tf.int64)
        row = tf.cast(self._count, tf.int32)
        for rows, value in zip([*self._rows, self._steps], [*self._variables, step], strict=True):
            value = tf.convert_to_tensor(value)[None]
            start = [row] + [0] * (len(value.shape) - 1)
            rows.assign(ops.slice_update(tf.convert_to_tensor(rows), start, value))
        due = step >= self._next
        self._count.assign_add(tf.cast(due, tf.int64))
        self._next.assign(tf.where(due, step + self._interval, self._next))

    def fetch(self):
        """The steps that were written down since the last time, and the values at each."""
        count = int(self._count.numpy())
        if not count:
            return []
        # Copies: a program would copy all rows that something else still holds.
        steps, *values = (np.array(r.numpy()[:count]) for r in (self._steps, *self._rows))
        self._count.assign(0)
        return list(zip(steps.tolist(), zip(*values, strict=True), strict=True))


class FusedSteps:
    """A step, repeated on the batches of a block, as one program.

    It is compiled at once, before it runs on anything.

    Args:
        step: Function of a batch that returns logs.
        iterations: The optimizer's variable that counts batches.
        stream: A `Stream` of such batches.
        record: A `Record` to write the steps down in, or None.
    """

    def __init__(self, step, iterations, stream, record):
        def traced(batch):
            return tf.nest.map_structure(tf.convert_to_tensor, step(batch))

        # A function of its own: the shapes of its logs are needed before the loop is traced.
        self._step = tf.function(traced, autograph=False)
        self._logs = self._step.get_concrete_function(stream.spec).structured_outputs
        self._iterations, self._spec, self.record = iterations, stream.spec, record
        self._resident, self._chains = stream.resident, stream.chains
        function = tf.function(self._loop, jit_compile=True, autograph=False)
        nothing = tf.constant(0), tf.constant(0), *stream.block()[1]
        # The one trace by itself: to find it among several takes time at every call.
        self._run = function.get_concrete_function(*nothing)
        self._run(*nothing)

    def _loop(self, first, last, *block):
        """Steps on the batches of a block from number `first` on, up to `last`."""
        rows, *parts = block if self._resident else (None, *block)

        def one(index, logs, buffers):
            del logs
            if self.record is not None:
                # Before the step: fused with it, what is written might be rounded otherwise.
                self.record.write()
            batch, buffers = self._batch(index, rows, parts, buffers)
            return index + 1, self._step(batch), buffers

        nothing = tf.nest.map_structure(lambda out: tf.zeros(out.shape, out.dtype), self._logs)
        _, last_logs, _ = tf.while_loop(
            lambda index, *_: index < last,
            one,
            [first, nothing, _buffers(rows, parts, self._chains)],
            parallel_iterations=1,
        )
        if self.record is not None:
            self.record.write()
        return last_logs, tf.convert_to_tensor(self._iterations)

    def _batch(self, index, rows, parts, buffers):
        if self._resident:
            batch, buffers = _gather(rows[index], parts, buffers, self._chains)
            # Rows of the data may be cut.
            specs = tf.nest.flatten(self._spec)
            batch = [tf.reshape(part, spec.shape) for part, spec in zip(batch, specs, strict=True)]
        else:
            batch = [part[index] for part in parts]
        return tf.nest.pack_sequence_as(self._spec, batch), buffers

    def __call__(self, stream, count):
        """Run `count` steps on the batches of a `Stream`.

        Returns:
            The logs of the last, and `iterations` after it.
        """
        while count:
            first, block = stream.block()
            last = min(first + count, stream.length)
            logs, iterations = self._run(tf.constant(first), tf.constant(last), *block)
            stream.advance(last - first)
            count -= last - first
        return logs, iterations


class Stream:
    """Batches of `minibatches` from a position on, in blocks that are made ahead.

    A block is the stacked parts of its batches; where the data are `resident`, the numbers of the
    rows of its batches, and the parts of the data that they are rows of.

    Attributes:
        position: Index of the next batch.
        spec: The `element_spec` of a batch.
        length: Batches in a block.
        resident: Whether the program gathers the batches from the data.
        chains: Number of stacked chains whose batches, of equal length, make up a batch.
        key: What a program for these blocks depends on.
    """

    def __init__(self, source, longest):
        self.chains = source.chains
        self.position, self.spec, self._source = source.position, source.element_spec, source
        self._parts = tf.nest.flatten(source.tensors)
        size = sum(part.dtype.size * part.shape.num_elements() for part in self._parts)
        batch = size // source.train_size * source.batch_size
        self.length = min(longest, source.steps, _LONGEST_BLOCK)
        if has_accelerator():
            self.resident = size <= _RESIDENT_BYTES
        else:
            self.resident = batch >= _LARGE_BATCH_BYTES
        if self.resident:
            self._parts = [_cut(tf.identity(part)) for part in self._parts]
        else:
            self.length = max(1, min(self.length, _BLOCK_BYTES // max(1, batch)))
        rows = source.train_size if self.resident else None
        self.key = repr((self.spec, self.length, rows, self.chains))
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


def _cut(part):
    """A part of the data, its rows cut into shorter ones where XLA gathers those faster."""
    rows, size = part.shape[0], math.prod(part.shape[1:])
    short = next((k for k in (2, 3, 5, 7) if size % k == 0), None)
    if has_accelerator() or short is None or not _SHORT_ROW < size < _LONG_ROW:
        return part
    return tf.reshape(part, [rows, size // short, short])


def _buffers(rows, parts, chains):
    """For the parts that are gathered chain by chain, position to what their rows are written to.

    As one operation XLA for a CPU would gather the rows of all chains number by number, and share
    them among the cores, of which one then reads what another has written.
    """
    if chains == 1 or rows is None or has_accelerator():
        return {}
    return {
        k: tf.zeros([rows.shape[1], *part.shape[1:]], part.dtype)
        for k, part in enumerate(parts)
        if math.prod(part.shape[1:]) < _LONG_ROW
    }


def _gather(rows, parts, buffers, chains):
    """Rows of each part of the data, and the buffers with what is in them now."""
    of_chain = tf.reshape(rows, [chains, -1])
    length = of_chain.shape[1]
    together = max(n for n in range(1, _CHAINS_A_PASS + 1) if chains % n == 0)

    def some(first, buffers):
        buffers = dict(buffers)
        for chain in (first + n for n in range(together)):
            for k, buffer in buffers.items():
                start = [chain * length] + [0] * (len(buffer.shape) - 1)
                found = tf.gather(parts[k], of_chain[chain])
                buffers[k] = ops.slice_update(buffer, start, found)
        return first + together, buffers

    if buffers:
        _, buffers = tf.while_loop(
            lambda first, _: first < chains, some, [0, buffers], parallel_iterations=1
        )
    batch = [buffers[k] if k in buffers else tf.gather(part, rows) for k, part in enumerate(parts)]
    return batch, buffers


def has_accelerator():
    return any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))


def fused_steps(function, step, model, optimizer, stream, recorded):
    """The `FusedSteps` that belong to a train function, kept on it; None if XLA can't make them.

    `recorded` is what to make a `Record` of: variables, and a number of steps, or None.

    An error in the step itself is left to Keras' own loop, in which it comes again.
    """
    kept = vars(function).setdefault("fused_steps", {})
    variables, size = recorded or ((), 0)
    key = stream.key, tuple(map(id, variables)), size
    if key not in kept:
        try:
            record = Record(optimizer, variables, size) if size else None
            kept[key] = FusedSteps(step, optimizer._iterations, stream, record)
        except Exception as error:
            kept[key] = None
            _logger.debug(
                "Steps of `%s` are not fused, since they can't be compiled: %s", model.name, error
            )
        else:
            _logger.debug(
                "Steps of `%s` are fused, up to %d in a program", model.name, stream.length
            )
    return kept[key]
