"""The machinery of `Posterior`: many draws of the weights over many rows, in one traced function.

Rows go chunk by chunk (so that a Dataset is read once), and within a chunk draws go group by group.
The draws of a group, and the batches of a chunk, are loops inside the graph, which takes the
weights as arguments. What the draws give is accumulated at once in float64, never kept.
"""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from scipy import special

from keras_sgmcmc.likelihoods import align, compiled_likelihoods

# Inputs of this many bytes, at least, go through all draws before more rows are read.
CHUNK_BYTES = 2**28
# What the weights and outputs of the draws of a group may take, if there is more than one.
GROUP_BYTES = 2**20


class Moments:
    """Weighted mean and standard deviation, in one pass without cancellation (West 1979)."""

    axis = 0

    def __init__(self):
        self.weight = self.mean = self.square = 0.0

    def add(self, weight, value):
        self.dtype = value.dtype
        if weight > 0:
            self.weight += weight
            share = weight / self.weight
            deviation = value.astype("float64") - self.mean
            self.mean = self.mean + share * deviation
            self.square = self.square + weight * (1.0 - share) * deviation**2

    def result(self):
        std = np.sqrt(self.square / self.weight)
        return self.mean.astype(self.dtype), std.astype(self.dtype)


class LogMean:
    """log sum_s w_s exp(value_s)."""

    axis = 0

    def __init__(self):
        self.log_sum = -np.inf

    def add(self, weight, value):
        self.dtype = value.dtype
        if weight > 0:
            self.log_sum = np.logaddexp(self.log_sum, np.log(weight) + value.astype("float64"))

    def result(self):
        return (self.log_sum.astype(self.dtype),)


class Entropies:
    """sum_s w_s of p, of -p log p and of -(1 - p) log(1 - p)."""

    axis = 0

    def __init__(self):
        self.sums = 0.0

    def add(self, weight, value):
        p = value.astype("float64")
        self.sums = self.sums + weight * np.stack([p, special.entr(p), special.entr(1.0 - p)])

    def result(self):
        return tuple(self.sums)


class Stack:
    """All values, along a new first axis."""

    axis = 1

    def __init__(self):
        self.values = []

    def add(self, weight, value):
        self.values.append(value)

    def result(self):
        return (np.stack(self.values),)


