"""Stochastic-gradient MCMC as Keras optimizers."""

from keras_sgmcmc import (
    callbacks,
    diagnostics,
    metrics,
    optimizers,
    per_example,
    reference,
    schedules,
    theory,
)
from keras_sgmcmc.callbacks.chain_monitor import DivergenceError
from keras_sgmcmc.chains import sample_chains
from keras_sgmcmc.data import minibatches
from keras_sgmcmc.distillation import distill
from keras_sgmcmc.losses import GaussianNegativeLogLikelihood, NegativeLogLikelihood
from keras_sgmcmc.optimizers import SGFS, SGLD, ConstantSGD, pSGLD
from keras_sgmcmc.posterior import Posterior
from keras_sgmcmc.priors import DistributionPrior, GaussianPrior

__version__ = "0.1.0"

__all__ = [
    "SGFS",
    "SGLD",
    "ConstantSGD",
    "DistributionPrior",
    "DivergenceError",
    "GaussianNegativeLogLikelihood",
    "GaussianPrior",
    "NegativeLogLikelihood",
    "Posterior",
    "callbacks",
    "diagnostics",
    "distill",
    "metrics",
    "minibatches",
    "optimizers",
    "pSGLD",
    "per_example",
    "reference",
    "sample_chains",
    "schedules",
    "theory",
]
