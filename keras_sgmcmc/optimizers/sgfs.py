"""Stochastic gradient Fisher scoring."""

import keras
from keras import ops

from keras_sgmcmc.optimizers.noise_sampler import NoiseSampler
from keras_sgmcmc.structures import STRUCTURES
from keras_sgmcmc.validation import real_number

_RHO, _EPSILON = 0.9, 1e-7


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class SGFS(NoiseSampler):
    """Stochastic gradient Fisher scoring (Ahn, Korattikara & Welling 2012).

    With N = `train_size`, S = `batch_size`, T = `temperature`, the covariance C of per-example
    gradients, the precision Lambda of a Gaussian prior (0 for any other), the batch's mean-loss
    gradient g and standard normals z,

        gamma = 1 + N / (S T),      J = gamma N C + Lambda,
        H = 2 N (J + B)^-1,         Q = T H B H / N^2,
        theta <- theta - H (g + grad(-log p(theta)) / N) + sqrt(Q) z,

    which is the paper's eq. 11 for the gradient of the mean loss, with the prior in the bracket.
    `noise="fisher"` is B = a^2 J with a^2 = 4 / `learning_rate` (section 5); a number b is
    B = (4 b / `learning_rate`) I. Without a step (`learning_rate=None`) B = 0: the noise of the
    batches is all there is, and mixing is fastest.

    The noise of the batches, H C H / S, is counted: where the posterior is Gaussian and C is the
    Hessian of the likelihood's mean loss, the full form samples it exactly for every step and batch
    size. It needs batches that are drawn independently (`keras_sgmcmc.minibatches`).

    C comes from `callbacks.GradientNoise`. Without it the diagonal form takes the spread of the
    batches' gradients, from 200 steps after the warm-up on; the other forms need the callback. In
    warm-up, and until C is known, the steps are those of RMSprop, without noise.

    Where the prior outweighs the data (a dead pixel or unit, a row of an embedding that never
    occurs) the variance is T / Lambda and the correlation between steps 1 - 2 / (1 + a^2), which
    for B = 0 would be -1: there H is bounded by N / Lambda, and Q = 2 T H / N - T H J H / N^2. With
    neither variance nor prior coordinates do not move.

    Matrices are scaled to a unit diagonal and factored in float32 every `update_every` steps. If
    they are singular to 1e-5, 1e-5 of their diagonal is added to J, with the noise that keeps the
    variance right. Singular directions without a prior do not move. They are counted in the logs.

    Args:
        learning_rate: The paper's step, positive, or None for the largest. A variable like any
            learning rate. Defaults to `1/9`, a = 6, as in the paper's networks.
        batch_size: Rows of an update, S: of all replicas and accumulated batches. Needed at build.
        fisher: Form of C: `"diagonal"`, `"block"` (a matrix for each layer) or `"full"`. Defaults
            to `"diagonal"`.
        noise: `"fisher"`, or b, a positive number in the units of H^-1 N, that is posterior
            precisions. Defaults to `"fisher"`.
        max_step: Bound on the entries of H in mean-loss units, for `fisher="diagonal"` (Mandt et
            al. 2017, section 4.2); where it holds, Q = 2 T H / N - T H J H / N^2. Defaults to None.
        warmup_steps: Updates at the beginning that are RMSprop's. Let them reach the mode: C is
            gathered only afterwards. Defaults to `1000`.
        warmup_learning_rate: Their learning rate. Defaults to `0.001`.
        update_every: Updates between two factorisations. Defaults to `100`.
        memory_budget: Bytes that matrices may take. Defaults to 1 GiB.
        temperature: T > 0. Defaults to `1.0`.
        **kwargs: See `keras_sgmcmc.optimizers.Sampler`: `train_size`, `prior`, `seed`,
            `jit_compile`, and the common arguments of Keras' optimizers.

    Raises:
        ValueError: If an argument is out of range, `temperature=0` included; at build, if
            `train_size` or `batch_size` is missing, if the matrices don't fit `memory_budget`, or
            if a form other than the diagonal is to run on several replicas.

    Example:

    >>> data = sg.minibatches(x, y, 100)
    >>> optimizer = sg.SGFS(
    ...     train_size=data.train_size, batch_size=100, prior=1.0, fisher="block"
    ... )
    >>> model.compile(optimizer, loss="sparse_categorical_crossentropy")
    >>> model.fit(data, epochs=100, callbacks=[sg.callbacks.GradientNoise(every=10)])

    References: S. Ahn, A. Korattikara, M. Welling, "Bayesian posterior sampling via stochastic
    gradient Fisher scoring", ICML 2012. S. Mandt, M. D. Hoffman, D. M. Blei, "Stochastic gradient
    descent as approximate Bayesian inference", JMLR 18, 2017, section 4.2.
    """

    steadier = 'a smaller `learning_rate` (a larger a), or `fisher="block"` or `"full"`'

    def __init__(
        self,
        learning_rate=1.0 / 9.0,
        *,
        fisher="diagonal",
        noise="fisher",
        warmup_learning_rate=1e-3,
        **kwargs,
    ):
        if fisher not in STRUCTURES:
            raise ValueError(f"`fisher` should be one of {STRUCTURES}. Received: fisher={fisher!r}")
        if noise != "fisher":
            if isinstance(noise, str):
                raise ValueError(
                    f"`noise` should be 'fisher' or a positive number. Received: noise={noise!r}"
                )
            noise = real_number("noise", noise, positive=True)
        self_largest = learning_rate is None
        super().__init__(
            1.0 if self_largest else learning_rate,
            structure=fisher,
            option="fisher",
            offered=STRUCTURES,
            **kwargs,
        )
        self._is_largest = self_largest
        self.fisher, self.noise = fisher, noise
        self.warmup_learning_rate = real_number(
            "warmup_learning_rate", warmup_learning_rate, positive=True
        )

    # H = 2 N (J + B)^-1 with J = gamma N C + Lambda and B = a^2 J or (4 b / step) I.

    def fisher_weight(self):
        return (1.0 + self._batch_ratio()) * self.train_size

    def fisher_noise(self):
        if self._is_largest or self.noise != "fisher":
            return 0.0
        return 4.0 / ops.convert_to_tensor(self.learning_rate)

    def identity_noise(self):
        if self._is_largest or self.noise == "fisher":
            return None
        return 4.0 * self.noise / ops.convert_to_tensor(self.learning_rate)

    @property
    def largest_share(self):
        return 0.5 if self._is_largest else None

    def warmup_step(self, index, gradient, learning_rate):
        del learning_rate
        moment = self._second_moments[index]
        moved = _RHO * moment + (1.0 - _RHO) * ops.square(gradient)
        moved = ops.where(ops.isfinite(moved), moved, moment)
        self.assign(moment, moved)
        return self.warmup_learning_rate / (_EPSILON + ops.sqrt(moved))

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._second_moments = self.add_slots("second_moment")

    def noise_logs(self):
        """See `NoiseSampler.noise_logs`; and `batch_noise_share`.

        The share of the wanted noise 2 T H / N that the batches bring where the data outweigh the
        prior and H is not cut down: N / ((N + S T) (1 + a^2)) for `noise="fisher"`. If C is off by
        a factor f, the variance is by about the share times f - 1.
        """
        logs = super().noise_logs()
        if logs.get("warming_up") == 0:
            ratio = float(ops.convert_to_numpy(self._batch_ratio()))
            a2 = float(ops.convert_to_numpy(self.fisher_noise()))
            logs["batch_noise_share"] = ratio / ((1 + ratio) * (1 + a2))
        return logs

    def get_config(self):
        config = super().get_config()
        config.update(
            fisher=self.fisher,
            noise=self.noise,
            warmup_learning_rate=self.warmup_learning_rate,
        )
        if self._is_largest:
            config["learning_rate"] = None
        return config
