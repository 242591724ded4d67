"""Minibatches drawn independently, which is what the theory of the samplers assumes."""

import math
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import tensorflow as tf

from keras_sgmcmc import compilation
from keras_sgmcmc.random import draw_seed
from keras_sgmcmc.validation import positive_integer

# One gather brings a block of batches of about this many bytes; some four blocks are in memory.
_BLOCK_BYTES = 4 * 2**20
_LONGEST_BLOCK = 100


def minibatches(
    x,
    y=None,
    batch_size=None,
    *,
    sample_weight=None,
    seed=None,
    steps=None,
    start_step=0,
    fuse=True,
):
    """Batches of rows drawn independently and with replacement, as a `tf.data.Dataset`.

    The batch noise that SGFS and constant SGD turn into posterior noise has covariance C/S only
    if batches are drawn independently of each other. `model.fit(x, y)` reshuffles instead: every
    row comes once an epoch, the noise cancels over the epoch and the posterior comes out too
    narrow. Variance, where 1 is right: constant SGD ("full") 1.00 with independent draws and 0.41
    to 0.49 reshuffled, SGFS 0.97 and 0.43. SGLD and pSGLD at small steps hardly notice.

    ```python
    data = minibatches(x_train, y_train, batch_size=100, seed=1)
    model.fit(data, epochs=20, shuffle=False)
    ```

    `shuffle=False` only silences a warning that Keras has for every `tf.data.Dataset`.

    **Continues.** The dataset is finite, `steps` batches, and each new iterator begins with the
    first batch that none has consumed yet: so does the next epoch and the next `fit`, also after
    an epoch that was broken off (early stopping, Ctrl-C, a smaller `steps_per_epoch`). `evaluate`
    and loops consume batches too; iterators open at the same time overlap. `fit` takes no batch
    that it does not train on, unless there is a distribution strategy: that reads ahead, and Keras
    takes a batch more at the start of every `fit` to build the model, so that a few batches are
    skipped; none is ever repeated.

    With a callback of this package, `fit` goes by the optimizer: a chain that has done t steps,
    restored or continued, begins with batch t (times `gradient_accumulation_steps`), also through
    `map` and `prefetch`. Say where to begin with `start_step`, or by assigning to `position`, and
    it goes on from there instead.

    **Reproducible.** Batch t is a function of the data, `batch_size`, `seed` and t alone: row
    numbers are Philox4x32-10 (Salmon et al. 2011) with key `seed` and a counter proportional to t,
    modulo N. `steps`, `start_step` and the way of consumption change nothing.

    **Speed.** The rows of many batches (4 MiB of them, at most 100 batches, at least one) are drawn
    and gathered at once in the background, and split afterwards. Batches of 500 x 50 floats out of
    10,000 rows, consumed in a `tf.function` on two cores that others kept busy as well, medians of
    `tools/benchmark_minibatches.py`: 196 us a batch, of which 137 are the loop's own; 52 if 40
    come at once (see `Minibatches.batches`); 233 with one gather a batch; 4,072 with
    `from_tensor_slices(...).shuffle(...).batch(...)`.

    Args:
        x: Inputs: an array, or a dict, tuple, list or nesting of arrays that all have the same
            number N of rows. NumPy arrays, tensors, pandas objects, whatever NumPy converts. As
            in Keras, floating-point arrays become `keras.config.floatx()` and other dtypes are
            kept. The dataset holds one copy.
        y: Targets, likewise; `None` if there are none.
        batch_size: Integer, number S of rows in a batch. It may exceed N.
        sample_weight: Weights of the rows, or one such array for each output in `y`.
        seed: Integer. `None`, the default, draws one from Python's `random`, which
            `keras.utils.set_random_seed` governs.
        steps: Integer, batches an epoch. Defaults to N // S, at least 1. Every epoch starts a new
            iterator, which costs some milliseconds: on small data let an epoch be longer.
        start_step: Integer, index of the first batch. Defaults to 0.
        fuse: Whether `fit` may run the steps of `steps_per_execution` as one compiled program, with
            a callback of this package attached and where that is faster. Defaults to True.

    Returns:
        A `Minibatches` dataset with elements `(x, y)`, `(x, y, sample_weight)`, or without `y`
        just `x`, as Keras packs them.

    Raises:
        ValueError: If the arrays have no rows or different numbers of rows, if `sample_weight`
            comes without `y`, or if an integer is out of range.
        TypeError: If the data are anything but arrays, for example a dataset or a generator.
    """
    batch_size = positive_integer("batch_size", batch_size)
    start_step = positive_integer("start_step", start_step, minimum=0)
    seed = draw_seed() if seed is None else positive_integer("seed", seed, minimum=0)
    if sample_weight is not None and y is None:
        raise ValueError("`sample_weight` needs targets: pass `y`. Received: y=None")
    arguments = {"x": x, "y": y, "sample_weight": sample_weight}
    arguments = {
        name: _tensors(name, value) for name, value in arguments.items() if value is not None
    }
    rows = {
        name: [tensor.shape[0] if tensor.shape.rank else 0 for tensor in tf.nest.flatten(value)]
        for name, value in arguments.items()
    }
    train_size = max(rows["x"], default=0)
    if {train_size} != set().union(*rows.values()) or train_size == 0:
        raise ValueError(
            "All arrays should have the same number of rows (length of the first axis), at least "
            f"one. Received rows: {rows}. Check how `x`, `y` and `sample_weight` were split."
        )
    if tf.is_tensor(arguments.get("sample_weight")):
        # Like Keras on arrays: the same weights for every output.
        weight = arguments["sample_weight"]
        arguments["sample_weight"] = tf.nest.map_structure(lambda _: weight, arguments["y"])
    steps = max(1, train_size // batch_size) if steps is None else positive_integer("steps", steps)
    return Minibatches(
        keras.utils.pack_x_y_sample_weight(**arguments),
        train_size=train_size,
        batch_size=batch_size,
        seed=seed,
        steps=steps,
        position=start_step,
        fuse=bool(fuse),
    )


class Minibatches(tf.data.Dataset):
    """The dataset that `minibatches` returns: independent batches, iterators that continue.

    Iterators made from it directly carry it as their attribute `minibatches`; datasets derived
    from it (`map`, `prefetch`) continue too, but their iterators lack the attribute.

    Attributes:
        train_size: Number of rows N of the data.
        batch_size: Number of rows S of a batch, of all `chains` together.
        seed: Seed of the draws, of the first chain.
        steps: Batches in an epoch.
        position: Index of the next batch, the first one that no iterator has consumed. May be
            set; iterators that have begun are not moved.
        fuse: Whether steps on it may be fused.
        chains: Number of stacked chains that a batch is for, with the seeds from `seed` on; 1 but
            in `sample_chains`.
        tensors: The data, all rows, in the structure of an element.
        positioned: Whether `start_step` or an assignment to `position` said where to begin.
    """

    def __init__(
        self, tensors, *, train_size, batch_size, seed, steps, position, fuse=True, chains=1
    ):
        self.fuse, self.chains = fuse, chains
        self.train_size, self.batch_size = train_size, batch_size
        self.seed, self.steps = seed, steps
        self.tensors = tensors
        self._position = _plain_variable(position)
        self.positioned = position > 0
        self._spec = tf.nest.map_structure(
            lambda tensor: tf.TensorSpec([batch_size, *tensor.shape[1:]], tensor.dtype), tensors
        )
        with tf.device("CPU:0"):
            super().__init__(self._variant())

    def batches(self, first, count):
        """Batches `first` to `first + count - 1`, stacked along a new first axis.

        A pure function, also inside a `tf.function`; `position` stays where it is.

        Args:
            first: Integer or scalar integer tensor, index of the first batch.
            count: Integer or scalar integer tensor.

        Returns:
            The structure of an element, each tensor of shape `[count, batch_size, ...]`.
        """
        with tf.device("CPU:0"):
            rows = self.rows(first, count)
            return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), self.tensors)

    def rows(self, first, count):
        """Numbers of the rows of batches `first` to `first + count - 1`: `[count, batch_size]`."""
        if self.chains == 1:
            return self._rows_of(self.seed, first, count)
        seeds = [(self.seed + number) % 2**32 for number in range(self.chains)]
        return tf.concat([self._rows_of(seed, first, count) for seed in seeds], 1)

    def _rows_of(self, seed, first, count):
        # Each value of Philox's counter gives two 64-bit words; an odd batch leaves one unused.
        size = self.batch_size // self.chains
        length = (size + 1) // 2
        start = tf.cast(first, tf.uint64) * tf.constant(length, tf.uint64)
        return tf.raw_ops.StatelessRandomUniformIntV2(
            shape=[count, 2 * length],
            key=tf.constant([seed % 2**64], tf.uint64),
            counter=tf.stack([start, tf.zeros_like(start)]),
            alg=tf.random.Algorithm.PHILOX.value,
            minval=tf.constant(0, tf.int64),
            maxval=tf.constant(self.train_size, tf.int64),
        )[:, :size]

    def reseeded(self, seed, chains=1):
        """The same data from its first batch on, drawn by another seed.

        Of several chains each batch is one batch for each, with the seeds from `seed` on.
        """
        return Minibatches(
            self.tensors,
            train_size=self.train_size,
            batch_size=chains * (self.batch_size // self.chains),
            seed=positive_integer("seed", seed, minimum=0),
            steps=self.steps,
            position=0,
            fuse=self.fuse,
            chains=chains,
        )

    @property
    def position(self):
        return int(self._position.numpy())

    @position.setter
    def position(self, value):
        self.move(positive_integer("position", value, minimum=0))
        self.positioned = True

    def move(self, position):
        """Move to a position that nobody chose: not `positioned` by it."""
        self._position.assign(position)

    def skip(self, count):
        """Count batches as consumed that no iterator of this dataset has brought."""
        # Not `assign_add`, of which most would be Python's.
        count = tf.constant(count, tf.int64)
        tf.raw_ops.AssignAddVariableOp(resource=self._position.handle, value=count)

    @property
    def element_spec(self):
        return self._spec

    def __iter__(self):
        iterator = _Iterator(self) if tf.executing_eagerly() else super().__iter__()
        iterator.minibatches = self
        return iterator

    def _inputs(self):
        return []

    def _variant(self):
        """The `steps` batches from the position on, as the variant tensor of a dataset.

        The position is read when the first is asked for, and moved on with every batch taken.
        """
        # Raw operations: `tf.data`'s own methods take half as long again to make.
        specs = tf.nest.flatten(self._spec)
        row_bytes = sum(spec.dtype.size * math.prod(spec.shape[1:]) for spec in specs)
        length = _BLOCK_BYTES // max(1, row_bytes * self.batch_size)
        length = min(max(1, length), _LONGEST_BLOCK, self.steps)

        def block(begin, offset):
            begin = tf.where(begin < 0, self._position.read_value(), begin)
            batches = self.batches(begin + offset, tf.minimum(self.steps - offset, length))
            return begin, *tf.nest.flatten(batches)

        def count(*batch):
            self._position.assign_add(1, read_value=False)
            return batch

        number = tf.TensorSpec([], tf.int64)
        # Attributes, since the variant does not keep the functions alive.
        self._block = compilation.concrete(block, number, number)
        self._count = compilation.concrete(count, *specs)
        types = [spec.dtype for spec in specs]
        of_batch = {"output_types": types, "output_shapes": [spec.shape for spec in specs]}
        of_block = {"output_types": types, "output_shapes": [[None, *s.shape] for s in specs]}
        # Left alone, tf.data adds a prefetch at the very end, and the position runs ahead.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False

        raw = tf.raw_ops
        variant = raw.RangeDataset(
            start=0, stop=self.steps, step=length, output_types=[tf.int64], output_shapes=[[]]
        )
        variant = raw.ScanDataset(
            input_dataset=variant,
            initial_state=[tf.constant(-1, tf.int64)],
            other_arguments=self._block.captured_inputs,
            f=self._block,
            **of_block,
        )
        variant = raw.PrefetchDataset(input_dataset=variant, buffer_size=2, **of_block)
        variant = raw.UnbatchDataset(input_dataset=variant, **of_batch)
        variant = raw.AssertCardinalityDataset(
            input_dataset=variant, cardinality=self.steps, **of_batch
        )
        variant = raw.OptionsDataset(
            input_dataset=variant,
            serialized_options=options._to_proto().SerializeToString(),
            **of_batch,
        )
        # `Dataset.map` hands every element to another thread, which can cost as much as the batch.
        return raw.MapDataset(
            input_dataset=variant,
            other_arguments=self._count.captured_inputs,
            f=self._count,
            use_inter_op_parallelism=False,
            preserve_cardinality=True,
            **of_batch,
        )


class _Iterator(tf.data.IteratorSpec(tf.TensorSpec([])).value_type):
    """TensorFlow's own iterator, made when it is first asked for.

    That takes as long as many fused steps, which never ask; and Keras wants two an epoch.
    """

    def _create_iterator(self, dataset):
        self._dataset, self._element_spec = dataset, dataset.element_spec

    def __getattr__(self, name):
        if name != "_iterator_resource":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with tf.init_scope():
            super()._create_iterator(self._dataset)
        return vars(self)[name]


def _plain_variable(value):
    """A counter in main memory; in another thread, where no strategy's scope mirrors it."""

    def create():
        with tf.device("CPU:0"):
            return tf.Variable(value, dtype=tf.int64, trainable=False, name="position")

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(create).result()


def _tensors(name, structure):
    """The arrays of an argument as tensors in main memory, with Keras' dtypes and shapes."""

    def convert(value):
        if not hasattr(value, "__array__"):
            raise TypeError(
                f"`{name}` should be an array or a structure of arrays, since rows are drawn at "
                "random: collect a dataset or a generator into arrays, turn lists of numbers into "
                "arrays with `np.asarray`, make sparse and ragged data dense. "
                f"Received: {type(value).__name__}"
            )
        column = hasattr(value, "iloc") and value.ndim == 1  # a pandas Series
        value = value if isinstance(value, tf.Tensor) else np.asarray(value)
        floating = tf.as_dtype(value.dtype).is_floating
        dtype = keras.config.floatx() if floating else value.dtype
        with tf.device("CPU:0"):
            if isinstance(value, tf.Tensor):
                return tf.cast(tf.identity(value), dtype)
            # `constant` copies; `convert_to_tensor` may go on sharing the caller's memory.
            return tf.constant(value[:, None] if column else value, dtype=dtype)

    return keras.tree.lists_to_tuples(keras.tree.map_structure(convert, structure))
