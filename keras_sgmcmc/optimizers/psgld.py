"""Preconditioned stochastic gradient Langevin dynamics."""

import warnings

import keras
from keras import ops

from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.validation import positive_integer, real_number


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class pSGLD(Sampler):
    """Preconditioned stochastic gradient Langevin dynamics (Li et al. 2016, algorithm 1).

    With eta = `learning_rate`, N = `train_size`, T = `temperature`, the batch's mean-loss gradient
    g, standard normals z, and all operations elementwise,

        V <- rho V + (1 - rho) g^2,      G = 1 / (epsilon + sqrt(V)),      H = eta G,
        theta <- theta - H (g + grad(-log p(theta)) / N) + sqrt(2 T H / N) z.

    V sees the likelihood alone, as in the paper; the paper's step is 2 eta / N. With T = 0 and no
    prior this is RMSprop with its epsilon outside the root.

    A preconditioner that goes on adapting depends on theta, which biases the law that is sampled:
    on N(0, 1) with rho = 0.99 the variance comes out as 1.47. Set `adaptation_steps` to freeze it
    after burn-in, and the bias is gone.

    Args:
        learning_rate: eta. Defaults to `0.001`.
        rho: Decay of V, in [0, 1). Defaults to `0.99`.
        epsilon: Positive number added to sqrt(V), in units of the mean-loss gradient. It bounds H
            where the data are silent: eta lambda / (epsilon N) has to stay below 1 for a prior of
            precision lambda, and a warning says so. Defaults to `1e-5`.
        adaptation_steps: Number of updates after which V is frozen, several times 1 / (1 - rho).
            Defaults to None: V adapts for ever, as in the paper.
        **kwargs: See `keras_sgmcmc.optimizers.Sampler`: `train_size`, `prior`, `temperature`,
            `seed`, `jit_compile`, and the common arguments of Keras' optimizers.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> model.compile(
    ...     optimizer=sg.pSGLD(1e-3, train_size=len(x_train), prior=1.0, adaptation_steps=1000),
    ...     loss="sparse_categorical_crossentropy",
    ... )

    Reference: C. Li, C. Chen, D. Carlson, L. Carin, "Preconditioned stochastic gradient Langevin
    dynamics for deep neural networks", AAAI 2016.
    """

    def __init__(
        self,
        learning_rate=0.001,
        *,
        rho=0.99,
        epsilon=1e-5,
        adaptation_steps=None,
        **kwargs,
    ):
        super().__init__(learning_rate, **kwargs)
        self.rho = real_number("rho", rho, minimum=0.0, below=1.0)
        self.epsilon = real_number("epsilon", epsilon, positive=True)
        self.adaptation_steps = (
            None
            if adaptation_steps is None
            else positive_integer("adaptation_steps", adaptation_steps)
        )

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._second_moments = self.add_slots("second_moment")
        self._warn_if_unstable_without_data()

    def _warn_if_unstable_without_data(self):
        rate = self._configured_learning_rate
        if callable(rate) or self.prior is None:
            return
        paths = [variable.path for variable in self._trainable_variables]
        largest = max(self.prior.groups_of(paths).precisions.values(), default=0.0)
        contraction = rate / self.epsilon * largest / self.train_size
        if contraction > 1:
            warnings.warn(
                "Where the data are silent (a dead pixel or unit, a row of an embedding that never "
                "occurs) V is 0, the step is learning_rate / epsilon, and with a prior precision "
                f"of {largest:g} it is {contraction:.3g} times the distance to the prior's mode: "
                "inaccurate above 1 and unstable above 2. Raise `epsilon` to at least "
                f"{contraction * self.epsilon:.3g}. Received: epsilon={self.epsilon:g}",
                stacklevel=3,
            )

    def preconditioner(self, index, gradient, learning_rate):
        moment = self._second_moments[index]
        adapted = self.rho * moment + (1 - self.rho) * ops.square(gradient)
        # One bad batch must not spoil the preconditioner for ever.
        adapting = ops.isfinite(adapted)
        if self.adaptation_steps is not None:
            adapting = ops.logical_and(adapting, self.iterations < self.adaptation_steps)
        adapted = ops.where(adapting, adapted, moment)
        self.assign(moment, adapted)
        return learning_rate, self.epsilon + ops.sqrt(adapted)

    def get_config(self):
        config = super().get_config()
        config.update(rho=self.rho, epsilon=self.epsilon, adaptation_steps=self.adaptation_steps)
        return config