def trace(model, drawn, others, head, from_logits, specs):
    """The function that predicts from several draws of the variables `drawn`.

    Its arguments are the number of draws, the values of `drawn` stacked over the draws, the values
    of `others`, the data and the batch size; it returns head(outputs) of all rows, stacked too.
    """
    variables = [*drawn, *others]
    value_specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]

    def forward(values, data):
        # Not model.stateless_call: it goes by what is trainable now, and skips the input casts of
        # __call__, which predict makes.
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            outputs = tree.map_structure(_as_float, model(data[0], training=False))
            likelihoods = compiled_likelihoods(model, outputs, from_logits)
            if head == "log_prob":
                return _log_prob(model, likelihoods, data[1], outputs)
            pairs = list(zip(likelihoods, tree.flatten(outputs), strict=True))
            mean = tree.pack_sequence_as(outputs, [a.mean(f) for a, f in pairs])
            if head == "mean":
                return mean
            return mean, tree.pack_sequence_as(outputs, [a.variance(f) for a, f in pairs])

    # Traced on its own first, because the loop must know the shapes of what it collects.
    one_batch = tf.function(forward, input_signature=[value_specs, specs], autograph=False)
    structure = one_batch.get_concrete_function().structured_outputs

    def looped(count, one, at_once):
        """What `one(i)`, of the structure of a batch, gives for all i, some of them at once."""
        arrays = [
            tf.TensorArray(s.dtype, size=count, infer_shape=False, element_shape=s.shape)
            for s in tree.flatten(structure)
        ]

        def body(i, arrays):
            results = tree.flatten(one(i))
            return i + 1, [a.write(i, r) for a, r in zip(arrays, results, strict=True)]

        loop = tf.while_loop(lambda i, _: i < count, body, (0, arrays), parallel_iterations=at_once)
        return loop[1]

    def all_batches(values, data, batch_size):
        rows = tf.shape(tree.flatten(data)[0])[0]

        def one(i):
            batch = slice(i * batch_size, (i + 1) * batch_size)
            return one_batch(values, tree.map_structure(lambda a: a[batch], data))

        arrays = looped((rows + batch_size - 1) // batch_size, one, at_once=10)
        return tree.pack_sequence_as(structure, [array.concat() for array in arrays])

    def all_draws(draws, values, common, data, batch_size):
        def one(i):
            return all_batches([value[i] for value in values] + common, data, batch_size)

        # Or the batches of ten draws would be in memory at once.
        arrays = looped(draws, one, at_once=1)
        return tree.pack_sequence_as(structure, [array.stack() for array in arrays])

    draws = [tf.TensorSpec((None, *s.shape), s.dtype) for s in value_specs[: len(drawn)]]
    size = tf.TensorSpec((), tf.int32)
    signature = [size, draws, value_specs[len(drawn) :], specs, size]
    return tf.function(all_draws, input_signature=signature, autograph=False)


def stacked(draws):
    """The arrays of several draws, each stacked along a new first axis."""
    parts = zip(*draws, strict=True)
    return [np.stack(part) if len(part) > 1 else np.asarray(part[0])[None] for part in parts]


def _log_prob(model, likelihoods, y, outputs):
    if any(getattr(f, "_keras_mask", None) is not None for f in tree.flatten(outputs)):
        raise ValueError(
            "The outputs carry a mask (from Masking or mask_zero=True), but the log density of a "
            "row is summed over all its time steps. Make the last layers drop the mask."
        )
    if tree.is_nested(outputs) and not tree.is_nested(y):
        raise ValueError("A model of several outputs needs one entry of `y` for each of them.")
    targets = align(y, outputs, getattr(model, "output_names", None))
    triples = zip(likelihoods, targets, tree.flatten(outputs), strict=True)
    return sum(a.log_prob(target, f) for a, target, f in triples)


def _as_float(outputs):
    return outputs if outputs.dtype in (tf.float32, tf.float64) else tf.cast(outputs, tf.float32)


def chunks(x, y=None, sample_weight=None, batch_size=32):
    """Pieces of (x, y, sample_weight) as arrays: a list, or for a Dataset an iterator."""
    if isinstance(x, tf.data.Dataset):
        if y is not None or sample_weight is not None:
            raise ValueError("A Dataset holds y and sample weights itself; pass x alone.")
        if x.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError("The Dataset is infinite. Remove repeat(), or use take(...).")
        return _dataset_chunks(x)
    data = tree.map_structure(lambda a: None if a is None else np.asarray(a), (x, y, sample_weight))
    arrays = [a for a in tree.flatten(data) if a is not None]
    lengths = {a.shape[0] if a.ndim else None for a in arrays}
    if len(lengths) > 1 or not lengths.isdisjoint({0, None}):
        raise ValueError(
            "All arrays need the same number of rows, at least one, along their first axis. "
            f"Received: shapes {[a.shape for a in arrays]}"
        )
    rows = lengths.pop()
    row_bytes = sum(a.nbytes for a in tree.flatten(data[0])) / rows
    step = math.ceil(CHUNK_BYTES / max(row_bytes * batch_size, 1)) * batch_size
    return [
        tree.map_structure(lambda a: None if a is None else a[i : i + step], data)  # noqa: B023
        for i in range(0, rows, step)
    ]


def _dataset_chunks(dataset):
    group, size, shapes = [], 0, None
    for element in dataset.as_numpy_iterator():
        data = keras.utils.unpack_x_y_sample_weight(element)
        inputs = tree.flatten(data[0])
        last_shapes, shapes = shapes, [a.shape[1:] for a in inputs]
        if group and (size >= CHUNK_BYTES or shapes != last_shapes):
            yield concatenate(*group)
            group, size = [], 0
        group.append(data)
        size += sum(a.nbytes for a in inputs)
    if not group:
        raise ValueError("The Dataset is empty.")
    yield concatenate(*group)


def concatenate(*structures, axis=0):
    """Structures of arrays (or None) as one, joined along `axis`."""

    def join(*arrays):
        return None if arrays[0] is None else np.concatenate(arrays, axis=axis)

    return tree.map_structure(join, *structures)


def compile_identity(model, config):
    """A model that returns its inputs, with the loss and fresh copies of the metrics of `model`."""

    class Identity(keras.Model):
        def call(self, inputs):
            return inputs

    def fresh(metric):
        is_metric = isinstance(metric, keras.Metric)
        return metric.from_config(metric.get_config()) if is_metric else metric

    identity = Identity(autocast=False)
    if getattr(model, "output_names", None):
        identity.output_names = model.output_names
    identity.compile(
        loss=config["loss"],
        loss_weights=config["loss_weights"],
        metrics=tree.map_structure(fresh, config["metrics"]),
        weighted_metrics=tree.map_structure(fresh, config["weighted_metrics"]),
    )
    return identity
