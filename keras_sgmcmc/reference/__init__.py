"""Posteriors of small models by established methods, to hold the samplers against.

`hmc`, `nuts` and `advi` work on the same Keras model, compiled loss and prior as the optimizers,
with all rows at every step, and return a `Posterior`. Their target is the samplers' own,

    p_T(theta) ~ exp(-U(theta) / T),    U(theta) = N L(theta) - log p(theta),

where L is the compiled loss on all N rows, a mean, with the penalties of layers in it as in
training. HMC and NUTS are exact but for Monte Carlo error; ADVI is the best Gaussian without
correlations. Each step costs passes over all the data, in one tensor.
"""

from keras_sgmcmc.reference.advi import MeanFieldPosterior, advi
from keras_sgmcmc.reference.markov_chains import ChainsPosterior, hmc, nuts

__all__ = ["ChainsPosterior", "MeanFieldPosterior", "advi", "hmc", "nuts"]
