"""How far a step is from the end of stability: the largest eigenvalue of H A."""

import logging

import keras
import tensorflow as tf

from keras_sgmcmc.per_example import passes

_logger = logging.getLogger(__name__)

_ITERATIONS = 30
# Rows from which the Hessian is taken.
_ROWS = 2000


def step_curvature(model, optimizer, minibatches):
    """The largest eigenvalue of H A, by power iteration on Hessian-vector products.

    A is the Hessian of the mean loss of some 2,000 rows at the present weights, in inference mode,
    and of the Gaussian prior; H the optimizer's, which is diagonal. A chain is unstable from
    `optimizer.stability_limit` on.

    Args:
        model: The compiled model.
        optimizer: A sampler with a diagonal H.
        minibatches: The `Minibatches` to take rows from.

    Returns:
        A float; None if an operation of the model has no second derivative.
    """
    variables = list(model.trainable_variables)
    roots, precisions = [], []
    for variable in variables:
        index = optimizer._get_variable_index(variable)
        H = keras.ops.broadcast_to(optimizer.step_size(index), variable.shape)
        roots.append(tf.sqrt(tf.cast(H, variable.dtype)))
        precision = tf.cast(optimizer.precision_of(index), variable.dtype)
        precisions.append(precision / optimizer.train_size)
    count = -(-min(_ROWS, minibatches.train_size) // minibatches.batch_size)
    stacked = minibatches.batches(minibatches.position, count)
    data = tf.nest.map_structure(lambda t: tf.reshape(t, [-1, *t.shape[2:]]), stacked)

    def product(data, vectors):
        scaled = [root * v for root, v in zip(roots, vectors, strict=True)]
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner, keras.StatelessScope(collect_losses=True):
                loss = passes.mean_loss(model, data)
            gradients = inner.gradient(loss, variables, unconnected_gradients="zero")
            dots = [tf.reduce_sum(g * u) for g, u in zip(gradients, scaled, strict=True)]
            projection = tf.add_n([tf.cast(dot, "float32") for dot in dots])
        products = outer.gradient(projection, variables, unconnected_gradients="zero")
        return [
            root * (tf.convert_to_tensor(p) + precision * u)
            for root, p, precision, u in zip(roots, products, precisions, scaled, strict=True)
        ]

    def iterate(data, vectors):
        norm = tf.linalg.global_norm(vectors)
        return product(data, [tf.math.divide_no_nan(v, tf.cast(norm, v.dtype)) for v in vectors])

    generator = tf.random.Generator.from_seed(0, alg="philox")
    vectors = [generator.normal(v.shape, dtype=v.dtype) for v in variables]
    function = tf.function(iterate, autograph=False)
    try:
        for _ in range(_ITERATIONS):
            vectors = function(data, vectors)
    except LookupError as error:
        _logger.debug("The stability of %s is not known: %s", model.name, error)
        return None
    return float(tf.linalg.global_norm(vectors))
