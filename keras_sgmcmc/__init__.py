"""Stochastic-gradient MCMC as Keras optimizers."""

from keras_sgmcmc import optimizers
from keras_sgmcmc.optimizers import SGLD, pSGLD
from keras_sgmcmc.priors import DistributionPrior, GaussianPrior

__version__ = "0.1.0"
