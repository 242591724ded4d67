"""Step-size schedules from the SG-MCMC papers, for the `learning_rate` of any Keras optimizer.

In every schedule t counts optimizer steps: the value of `optimizer.iterations`, that is real
updates, not batches or epochs. The three formulas are evaluated in float64 on an integer t and
rounded once, at the end, because float32 holds no integer above 2^24 exactly.
"""

import math
import warnings

import keras
from keras import ops

from keras_sgmcmc.validation import positive_integer, real_number


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class PowerDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Polynomial decay of the step size, as in the first SGLD paper.

        learning_rate(t) = a (b + t)^-gamma

    A decreasing step makes the discretisation error of a sampler vanish in the long run, provided
    that it decreases neither too fast nor too slowly (Robbins & Monro):

        sum_t learning_rate(t) = inf      the chain can travel any distance: needs gamma <= 1
        sum_t learning_rate(t)^2 < inf    the error dies out:                needs gamma > 1/2

    Draws of such a chain are not equally spaced in time, so averages over them weight each draw
    by its step size. Teh, Thiery & Vollmer show that these weighted averages converge fastest with
    gamma = 1/3, which breaks the second condition: it is allowed here, with the warning.

    A Keras learning rate multiplies the gradient of the mean loss. The papers' step eps
    multiplies the gradient of the whole log posterior, halved: learning_rate = N eps / 2 for N
    training rows, so `a` here is N/2 times the papers' a.

    Args:
        a: Positive float, in units of the learning rate.
        b: Positive float, in optimizer steps, i.e. `optimizer.iterations`: real updates, not
            batches or epochs. The step size is nearly constant for the first b steps.
        gamma: Float, without unit. Outside (0.5, 1] a warning is given.

    Raises:
        ValueError: If `a` or `b` is not a positive finite number, or `gamma` is not finite.

    Example:

    ```python
    # 0.01 at the start, 0.001 at step 100,000
    gamma = 0.55
    b = 1e5 / (10 ** (1 / gamma) - 1)
    schedule = keras_sgmcmc.schedules.PowerDecay(a=0.01 * b**gamma, b=b, gamma=gamma)
    optimizer = keras.optimizers.SGD(learning_rate=schedule)
    ```

    References:
        Welling & Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics,
        section 2. Teh, Thiery & Vollmer (2016), Consistency and fluctuations for stochastic
        gradient Langevin dynamics.
    """

    def __init__(self, a, b, gamma):
        self.a = real_number("a", a, positive=True)
        self.b = real_number("b", b, positive=True)
        self.gamma = real_number("gamma", gamma)
        if not 0.5 < self.gamma <= 1.0:
            if self.gamma > 1.0:
                broken = "sum eps_t = inf: the chain freezes before it has explored the posterior"
            else:
                broken = "sum eps_t^2 < inf: the discretisation error need not die out"
            warnings.warn(
                "PowerDecay's step sizes eps_t meet the Robbins-Monro conditions, "
                "sum eps_t = inf and sum eps_t^2 < inf, only for gamma in (0.5, 1]. "
                f"Received: gamma={self.gamma}, which breaks {broken}. "
                "Choose gamma in (0.5, 1], e.g. 0.55; for a constant step, give the optimizer "
                "a float as its learning_rate.",
                stacklevel=2,
            )

    def __call__(self, step):
        t = ops.cast(_integer_step(step), "float64")
        return _to_floatx(self.a * ops.power(self.b + t, -self.gamma))

    def get_config(self):
        return {"a": self.a, "b": self.b, "gamma": self.gamma}


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class BlockDecay(keras.optimizers.schedules.LearningRateSchedule):
    """A constant step size within a block of steps, cut by a factor from block to block.

        learning_rate(t) = initial * factor^floor(t / every)

    Li et al. (2016) halve the step of pSGLD after every block. The step sizes of a chain of any
    length sum to less than initial * every / (1 - factor), so the chain freezes in the end:
    choose `every` so that the run lasts a few blocks.

    Args:
        initial: Positive float, the learning rate of the first block.
        every: Positive integer, the length of a block in optimizer steps, i.e.
            `optimizer.iterations`: real updates, not batches or epochs. For a block of E epochs
            give E times the steps of an epoch.
        factor: Float between 0 and 1, without unit. Defaults to 0.5.

    Raises:
        ValueError: If an argument is outside its range.

    Example:

    ```python
    steps_per_epoch = 60_000 // 100
    schedule = keras_sgmcmc.schedules.BlockDecay(initial=5e-4, every=20 * steps_per_epoch)
    optimizer = keras.optimizers.SGD(learning_rate=schedule)
    ```

    References:
        Li, Chen, Carlson & Carin (2016), Preconditioned stochastic gradient Langevin dynamics
        for deep neural networks.
    """

    def __init__(self, initial, every, factor=0.5):
        self.initial = real_number("initial", initial, positive=True)
        self.every = positive_integer("every", every)
        self.factor = real_number("factor", factor, positive=True, below=1.0)

    def __call__(self, step):
        block = ops.cast(ops.floor_divide(_integer_step(step), self.every), "float64")
        return _to_floatx(self.initial * ops.power(self.factor, block))

    def get_config(self):
        return {"initial": self.initial, "every": self.every, "factor": self.factor}


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class Cyclical(keras.optimizers.schedules.LearningRateSchedule):
    """The cosine cycles of cyclical SG-MCMC.

        learning_rate(t) = initial / 2 * [cos(pi * (t mod cycle_steps) / cycle_steps) + 1]

    Each cycle starts at `initial`, where the chain leaves the mode it is in, and falls almost to
    zero, where it samples around the next one. Zhang et al. (2020, eq. 1) count t from 1, and keep
    draws only in the later part of each cycle: for instance where the learning rate is below half
    of `initial`, the second half of a cycle.

    Args:
        initial: Positive float, the learning rate at the start of a cycle.
        cycle_steps: Positive integer, the length of a cycle in optimizer steps, i.e.
            `optimizer.iterations`: real updates, not batches or epochs. For M cycles in a run of
            K steps: ceil(K / M).

    Raises:
        ValueError: If `initial` is not a positive finite number or `cycle_steps` not a positive
            integer.

    Example:

    ```python
    schedule = keras_sgmcmc.schedules.Cyclical(initial=0.1, cycle_steps=5000)
    optimizer = keras.optimizers.SGD(learning_rate=schedule)
    ```

    References:
        Zhang, Li, Zhang, Chen & Wilson (2020), Cyclical stochastic gradient MCMC for Bayesian
        deep learning.
    """

    def __init__(self, initial, cycle_steps):
        self.initial = real_number("initial", initial, positive=True)
        self.cycle_steps = positive_integer("cycle_steps", cycle_steps)

    def __call__(self, step):
        position = ops.cast(ops.mod(_integer_step(step), self.cycle_steps), "float64")
        # cos(x) + 1 = 2 cos(x/2)^2, which does not cancel at the end of a cycle.
        half_angle = position * (math.pi / 2.0 / self.cycle_steps)
        return _to_floatx(self.initial * ops.square(ops.cos(half_angle)))

    def get_config(self):
        return {"initial": self.initial, "cycle_steps": self.cycle_steps}


def _integer_step(step):
    return ops.convert_to_tensor(step, dtype="int64")


def _to_floatx(value):
    return ops.cast(value, keras.config.floatx())
