"""How well chains have mixed: effective numbers of draws, R-hat, errors, plots.

The functions take arrays of shape [chains, draws, ...], which `Posterior.by_chain` makes;
`Posterior.summary` and the plots take it from there. The estimators are ArviZ's, which comes with
`pip install keras-sgmcmc[diagnostics]`.
"""

from keras_sgmcmc.diagnostics.convergence import (
    autocorrelation_time,
    effective_sample_size,
    kish_sample_size,
    monte_carlo_standard_error,
    potential_scale_reduction,
    relative_error_covariance,
    relative_error_mean,
)
from keras_sgmcmc.diagnostics.plots import (
    plot_autocorrelation,
    plot_energy,
    plot_rank,
    plot_trace,
)

__all__ = [
    "autocorrelation_time",
    "effective_sample_size",
    "kish_sample_size",
    "monte_carlo_standard_error",
    "plot_autocorrelation",
    "plot_energy",
    "plot_rank",
    "plot_trace",
    "potential_scale_reduction",
    "relative_error_covariance",
    "relative_error_mean",
]
