"""Curvature against steps: the largest eigenvalue of H A, and A and C of small models."""

import logging
import math

import keras
import numpy as np
import tensorflow as tf

from keras_sgmcmc.noise_covariance import estimate
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.per_example import PerExampleGradients, passes

_logger = logging.getLogger(__name__)

_ITERATIONS = 30
# Rows from which one direction of the Hessian is taken, and the whole of a small model's, whose
# tr(A^-1 C) / D they tell to some 2 %.
_ROWS, _ROWS_OF_ALL = 2000, 10_000


def step_curvature(model, optimizer, minibatches):
    """The largest eigenvalue of H A, by power iteration on Hessian-vector products.

    A is the Hessian of the mean loss of some 2,000 rows at the present weights, in inference mode,
    penalties and the Gaussian prior included; H the optimizer's, which is diagonal. A chain is
    unstable from `optimizer.stability_limit` on.

    Args:
        model: The compiled model.
        optimizer: A sampler with a diagonal H.
        minibatches: The `Minibatches` to take rows from.

    Returns:
        A float; None if an operation of the model has no second derivative.
    """
    variables = list(model.trainable_variables)
    roots = []
    for variable in variables:
        H = optimizer.step_size(optimizer._get_variable_index(variable))
        H = tf.broadcast_to(tf.cast(H, variable.dtype), variable.shape)
        roots.append(tf.sqrt(H))
    product = _hessian_product(model, optimizer, variables)

    def iterate(data, vectors):
        norm = tf.linalg.global_norm(vectors)
        vectors = [tf.math.divide_no_nan(v, tf.cast(norm, v.dtype)) for v in vectors]
        scaled = [root * v for root, v in zip(roots, vectors, strict=True)]
        return [root * p for root, p in zip(roots, product(data, scaled), strict=True)]

    data = _rows_of(minibatches, _ROWS)
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


def curvature_and_noise(model, optimizer, minibatches):
    """A and C of a small model at the present weights: two arrays [D, D], float64.

    A is as for `step_curvature`, by D Hessian-vector products; C the covariance of per-example
    gradients of the same rows, penalties and prior excluded.

    Returns:
        (A, C); None if an operation of the model has no second derivative.
    """
    variables = list(model.trainable_variables)
    data = _rows_of(minibatches, _ROWS_OF_ALL)
    product = tf.function(_hessian_product(model, optimizer, variables), autograph=False)
    sizes = [math.prod(v.shape) for v in variables]
    columns = []
    try:
        for row in np.eye(sum(sizes)):
            parts = np.split(row, np.cumsum(sizes)[:-1])
            vectors = [
                tf.constant(part.reshape(v.shape), v.dtype)
                for part, v in zip(parts, variables, strict=True)
            ]
            columns.append(np.concatenate([p.numpy().ravel() for p in product(data, vectors)]))
    except LookupError as error:
        _logger.debug("The curvature of %s is not known: %s", model.name, error)
        return None
    A = np.array(columns, "float64")
    estimator = PerExampleGradients(model, "full")
    estimator.plan(data)
    moments = tf.function(estimator.moments, autograph=False)(data)
    (C,) = estimate(moments, estimator.blocks)
    return (A + A.T) / 2, C.numpy().astype("float64")


def _rows_of(minibatches, rows):
    count = -(-min(rows, minibatches.train_size) // minibatches.batch_size)
    stacked = minibatches.batches(minibatches.position, count)
    return tf.nest.map_structure(lambda t: tf.reshape(t, [-1, *t.shape[2:]]), stacked)


def _hessian_product(model, optimizer, variables):
    """Function of a batch and of one tensor for each variable, to A times these."""
    precisions = [0.0] * len(variables)
    # Of a variable of Keras that nothing depends on, TensorFlow can't make the zeros.
    tensors = [variable.value for variable in variables]
    if isinstance(optimizer, Sampler) and optimizer.train_size is not None:
        indices = map(optimizer._get_variable_index, variables)
        precisions = [optimizer.precision_of(i) / optimizer.train_size for i in indices]

    def product(data, vectors):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner, keras.StatelessScope(collect_losses=True):
                loss = passes.mean_loss(model, data)
                for variable in variables:
                    if variable.regularizer is not None:
                        loss += tf.cast(variable.regularizer(variable), loss.dtype)
            gradients = inner.gradient(loss, tensors, unconnected_gradients="zero")
            dots = [tf.reduce_sum(g * u) for g, u in zip(gradients, vectors, strict=True)]
            projection = tf.add_n([tf.cast(dot, "float32") for dot in dots])
        products = outer.gradient(projection, tensors, unconnected_gradients="zero")
        return [
            tf.convert_to_tensor(p) + tf.cast(precision, u.dtype) * u
            for p, precision, u in zip(products, precisions, vectors, strict=True)
        ]

    return product
