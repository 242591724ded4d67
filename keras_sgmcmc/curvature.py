"""The diagonal of the Hessian of a loss whose gradient is being traced.

An optimizer never sees the data, but inside a traced step the gradients it is given are nodes of
the same graph as the forward pass, and so can be differentiated once more.
"""

import itertools
import math

import numpy as np
import tensorflow as tf

from keras_sgmcmc import random

# Number of weights up to which every entry is worked out, with one Hessian-vector product each.
# On a CPU core a product of a small network takes 30 to 100 us outside XLA, so that 200 of them
# make a step of 10 to 20 ms: dear, and still bearable for the models of which one wants Gamma.
EXACT_UP_TO = 200

# The samplers' noise has streams 0, 1, 2, ...: the probes stay clear of them.
_FIRST_STREAM = 2**31


def hessian_diagonal(gradients, variables, *, streams, seed, step, exact_up_to=None):
    """Diagonal h of the Hessian of the loss that `gradients` are the gradients of.

    With D weights in all and D <= `exact_up_to`, h_i = d g_i / d theta_i by D Hessian-vector
    products, one after the other, so that nothing of size D x D is held. Above that, one product
    with a random vector z of independent signs (Hutchinson): h = z * (H z), unbiased, and exact
    where H is diagonal. The signs are a function of `(seed, step, stream)`.

    Args:
        gradients: Dense tensors of the graph that is being traced, the gradients of one scalar.
        variables: The `keras.Variable`s they are with respect to.
        streams: One integer below 2^31 for each variable, which keys its signs.
        seed, step: Integers or scalar integer tensors.
        exact_up_to: Largest D for the exact form. None stands for `EXACT_UP_TO`.

    Returns:
        Tensors like `gradients`, in their units divided by those of the weights.

    Raises:
        ValueError: If no gradient depends on the variables within the graph, if an operation of the
            model has no second derivative, or if the model computes in float16.

    Reference: M. F. Hutchinson, "A stochastic estimator of the trace of the influence matrix",
    Communications in Statistics 18(3), 1989; C. Bekas, E. Kokiopoulou, Y. Saad, "An estimator for
    the diagonal of a matrix", Applied Numerical Mathematics 57, 2007.
    """
    gradients = [tf.ensure_shape(g, v.shape) for g, v in zip(gradients, variables, strict=True)]
    names = [_names_in_graph(variable.value) for variable in variables]
    _refuse_float16(variables, names)
    exact_up_to = EXACT_UP_TO if exact_up_to is None else exact_up_to
    try:
        if all(d is None for d in tf.gradients(gradients, list(itertools.chain(*names)))):
            raise ValueError(
                "The gradients don't depend on the variables in the graph that is being traced: "
                "they were computed in another `tf.function` or outside of it, or the loss is "
                "linear. Compute the gradients in the function that calls `optimizer.apply`."
            )
        if sum(math.prod(gradient.shape) for gradient in gradients) <= exact_up_to:
            return [_exact(g, of_one) for g, of_one in zip(gradients, names, strict=True)]
        return _hutchinson(gradients, names, streams, seed, step)
    except LookupError as error:
        raise ValueError(
            "An operation of this model has no second derivative in TensorFlow, which the diagonal "
            f"of the Hessian needs: {error}"
        ) from error


def signs(shape, dtype, *, seed, step, stream):
    """Independent +1 and -1 with equal odds: a pure function of `(seed, step, stream)`."""
    stream = np.uint32(_FIRST_STREAM + stream)
    word, _ = random.words(shape, seed=seed, step=step, stream=stream)
    return 1 - 2 * tf.cast(tf.bitwise.right_shift(word, tf.constant(31, tf.uint32)), dtype)


def _names_in_graph(variable):
    """The tensors that stand for `variable` in the functions being traced, from the outside in.

    A function that reads a variable does so through a placeholder of its own, and the gradient has
    to be taken with respect to that. The step may be traced several functions deep: the loop of
    `steps_per_execution`, the branches of loss scaling.
    """
    graphs = []
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and hasattr(graph, "captures"):
        graphs.append(graph)
        graph = graph.outer_graph
    names = [variable.handle]
    for graph in reversed(graphs):
        names += [inner for outer, inner in graph.captures if any(outer is name for name in names)]
    return names[1:]


def _refuse_float16(variables, names):
    # The derivative of an unscaled gradient starts from 1 / loss scale, which Keras doubles until
    # gradients overflow. By then it has long been below the smallest number of float16.
    for variable, of_one in zip(variables, names, strict=True):
        readers = [op for name in of_one for op in name.consumers()]
        values = [value for op in readers if op.type == "ReadVariableOp" for value in op.outputs]
        users = [op for value in values for op in value.consumers()]
        if any(op.type == "Cast" and op.outputs[0].dtype == tf.float16 for op in users):
            raise ValueError(
                "Second derivatives vanish in float16 under loss scaling: use "
                "`keras.config.set_dtype_policy('mixed_bfloat16')`, which needs no loss scaling, "
                f"or float32. Received: {getattr(variable, 'path', variable.name)}, which the "
                "model computes with in float16"
            )


def _sum(derivatives, like):
    """Sum of the derivatives with respect to the names of one variable; None stands for 0."""
    parts = [tf.convert_to_tensor(d) for d in derivatives if d is not None]
    return tf.add_n(parts) if parts else tf.zeros_like(like)


def _exact(gradient, names):
    flat = tf.reshape(gradient, (-1,))

    def entry(i):
        return tf.reshape(_sum(tf.gradients(flat[i], names), like=gradient), (-1,))[i]

    # Not `tf.vectorized_map`: outside XLA it corrupts memory for some softmax gradients.
    entries = tf.map_fn(entry, tf.range(flat.shape[0]), fn_output_signature=gradient.dtype)
    return tf.reshape(entries, gradient.shape)


def _hutchinson(gradients, names, streams, seed, step):
    probes = [
        signs(tuple(gradient.shape), gradient.dtype, seed=seed, step=step, stream=stream)
        for gradient, stream in zip(gradients, streams, strict=True)
    ]
    projection = tf.add_n([tf.reduce_sum(g * z) for g, z in zip(gradients, probes, strict=True)])
    products = iter(tf.gradients(projection, list(itertools.chain(*names))))
    return [
        z * _sum(itertools.islice(products, len(of_one)), like=z)
        for z, of_one in zip(probes, names, strict=True)
    ]
