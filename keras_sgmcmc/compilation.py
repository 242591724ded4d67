"""XLA around one function, on the backend that needs to be told (TensorFlow)."""

import tensorflow as tf


def compiled(function):
    """`function` compiled by XLA; inlined where the caller is compiled already."""
    return tf.function(function, jit_compile=True, autograph=False, reduce_retracing=True)


def densify(gradient):
    """A sparse gradient (`IndexedSlices`) as a dense tensor, anything else as it is.

    A prior and Langevin noise move every row of an embedding, also those that the batch did not
    touch; and the compiled update would be compiled anew for each number of touched rows.
    """
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def replicas():
    """Number of replicas that the current distribution strategy keeps in step."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def is_eager():
    """Whether operations run at once rather than being traced."""
    return tf.executing_eagerly()


def traced(function):
    """`function` as a graph that is traced once."""
    return tf.function(function, autograph=False)
