"""The covariance of per-example gradients, averaged over steps."""

import math

import keras
import tensorflow as tf

# Examples for each row of a matrix before its inverse means anything.
_EXAMPLES_PER_ROW = 50


def estimate(moments, blocks):
    """Unbiased covariance of the per-example gradients of one batch.

    With F the sum of the gradients c_i of n examples, S the sum of c_i^2 (or of c_i c_i'), in k
    groups whose sums were squared and divided by their sizes,

        C = (S - F^2 / n) / (k - 1)      (or F F').

    Args:
        moments: `keras_sgmcmc.per_example.Moments`.
        blocks: Positions of the variables of each matrix; None for a diagonal.

    Returns:
        One tensor for each entry of `moments.second`.
    """
    if blocks is None:
        squares = [tf.square(first) for first in moments.first]
    else:
        squares = []
        for block in blocks:
            flat = tf.concat([tf.reshape(moments.first[i], [-1]) for i in block], 0)
            squares.append(flat[:, None] * flat[None, :])
    covariances = []
    for second, square, examples, groups in zip(
        moments.second, squares, moments.examples, moments.groups, strict=True
    ):
        examples, groups = tf.cast(examples, second.dtype), tf.cast(groups, second.dtype)
        covariance = (second - square / examples) / (groups - 1.0)
        # Rounding can leave a negative variance where all examples agree.
        covariances.append(tf.maximum(covariance, 0) if blocks is None else covariance)
    return covariances


class RunningCovariance:
    """Average over batches of `estimate`, in variables.

        C <- C + kappa (C_batch - C),   kappa = max(n / (n + examples so far), 1 - decay),

    so that every example counts the same until the average is as long as an exponential one.

    Args:
        shapes: Shapes of the entries: of the variables, or of the matrices of the blocks.
        dtypes: Their dtypes.
        decay: In (0, 1), of the exponential average; None for one over all batches.
    """

    def __init__(self, shapes, dtypes, decay=None):
        self.decay = decay
        self.entries = [
            statistic(shape, "noise_covariance", dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        self.examples = statistic((), "noise_examples")

    def update(self, estimates, examples, valid, restart):
        """Add the estimate from `examples` examples.

        Args:
            estimates: One tensor for each entry.
            examples: Their number.
            valid: Scalar bool: whether to add anything.
            restart: Scalar bool: whether to forget what was gathered before.

        Returns:
            kappa, 0 where nothing is added.
        """
        before = tf.where(restart, 0.0, tf.convert_to_tensor(self.examples))
        examples = tf.cast(examples, "float32")
        rate = examples / (before + examples)
        if self.decay is not None:
            rate = tf.maximum(rate, 1.0 - self.decay)
        rate = tf.where(valid, rate, 0.0)
        self.examples.assign(before + tf.where(valid, examples, 0.0))
        for entry, new in zip(self.entries, estimates, strict=True):
            old = tf.convert_to_tensor(entry)
            moved = old + tf.cast(rate, old.dtype) * (new - old)
            entry.assign(tf.where(valid, moved, old))
        return rate

    def reset(self):
        """Forget what was gathered."""
        self.examples.assign(0.0)


def examples_needed(shapes, structure, train_size):
    """Number of examples before an average may be inverted.

    One expected pass over the data for a diagonal, 50 times the rows of the largest matrix.
    """
    if structure == "diagonal":
        return train_size or 0
    return _EXAMPLES_PER_ROW * max(rows for rows, _ in shapes)


def diagonals(entries, structure):
    """The variances in the entries, as flat vectors."""
    if structure == "diagonal":
        return [tf.reshape(tf.convert_to_tensor(entry), [-1]) for entry in entries]
    return [tf.linalg.diag_part(tf.convert_to_tensor(entry)) for entry in entries]


def trace(entries, structure):
    """tr C, of what is known of C."""
    return sum(float(tf.reduce_sum(variances)) for variances in diagonals(entries, structure))


def effective_rank(entries, structure):
    """(tr C)^2 / tr(C^2): how many directions hold the noise, as if they held it evenly."""
    # Relative to the trace, since squares of small numbers underflow.
    total = trace(entries, structure)
    if total == 0:
        return math.nan
    squares = (tf.reduce_sum(tf.square(tf.convert_to_tensor(e) / total)) for e in entries)
    return 1.0 / sum(map(float, squares))


def statistic(shape, name, dtype="float32"):
    """A variable for what a step gathers: zeros, the same on all replicas."""
    return keras.Variable(
        initializer="zeros",
        shape=shape,
        dtype=dtype,
        trainable=False,
        aggregation="only_first_replica",
        name=name,
    )
