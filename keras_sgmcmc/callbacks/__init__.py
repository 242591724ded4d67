from keras_sgmcmc.callbacks.backup_and_restore import BackupAndRestore
from keras_sgmcmc.callbacks.chain_monitor import ChainMonitor
from keras_sgmcmc.callbacks.gradient_noise import GradientNoise
from keras_sgmcmc.callbacks.in_graph_callback import InGraphCallback
from keras_sgmcmc.callbacks.iterate_averages import IterateAverages
from keras_sgmcmc.callbacks.posterior_samples import PosteriorSamples
from keras_sgmcmc.callbacks.prior_precision_em import PriorPrecisionEM
from keras_sgmcmc.callbacks.step_size_annealing import StepSizeAnnealing

__all__ = [
    "BackupAndRestore",
    "ChainMonitor",
    "GradientNoise",
    "InGraphCallback",
    "IterateAverages",
    "PosteriorSamples",
    "PriorPrecisionEM",
    "StepSizeAnnealing",
]
