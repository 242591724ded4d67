"""Per-example gradients of Keras models: sums, squares and products, without making them all."""

from keras_sgmcmc.per_example.estimator import Moments, PerExampleGradients
from keras_sgmcmc.per_example.rules import register
from keras_sgmcmc.per_example.sources import Outer, Rows, Source, Sum

__all__ = ["Moments", "Outer", "PerExampleGradients", "Rows", "Source", "Sum", "register"]
