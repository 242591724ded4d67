"""Constant stochastic gradient descent as a sampler."""

import math
import warnings

import keras
import numpy as np
from keras import ops

from keras_sgmcmc.optimizers.noise_sampler import NoiseSampler
from keras_sgmcmc.structures import length
from keras_sgmcmc.validation import real_number

_PRECONDITIONERS = ("scalar", "diagonal", "sqrt", "full")
# By default no coordinate is moved as if its variance were a smaller part of the mean variance.
_SMALLEST_VARIANCE = 1e-6
# Of the prior in the bracket of the full form, above which a direction has as good as no noise.
_SILENT_SHARE = 0.99
# Relative excess of the variance above which a warning is due.
_LARGEST_BIAS = 0.05


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class ConstantSGD(NoiseSampler):
    """SGD at the constant step whose noise samples the posterior best (Mandt et al. 2017).

    With N = `train_size`, S = `batch_size`, T = `temperature`, the covariance C of per-example
    gradients of D weights and mu = 1 - `momentum`,

        v <- momentum v - H (g + grad(-log p(theta)) / N),      theta <- theta + v

    adds no noise to that of the batch's mean-loss gradient g. H minimises the divergence from the
    stationary law to the posterior:

    | preconditioner | H / mu | source |
    |---|---|---|
    | `"scalar"` | 2 T S D / (N tr C) | theorem 1 |
    | `"diagonal"` | 2 T S / (N C_kk) | corollary 1 |
    | `"sqrt"` | eps G^-1, G = diag(C)^(1/2), eps = 2 T S D / (N tr(C G^-1)) | appendix E |
    | `"full"` | 2 N T (N^2 C / S + T Lambda)^-1 | theorem 2, with the prior's precision Lambda |

    The full form samples the posterior up to the discretisation, which makes the variance
    1 / (1 - S T / N) as large where C is the Hessian (a warning says so where that is above 1.05);
    the others get the trace or the diagonal right.
    It needs batches that are drawn independently (`keras_sgmcmc.minibatches`).

    C comes from `callbacks.GradientNoise`. Without it the diagonal forms take the spread of the
    batches' gradients, from 200 steps after the warm-up on; the full form needs the callback. In
    warm-up, and until C is known, H is `learning_rate`.

    Only where there is gradient noise is anything sampled. With a Gaussian prior H is bounded by
    mu N / Lambda (in the full form where T Lambda is more than 99 % of the bracket; without data
    H A would be 2, the limit of stability), which draws weights without data to the prior's mode.
    With neither noise nor prior they do not move.

    Matrices are scaled to a unit diagonal and factored in float32 every `update_every` steps. If
    they are singular to 1e-5, 1e-5 of their diagonal is added; singular directions without a prior
    do not move. They are counted in the logs.

    Args:
        learning_rate: Step of the warm-up; a schedule is fine. Defaults to `0.01`.
        batch_size: Rows of an update, S: of all replicas and accumulated batches. Needed at build.
        preconditioner: `"scalar"`, `"diagonal"`, `"sqrt"` or `"full"`. Defaults to `"scalar"`.
        momentum: In [0, 1), in the warm-up too. Defaults to `0.0`.
        max_step: Bound on the entries of H / mu in mean-loss units, for all but the full form.
            Defaults to None: a million times the scalar step, which is that of a coordinate with a
            millionth of the mean variance.
        warmup_steps: Updates at the beginning with `learning_rate`. Let them reach the mode: C is
            gathered only afterwards. Defaults to `1000`.
        update_every: Updates between two factorisations. Defaults to `100`.
        memory_budget: Bytes that matrices may take. Defaults to 1 GiB.
        temperature: T > 0. Defaults to `1.0`.
        **kwargs: See `keras_sgmcmc.optimizers.Sampler`: `train_size`, `prior`, `seed`,
            `jit_compile`, and the common arguments of Keras' optimizers.

    Raises:
        ValueError: If an argument is out of range, `temperature=0` included; at build, if
            `train_size` or `batch_size` is missing, if the matrix doesn't fit `memory_budget`, or
            if the full form is to run on several replicas.

    Example:

    >>> data = sg.minibatches(x, y, 100)
    >>> optimizer = sg.ConstantSGD(
    ...     train_size=data.train_size, batch_size=100, prior=1.0, preconditioner="diagonal"
    ... )
    >>> model.compile(optimizer, loss=sg.GaussianNegativeLogLikelihood(0.1))
    >>> model.fit(data, epochs=100, callbacks=[sg.callbacks.GradientNoise(every=10)])

    Reference: S. Mandt, M. D. Hoffman, D. M. Blei, "Stochastic gradient descent as approximate
    Bayesian inference", JMLR 18, 2017.
    """

    injects_noise = False
    steadier = 'or `preconditioner="full"`'

    def __init__(self, learning_rate=0.01, *, preconditioner="scalar", momentum=0.0, **kwargs):
        if preconditioner not in _PRECONDITIONERS:
            raise ValueError(
                f"`preconditioner` should be one of {_PRECONDITIONERS}. "
                f"Received: preconditioner={preconditioner!r}"
            )
        super().__init__(
            learning_rate,
            structure="full" if preconditioner == "full" else "diagonal",
            option="preconditioner",
            offered=("diagonal", "full"),
            **kwargs,
        )
        self.preconditioner_form = preconditioner
        self.momentum = real_number("momentum", momentum, minimum=0.0, below=1.0)
        self.step_factor = 1.0 - self.momentum

    # H = 2 N J^-1 with J = N^2 C / (S T), and + Lambda in the full form.

    def fisher_weight(self):
        return self._batch_ratio() * self.train_size

    @property
    def largest_share(self):
        return _SILENT_SHARE

    def variance(self, index):
        covariance = super().variance(index)
        if self.preconditioner_form == "diagonal":
            return covariance
        if self.preconditioner_form == "scalar":
            return ops.broadcast_to(self._mean(self._sums), tuple(covariance.shape))
        return ops.sqrt(covariance) * self._mean(self._root_sums)

    def bracketed_precision(self, precision):
        return 0.0

    def largest_step(self):
        if self.max_step is not None:
            return self.max_step
        smallest = _SMALLEST_VARIANCE * self.fisher_weight() * self._mean(self._sums)
        return ops.where(smallest > 0, 2.0 * self.train_size / smallest, np.inf)

    def warmup_step(self, index, gradient, learning_rate):
        return learning_rate

    @property
    def stability_limit(self):
        return 2.0 * (1.0 + self.momentum)

    def displace(self, index, variable, increment):
        if self.momentum == 0:
            super().displace(index, variable, increment)
            return
        velocity = self._velocity[index]
        moved = self.momentum * velocity - increment
        self.assign(velocity, moved)
        self.assign_add(variable, moved)

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._warn_of_large_batches()
        if self.momentum > 0:
            self._velocity = self.add_slots("velocity")
        if self.noise_structure == "diagonal":
            shapes = [()] * len(self._trainable_variables)
            self._sums = self.add_state("variance_sum", shapes)
            self._root_sums = self.add_state("deviation_sum", shapes)

    def _warn_of_large_batches(self):
        share = self._configured_temperature * self.batch_size / self.train_size
        if share > _LARGEST_BIAS:
            excess = f"{share / (1 - share):.0%} too large" if share < 1 else "without bound"
            warnings.warn(
                f"Batches of {self.batch_size} of {self.train_size} rows make the optimal step so "
                f"long that the variance comes out {excess} where C is the Hessian: 1 / (1 - S T / "
                f"N) times the posterior's. Take batches of at most "
                f"{max(1, int(_LARGEST_BIAS * self.train_size / self._configured_temperature))} "
                "rows, or SGFS, whose variance does not depend on the batch.",
                stacklevel=3,
            )

    def _store(self, index, covariance):
        super()._store(index, covariance)
        if self.noise_structure == "diagonal":
            self.assign(self._sums[index], ops.sum(covariance))
            self.assign(self._root_sums[index], ops.sum(ops.sqrt(covariance)))

    def _mean(self, sums):
        weights = sum(length(variable) for variable in self._trainable_variables)
        return sum(ops.convert_to_tensor(value) for value in sums) / weights

    @property
    def optimal_learning_rate(self):
        """The KL-optimal step now, a float in mean-loss units; NaN while C isn't known.

        eps of the table times mu for `"sqrt"`, in the units of H G; that of the scalar form for all
        others (eq. 18 and 64).
        """
        if self.is_warming_up:
            return math.nan
        if self.preconditioner_form == "full":
            diagonal = ops.diagonal(self._covariance[0])
            mean = float(ops.convert_to_numpy(ops.mean(diagonal)))
        else:
            is_sqrt = self.preconditioner_form == "sqrt"
            mean = float(
                ops.convert_to_numpy(self._mean(self._root_sums if is_sqrt else self._sums))
            )
        if mean == 0:
            return math.nan
        temperature = float(ops.convert_to_numpy(self._temperature))
        return self.step_factor * 2 * temperature * self.batch_size / (self.train_size * mean)

    def noise_logs(self):
        """See `NoiseSampler.noise_logs`; and `optimal_learning_rate`, `predicted_variance_bias`.

        The bias is S T / N: that of the discretisation, relative to the variance, where C is the
        Hessian.
        """
        logs = super().noise_logs()
        if logs.get("warming_up") == 0:
            logs["optimal_learning_rate"] = self.optimal_learning_rate
            temperature = float(ops.convert_to_numpy(self._temperature))
            bias = temperature * self.batch_size / self.train_size
            logs["predicted_variance_bias"] = bias
        return logs

    def get_config(self):
        config = super().get_config()
        config.update(preconditioner=self.preconditioner_form, momentum=self.momentum)
        return config
