"""XLA around one function, on the backend that needs to be told (TensorFlow)."""

import tensorflow as tf

# Weights from which an update of a callback's own is compiled.
_COMPILED_FROM = 100_000


def compiled(function):
    """`function` compiled by XLA; inlined where the caller is compiled already."""
    return tf.function(function, jit_compile=True, autograph=False, reduce_retracing=True)


def compiled_if_large(function, weights):
    """`function`, to be called in a step, compiled by itself where that is worth it.

    Many cheap operations on arrays as large as the weights cost one pass if they are fused, which
    on few weights is not worth the seconds that compiling takes, nor in an eager step, which would
    compile again every time. Assignments that are passed to other replicas can't be compiled.
    """
    if is_eager() or is_distributed() or weights < _COMPILED_FROM:
        return function
    return compiled(function)


def densify(gradient):
    """A sparse gradient (`IndexedSlices`) as a dense tensor, anything else as it is.

    A prior and Langevin noise move every row of an embedding, also those that the batch did not
    touch; and the compiled update would be compiled anew for each number of touched rows.
    """
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def replicas():
    """Number of replicas that the current distribution strategy keeps in step."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def is_distributed():
    """Whether a distribution strategy governs what runs now, be it one of a single replica.

    Under one an update changes context, which neither a function of its own nor a branch may do.
    """
    return tf.distribute.has_strategy()


def is_eager():
    """Whether operations run at once rather than being traced."""
    return tf.executing_eagerly()


def after(tensors):
    """A context whose operations run after, and only with, those that give the tensors."""
    return tf.control_dependencies(tensors)


def traced(function):
    """`function` as a graph that is traced once."""
    return tf.function(function, autograph=False)


def concrete(function, *specs):
    """`function` of such arguments as one graph, for what is called again and again."""
    # The one trace by itself: to find it among several takes time at every call.
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def any_shapes(function, *dtypes):
    """`function` of tensors of any shapes as one graph, traced once for all that call it."""
    signature = [tf.TensorSpec(None, dtype) for dtype in dtypes]
    return tf.function(function, input_signature=signature, autograph=False)


def conditionally(predicate, function, otherwise=lambda: None):
    """Run `function()`, which assigns to variables, if a scalar tensor is true, in any step.

    If it is false `otherwise()` runs, which under a distribution strategy is ignored.
    """

    def branch(function):
        function()
        return tf.constant(0)

    if not is_distributed():
        tf.cond(predicate, lambda: branch(function), lambda: branch(otherwise))
        return

    # Assignments to mirrored variables can't stand in a branch of one replica's own.
    def across(strategy, predicate):
        local = strategy.experimental_local_results(predicate)[0]
        tf.cond(
            local,
            lambda: (strategy.extended.call_for_each_replica(function), tf.constant(0))[1],
            lambda: tf.constant(0),
        )

    tf.distribute.get_replica_context().merge_call(across, args=(predicate,))


def reinterpreted(tensor, dtype):
    """The bits of a tensor of any shape as another dtype of the same size."""
    # Not `keras.ops.view`, which asks for the rank.
    return tf.bitcast(tensor, dtype)
