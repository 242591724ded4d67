from keras_sgmcmc.callbacks.chain_monitor import ChainMonitor
from keras_sgmcmc.callbacks.posterior_samples import PosteriorSamples
from keras_sgmcmc.callbacks.step_size_annealing import StepSizeAnnealing

__all__ = ["ChainMonitor", "PosteriorSamples", "StepSizeAnnealing"]
