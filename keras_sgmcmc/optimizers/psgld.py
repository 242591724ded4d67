"""Preconditioned stochastic gradient Langevin dynamics."""

import warnings

import keras
import numpy as np
from keras import ops

from keras_sgmcmc import compilation, curvature
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.validation import positive_integer, real_number

_REMEDY = "Or leave Gamma out and freeze V by `adaptation_steps`, which has no bias to correct"


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

    `include_gamma` adds the paper's drift (eta T / N) Gamma to theta, the derivative of G by theta,

        Gamma_i = -(1 - rho) g_i h_ii / (sqrt(V_i) (epsilon + sqrt(V_i))^2),

    with h_ii the diagonal of the Hessian of the batch's mean loss. It is offered for fidelity to
    algorithm 1. It removes the bias where V follows the gradient of the same theta (rho = 0), but
    with a long memory most of V comes from earlier theta, which Gamma doesn't know: on N(0, 1) with
    rho = 0.99 the variance is 1.46 with it, 1.47 without, and 1.00 frozen. Freezing is recommended.

    Args:
        learning_rate: eta. Defaults to `0.001`.
        rho: Decay of V, in [0, 1). Defaults to `0.99`.
        epsilon: Positive number added to sqrt(V), in units of the mean-loss gradient. It bounds H
            where the data are silent: eta lambda / (epsilon N) has to stay below 1 for a prior of
            precision lambda, and a warning says so. Defaults to `1e-5`.
        adaptation_steps: Number of updates after which V is frozen, several times 1 / (1 - rho).
            Defaults to None: V adapts for ever, as in the paper.
        include_gamma: Whether to add the drift (eta T / N) Gamma while V adapts. h_ii comes from
            the graph of the step: exact, by one Hessian-vector product a weight, for models of up
            to 200 weights, and for larger ones an unbiased estimate by one product with random
            signs (Hutchinson), about the cost of another backward pass. A regularizer of a layer is
            part of the loss, and so of g and h. Needs a traced step: not with `run_eagerly=True`,
            gradient accumulation, several replicas, or float16.
            Gamma can be as large as sqrt(1 - rho) |h_ii| / epsilon^2, so give `epsilon` the size of
            a hundredth of the gradients at least: with the default a chain whose gradients have
            been small for a while can be thrown far out. Defaults to False.
        **kwargs: See `keras_sgmcmc.optimizers.Sampler`: `train_size`, `prior`, `temperature`,
            `seed`, `jit_compile`, and the common arguments of Keras' optimizers.

    Raises:
        ValueError: If an argument is out of range; with `include_gamma`, before the first step, if
            h can't be had from the way in which the step is run.

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
        include_gamma=False,
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
        if not isinstance(include_gamma, (bool, np.bool_)):
            raise ValueError(
                f"`include_gamma` should be True or False. Received: include_gamma={include_gamma}"
            )
        self.include_gamma = bool(include_gamma)
        if self.include_gamma and self.gradient_accumulation_steps:
            raise ValueError(
                "`include_gamma` needs the Hessian of the accumulated batch, whose parts the "
                f"optimizer doesn't keep. Use larger batches without accumulation. {_REMEDY}. "
                f"Received: gradient_accumulation_steps={self.gradient_accumulation_steps}"
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

    def step_size(self, index):
        moment = ops.convert_to_tensor(self._second_moments[index])
        rate = ops.cast(self._get_current_learning_rate(), moment.dtype)
        return rate / (self.epsilon + ops.sqrt(moment))

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

    def curvature(self, gradients, variables):
        """Diagonal of the Hessian of the mean loss while V adapts: dict of index to tensor."""
        if not self.include_gamma or self.train_size is None:
            return None
        self._check_traced()
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        if not pairs:
            return None
        gradients, variables = zip(*pairs, strict=True)
        indices = [self._get_variable_index(variable) for variable in variables]

        def diagonal():
            return curvature.hessian_diagonal(
                gradients, variables, streams=indices, seed=self._seed, step=self.iterations
            )

        if self.adaptation_steps is None:
            diagonals = diagonal()
        else:
            diagonals = ops.cond(
                self.iterations < self.adaptation_steps,
                diagonal,
                lambda: [ops.zeros_like(gradient) for gradient in gradients],
            )
        return dict(zip(indices, diagonals, strict=True))

    def _check_traced(self):
        if compilation.is_eager():
            raise ValueError(
                "`include_gamma` differentiates the gradients once more, in the graph of the step, "
                "and this step is run eagerly. Compile without `run_eagerly`, or put the gradients "
                f"and `optimizer.apply` of your own loop in one `tf.function`. {_REMEDY}."
            )
        if compilation.replicas() > 1:
            raise ValueError(
                "`include_gamma` needs the Hessian of the whole batch, and each of "
                f"{compilation.replicas()} replicas has that of its part. Train on one replica. "
                f"{_REMEDY}."
            )

    def correction(self, index, gradient, learning_rate):
        if self._curvature is None:
            return None
        diagonal = ops.cast(self._curvature[index], gradient.dtype)
        if self.loss_scale_factor is not None:
            # `gradient` is unscaled by now, those that were differentiated were not.
            diagonal = diagonal / self.loss_scale_factor
        root = ops.sqrt(ops.convert_to_tensor(self._second_moments[index]))
        # V stands still where it would not be finite. |g| / sqrt(V) is at most 1 / sqrt(1 - rho);
        # 0 / 0 stands for no gradient.
        adapting = ops.logical_and(root > 0, ops.isfinite(ops.square(gradient)))
        if self.adaptation_steps is not None:
            adapting = ops.logical_and(adapting, self.iterations < self.adaptation_steps)
        ratio = ops.where(adapting, gradient / ops.where(root > 0, root, ops.ones_like(root)), 0.0)
        gamma = -(1 - self.rho) * ratio * diagonal / ops.square(self.epsilon + root)
        temperature = ops.cast(self._temperature, gradient.dtype)
        return (learning_rate * temperature / self.train_size) * gamma

    def get_config(self):
        config = super().get_config()
        config.update(
            rho=self.rho,
            epsilon=self.epsilon,
            adaptation_steps=self.adaptation_steps,
            include_gamma=self.include_gamma,
        )
        return config
