from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.optimizers.constant_sgd import ConstantSGD
from keras_sgmcmc.optimizers.psgld import pSGLD
from keras_sgmcmc.optimizers.sgfs import SGFS
from keras_sgmcmc.optimizers.sgld import SGLD

__all__ = ["SGFS", "SGLD", "ConstantSGD", "Sampler", "pSGLD"]
