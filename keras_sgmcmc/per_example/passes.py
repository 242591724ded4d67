"""Forward and backward passes that leave no trace on a model, and what can be told from them."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import keras
import tensorflow as tf

from keras_sgmcmc.per_example.taps import recording


def arguments(data):
    """A batch as the triple (x, y, sample_weight)."""
    return keras.utils.unpack_x_y_sample_weight(data)


def tensors(data):
    """The tensors of a batch, as a flat list; missing parts are left out."""
    flat = [tensor for tensor in tf.nest.flatten(data) if tensor is not None]
    for tensor in flat:
        if not tf.is_tensor(tensor) or isinstance(tensor, tf.SparseTensor | tf.RaggedTensor):
            raise ValueError(
                "Per-example gradients need batches of dense tensors, whose first axis is the "
                f"example. Received: {type(tensor).__name__}"
            )
    return flat


def with_tensors(data, flat):
    """A batch of the structure of `data` made of other tensors."""
    flat = iter(flat)
    return tf.nest.map_structure(lambda part: None if part is None else next(flat), data)


def mean_loss(model, data, training=False):
    """The compiled loss on a batch, without the penalties on weights: a mean over examples.

    Losses of several replicas are not divided by their number. Call it in a `StatelessScope`, since
    a loss may update metrics, and layers their state.
    """
    x, y, sample_weight = arguments(data)
    with _without_penalties(model.trainable_variables):
        if model._call_has_training_arg:
            outputs = model(x, training=training)
        else:
            outputs = model(x)
        loss = model._compute_loss(
            x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=training
        )
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return tf.cast(loss, "float32" if loss.dtype.size < 4 else loss.dtype) * replicas


@contextlib.contextmanager
def _without_penalties(variables):
    held = [(v, v.regularizer) for v in variables if getattr(v, "regularizer", None) is not None]
    for variable, _ in held:
        variable.regularizer = None
    try:
        yield
    finally:
        for variable, regularizer in held:
            variable.regularizer = regularizer


def backward(model, data, variables, layers=(), scale=None, frozen=None):
    """One pass in inference mode: its `Record`, and the gradients of the mean loss.

    Args:
        model: A compiled model that has its variables.
        data: A batch.
        variables: The variables to differentiate by.
        layers: Layers to tap.
        scale: Function that scales the loss. What is recorded and returned is scaled.
        frozen: See `taps.recording`.
    """
    with recording(layers, frozen=frozen) as record, tf.GradientTape() as tape:
        with keras.StatelessScope(collect_losses=True):
            loss = mean_loss(model, data)
        if scale is not None:
            loss = scale(loss)
    return record, tape.gradient(loss, variables)


def traced(function, data, leading=None):
    """The graph of `function(data)` on placeholders like the batch `data`, never to be run.

    `leading` replaces the first axis, the examples, by other lengths.
    """
    specs = [
        tf.TensorSpec(
            t.shape if leading is None else [*leading, *t.shape[1:]],
            t.dtype,
        )
        for t in tensors(data)
    ]
    graph_function = tf.function(lambda *flat: function(with_tensors(data, flat)), autograph=False)
    # A thread of its own is outside the step that is being traced, and outside replicas. Under
    # `tf.init_scope` tapes would not record.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(graph_function.get_concrete_function, *specs).result().graph


def trains_as_it_predicts(model, data):
    """Whether the forward pass and the loss are the same in training and in inference.

    The graphs of both are compared, operation by operation.
    """

    def operations(training):
        def forward(data):
            with keras.StatelessScope(collect_losses=True) as scope:
                loss = mean_loss(model, data, training)
            # A state that moves is a difference, even where the loss does not depend on it.
            moved.extend(
                scope.get_current_value(variable) is not None
                for variable in model.non_trainable_variables
            )
            return loss

        moved = []
        graph = traced(forward, data)
        return moved, [_description(op) for op in graph.get_operations()]

    return operations(True) == operations(False)


def _description(op):
    # Names that TensorFlow counts up say nothing.
    attributes = {
        name: str(value)
        for name, value in op.node_def.attr.items()
        if name not in ("_gradient_op_type", "_output_shapes", "shared_name", "container")
    }
    return op.type, attributes
