"""Stochastic gradient Langevin dynamics."""

import keras

from keras_sgmcmc.optimizers.base import Sampler


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class SGLD(Sampler):
    """Stochastic gradient Langevin dynamics (Welling & Teh 2011).

    With eta = `learning_rate`, N = `train_size`, T = `temperature`, the batch's mean-loss gradient
    g and standard normals z,

        H = eta,      theta <- theta - eta (g + grad(-log p(theta)) / N) + sqrt(2 T eta / N) z.

    The paper's step is epsilon = 2 eta / N (its eq. 4). With T = 0 and no prior this is
    `keras.optimizers.SGD(eta)`.

    At a constant step on a quadratic of curvature h (of the mean loss, prior included) the
    variance is T / (N h (1 - eta h / 2)) with the full batch; batches of S rows add about
    eta C / (2 S h), where C is the covariance of per-example gradients.

    Args:
        learning_rate: eta, in units of the mean loss. Defaults to `0.01`.
        **kwargs: See `keras_sgmcmc.optimizers.Sampler`: `train_size`, `prior`, `temperature`,
            `seed`, `jit_compile`, and the common arguments of Keras' optimizers.

    Example:

    >>> model.compile(
    ...     optimizer=sg.SGLD(1e-2, train_size=len(x_train), prior=1.0),
    ...     loss=sg.GaussianNegativeLogLikelihood(noise_std=0.1),
    ... )

    Reference: M. Welling, Y. W. Teh, "Bayesian learning via stochastic gradient Langevin
    dynamics", ICML 2011.
    """

    def __init__(self, learning_rate=0.01, **kwargs):
        super().__init__(learning_rate, **kwargs)

    def step_size(self, index):
        return self._get_current_learning_rate()

    def preconditioner(self, index, gradient, learning_rate):
        return learning_rate, None
