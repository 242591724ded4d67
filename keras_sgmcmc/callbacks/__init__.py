from keras_sgmcmc.callbacks.chain_monitor import ChainMonitor
from keras_sgmcmc.callbacks.in_graph_callback import InGraphCallback
from keras_sgmcmc.callbacks.posterior_samples import PosteriorSamples
from keras_sgmcmc.callbacks.step_size_annealing import StepSizeAnnealing

__all__ = ["ChainMonitor", "InGraphCallback", "PosteriorSamples", "StepSizeAnnealing"]
