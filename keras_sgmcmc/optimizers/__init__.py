from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.optimizers.psgld import pSGLD
from keras_sgmcmc.optimizers.sgld import SGLD

__all__ = ["SGLD", "Sampler", "pSGLD"]
