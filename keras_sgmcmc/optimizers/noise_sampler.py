"""The step of samplers that reckon with the noise of the batches."""

import warnings

import numpy as np
from keras import ops

from keras_sgmcmc import compilation
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.optimizers.factors import factorise
from keras_sgmcmc.structures import MEMORY_BUDGET, blocks_of, check_memory, length
from keras_sgmcmc.validation import positive_integer, real_number

# Batches whose gradients are compared before their spread is used: variances to 10 %.
_SPREAD_STEPS = 200
# Relative change of a number that enters the factors above which they are made anew at once; a
# precision that is learned changes a little all the time.
_CHANGE = 0.01


class NoiseSampler(Sampler):
    """Base class of samplers whose H comes from the covariance C of per-example gradients.

    With the precision Lambda of a Gaussian prior (0 for others) and

        J = w C + Lambda,      B = a^2 J  or  B = beta I,

    every method is H = 2 N (J + B)^-1, cut down where a bound says so, and, if it injects noise,

        Q = 2 T H / N - T H J H / N^2        (= T H B H / N^2 where H is not cut down).

    A method says what w, a^2 and beta are, what bounds H, and whether it injects noise.

    C is what `update_noise_covariance` was last given, which `callbacks.GradientNoise` calls. Until
    then, and for diagonal forms alone, it is

        C = S E (g_t - g_{t-1})^2 / 2,

    averaged over the steps after the warm-up, for batches of S rows with gradients g_t; it is used
    once it is an average over 200 steps.

    Matrices are factored once in `update_every` steps, and when the temperature, the prior or the
    step have changed by more than 1 %; see `factors.factorise` for what becomes of ill-conditioned
    ones.

    Args:
        learning_rate: See the method.
        structure: `"diagonal"`, `"block"` (a matrix for each layer) or `"full"`.
        option: Name of the method's argument that chooses the structure.
        offered: Structures that it offers.
        batch_size: Rows of an update, S: of all replicas and accumulated batches. Needed at build.
        warmup_steps: Number of updates at the beginning that are ordinary optimization.
        update_every: Number of updates between two factorisations of matrices.
        max_step: Largest entry of H for diagonal forms, in mean-loss units, or None.
        memory_budget: Bytes that the matrices may take.
        **kwargs: See `keras_sgmcmc.optimizers.Sampler`.

    Raises:
        ValueError: If an argument is out of range; at build, if `train_size` or `batch_size` is
            missing, if matrices don't fit `memory_budget`, or on several replicas with matrices.
    """

    uses_batch_noise = True
    injects_noise = True
    # What H is multiplied by in the end.
    step_factor = 1.0
    # What to do, beside smaller batches and `max_step`, if a diagonal H is too long.
    steadier = ""

    def __init__(
        self,
        learning_rate,
        *,
        structure,
        option,
        offered,
        batch_size=None,
        warmup_steps=1000,
        update_every=100,
        max_step=None,
        memory_budget=MEMORY_BUDGET,
        temperature=1.0,
        **kwargs,
    ):
        super().__init__(
            learning_rate, temperature=self._checked_temperature(temperature), **kwargs
        )
        self.noise_structure = structure
        self._option, self._offered = option, tuple(offered)
        self.batch_size = None if batch_size is None else positive_integer("batch_size", batch_size)
        self.warmup_steps = positive_integer("warmup_steps", warmup_steps, minimum=0)
        self.update_every = positive_integer("update_every", update_every)
        self.memory_budget = positive_integer("memory_budget", memory_budget)
        self.max_step = (
            None if max_step is None else real_number("max_step", max_step, positive=True)
        )
        if max_step is not None and structure != "diagonal":
            raise ValueError(
                "`max_step` bounds the entries of a diagonal H. Use a diagonal form, or no bound. "
                f"Received: max_step={max_step} with {option}={structure!r}"
            )
        self._warned = False

    # What methods differ in.

    def fisher_weight(self):
        """w, the weight of C in J."""
        raise NotImplementedError

    def fisher_noise(self):
        """a^2, for B = a^2 J."""
        return 0.0

    def identity_noise(self):
        """beta, for B = beta I; None for another B."""

    @property
    def largest_share(self):
        """Lambda's share of J up to which H is not cut at N / Lambda, for matrices; None: never."""
        return 0.5

    def largest_step(self):
        """Largest entry of H for diagonal forms, or None."""
        return self.max_step

    def variance(self, index):
        """The part of C that stands in J for variable number `index`, for diagonal forms."""
        return ops.convert_to_tensor(self._covariance[index])

    def bracketed_precision(self, precision):
        """The Lambda that stands in J for diagonal forms."""
        return precision

    def warmup_step(self, index, gradient, learning_rate):
        """H of variable number `index` during warm-up, from its gradient with the prior's."""
        raise NotImplementedError

    # The laws.

    def _diagonal_law(self, index):
        """H, Q, and the bracket J + B, of one variable, elementwise."""
        N, T = self.train_size, ops.convert_to_tensor(self._temperature)
        Lambda = self.precision_of(index)
        ratio, beta = self.fisher_noise(), self.identity_noise()
        J = self.fisher_weight() * self.variance(index) + self.bracketed_precision(Lambda)
        B = ratio * J if beta is None else ops.full_like(J, beta)
        bracket = J + B
        known = bracket > 0
        safe = ops.where(known, bracket, 1.0)
        whole = ops.where(known, 2.0 * N / safe, np.inf)
        H = whole
        if self.largest_share is not None:
            H = ops.minimum(H, ops.where(Lambda > 0, N / ops.where(Lambda > 0, Lambda, 1), np.inf))
        largest = self.largest_step()
        if largest is not None:
            # Without variance and prior nothing says where to stay: the coordinate stands still.
            H = ops.where(ops.isfinite(H), ops.minimum(H, largest), H)
        H = ops.where(ops.isfinite(H), H, 0.0)
        reach = H / whole
        Q = (2.0 * T / N) * H * ((1.0 - reach) + reach * B / safe)
        return self.step_factor * H, Q, bracket

    def step_size(self, index):
        """H of a diagonal form as it is now."""
        return self._diagonal_law(index)[0]

    def sampled(self, index):
        """See `Sampler.sampled`; a method that injects no noise moves by that of the gradient."""
        ready = self._is_ready()
        if self.injects_noise:
            return ready
        if self.noise_structure == "diagonal":
            return ops.logical_and(ready, self._covariance[index] > 0)
        variances, start = ops.diagonal(self._covariance[0]), 0
        for variable in self._trainable_variables[:index]:
            start += length(variable)
        shape = tuple(self._trainable_variables[index].shape)
        part = variances[start : start + length(self._trainable_variables[index])]
        return ops.logical_and(ready, ops.reshape(part, shape) > 0)

    def largest_precision(self, index):
        """See `Sampler.largest_precision`; here H shrinks as the precision grows."""
        del index
        return np.inf

    @property
    def stability_limit(self):
        """The largest eigenvalue of H A at which the chain is stable."""
        return 2.0

    def _rates(self, reach):
        """H and Q, as vectors, in the rows' directions of F."""
        a2 = self.fisher_noise()
        T = ops.convert_to_tensor(self._temperature)
        share = a2 / (1.0 + a2)
        H = 2.0 * self.train_size * reach / (1.0 + a2)
        Q = (4.0 * T / (1.0 + a2)) * reach * ((1.0 - reach) + reach * share)
        return self.step_factor * H, Q

    def _batch_ratio(self):
        """N / (S T)."""
        temperature = ops.convert_to_tensor(self._temperature)
        return self.train_size / (self.batch_size * temperature)

    # Diagonal forms.

    def preconditioner(self, index, gradient, learning_rate):
        self._observe(index, gradient)
        variable = self._trainable_variables[index]
        warm = self.warmup_step(index, self._drift(index, gradient, variable), learning_rate)
        H, _, _ = self._diagonal_law(index)
        return ops.where(self._is_ready(), ops.cast(H, gradient.dtype), warm), None

    def noise_variance(self, index, preconditioner):
        if not self.injects_noise:
            return None
        _, Q, _ = self._diagonal_law(index)
        return ops.where(self._is_ready(), ops.cast(Q, preconditioner.dtype), 0.0)

    def _drift(self, index, gradient, variable):
        prior = self._prior_gradient(index, variable)
        return gradient if prior is None else gradient + prior / self.train_size

    def _is_ready(self):
        settled = self._iterations >= self.warmup_steps
        if self.noise_structure == "diagonal":
            known = ops.logical_or(
                self._examples[0] > 0, self._iterations >= self._first_spread + _SPREAD_STEPS
            )
        else:
            known = self._factor_step[0] >= 0
        return ops.logical_and(settled, known)

    @property
    def _first_spread(self):
        """The first step whose gradient is compared with the one before."""
        return max(self.warmup_steps, 1)

    def _observe(self, index, gradient):
        """Add a batch's gradient to the spread of the gradients of batches."""
        gradient = ops.cast(gradient, "float32")
        before = ops.convert_to_tensor(self._previous_gradient[index])
        covariance = ops.convert_to_tensor(self._covariance[index])
        estimate = (0.5 * self.batch_size) * ops.square(gradient - before)
        steps = ops.cast(self._iterations - self._first_spread + 1, "float32")
        moved = covariance + (estimate - covariance) / ops.maximum(steps, 1.0)
        counts = ops.logical_and(steps >= 1.0, self._examples[0] == 0)
        # One bad batch must not spoil the average for ever.
        finite = ops.isfinite(moved)
        self._store(index, ops.where(ops.logical_and(counts, finite), moved, covariance))
        self.assign(self._previous_gradient[index], ops.where(finite, gradient, before))

    def _store(self, index, covariance):
        self.assign(self._covariance[index], covariance)

    # Matrices.

    def prepare(self):
        if self.noise_structure == "diagonal":
            return
        settings = self._settings()
        step = ops.cast(self._iterations, "int64")
        factored = ops.convert_to_tensor(self._factor_step[0])
        before = ops.convert_to_tensor(self._factor_settings[0])
        due = ops.logical_or(
            ops.logical_or(factored < 0, step - factored >= self.update_every),
            ops.any(ops.abs(settings - before) > _CHANGE * ops.abs(before)),
        )
        usable = ops.logical_and(self._iterations >= self.warmup_steps, self._examples[0] > 0)

        def refresh():
            self._factor_step[0].assign(step)
            self._factor_settings[0].assign(settings)
            for position in range(len(self._blocks)):
                self._refresh(position)

        compilation.conditionally(ops.logical_and(due, usable), refresh)

    def _settings(self):
        """All numbers, beside C, that the factors depend on."""
        beta = self.identity_noise()
        numbers = [self.fisher_weight(), 0.0 if beta is None else beta]
        numbers += list(self._prior_precision.values())
        return ops.stack([ops.cast(ops.convert_to_tensor(n), "float32") for n in numbers])

    def _refresh(self, position):
        block = self._blocks[position]
        sizes = [length(self._trainable_variables[index]) for index in block]
        with_prior = [self._has_precision(index) for index in block]
        precision = ops.concatenate(
            [
                ops.broadcast_to(self.precision_of(i), (n,))
                for i, n in zip(block, sizes, strict=True)
            ]
        )
        beta = self.identity_noise()
        matrix = self.fisher_weight() * self._covariance[position]
        matrix = matrix + ops.diag(precision if beta is None else precision + beta)
        factor, reach, damping, silent = factorise(
            matrix,
            precision,
            largest_share=self.largest_share,
            priors="all" if all(with_prior) else "some" if any(with_prior) else "none",
            xla=self.jit_compile,
        )
        self._factor[position].assign(factor)
        self._reach[position].assign(reach)
        self._damping[position].assign(damping)
        self._silent[position].assign(silent)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        if self.noise_structure == "diagonal":
            super()._backend_update_step(grads, trainable_variables, learning_rate)
            return
        given = {
            self._get_variable_index(variable): (gradient, variable)
            for gradient, variable in zip(grads, trainable_variables, strict=True)
        }
        for position, block in enumerate(self._blocks):
            if any(index in given for index in block):
                self._move_block(position, given, learning_rate)

    def _move_block(self, position, given, learning_rate):
        """Move the variables of a block together.

        With the rows of F as coordinates, F (J + damping) F' = 1, H = F' h F for a vector h, and
        Q = F' q F + H E H with E = T (beta + damping) / N^2, which is noise added to the gradient.
        """
        block = self._blocks[position]
        drifts, warm = {}, {}
        for index in block:
            if index in given:
                gradient, variable = given[index]
                drifts[index] = self._drift(index, ops.cast(gradient, variable.dtype), variable)
                rate = ops.cast(learning_rate, variable.dtype)
                warm[index] = drifts[index] * self.warmup_step(index, drifts[index], rate)
                law = drifts[index], None, None
                self._show(index, variable, lambda law=law: law)
        # A variable that the loss doesn't depend on has gradient 0, and stays.
        flat = [
            ops.reshape(ops.cast(drifts[index], "float32"), (-1,))
            if index in drifts
            else ops.zeros((length(self._trainable_variables[index]),))
            for index in block
        ]
        increment = self._block_increment(position, ops.concatenate(flat))
        start, ready = 0, self._is_ready()
        for index in block:
            stop = start + length(self._trainable_variables[index])
            if index in given:
                variable = given[index][1]
                part = ops.reshape(increment[start:stop], tuple(variable.shape))
                part = ops.where(ready, ops.cast(part, variable.dtype), warm[index])
                self._displace(index, variable, part)
            start = stop

    def _block_increment(self, position, drift):
        factor = ops.convert_to_tensor(self._factor[position])
        H, Q = self._rates(ops.convert_to_tensor(self._reach[position]))
        if self.injects_noise:
            beta = self.identity_noise()
            extra = self._damping[position] + (0.0 if beta is None else beta)
            temperature = ops.convert_to_tensor(self._temperature)
            stream = len(self._trainable_variables) + position
            noise = self._normal(tuple(drift.shape), "float32", stream)
            drift = drift + ops.sqrt(temperature * extra) / self.train_size * noise
        moved = H * ops.matmul(factor, drift)
        if self.injects_noise:
            noise = self._normal(tuple(drift.shape), "float32", self._blocks[position][0])
            moved = moved - ops.sqrt(Q) * noise
        return ops.matmul(moved, factor)

    # Scale and state.

    def build(self, variables):
        if self.built:
            return
        variables = list(variables)
        if self.batch_size is None:
            raise ValueError(
                f"{type(self).__name__} needs `batch_size`, the number of rows of an update, which "
                "an optimizer can't see: pass `batch_size=data.batch_size`, times the replicas and "
                "the accumulated batches. Received: batch_size=None"
            )
        check_memory(
            variables, self.noise_structure, self.memory_budget, self._offered, self._option
        )
        if self.noise_structure != "diagonal" and compilation.replicas() > 1:
            raise ValueError(
                f"{self._option}={self.noise_structure!r} moves the weights together, which "
                f"{compilation.replicas()} replicas can't. Train on one replica, or use "
                f'{self._option}="diagonal".'
            )
        super().build(variables)
        self._examples = self.add_state("noise_examples", [()])
        if self.noise_structure == "diagonal":
            shapes = [tuple(variable.shape) for variable in variables]
            self._covariance = self.add_state("noise_covariance", shapes)
            self._previous_gradient = self.add_state("previous_gradient", shapes)
            return
        self._blocks = blocks_of(variables, self.noise_structure)
        rows = [sum(length(variables[index]) for index in block) for block in self._blocks]
        self._covariance = self.add_state("noise_covariance", [(n, n) for n in rows])
        self._factor = self.add_state("factor", [(n, n) for n in rows])
        self._reach = self.add_state("reach", [(n,) for n in rows])
        self._damping = self.add_state("damping", [(n,) for n in rows])
        self._silent = self.add_state("silent", [() for _ in rows])
        # Not 32-bit, which TensorFlow keeps in main memory, out of reach of a GPU's program.
        self._factor_step = self.add_state(
            "factor_step", [()], initializer=_minus_one, dtype="int64"
        )
        self._factor_settings = self.add_state(
            "factor_settings", [(2 + len(self._prior_precision),)]
        )

    def update_noise_covariance(self, entries, examples, of_batches=False):
        """Take a new covariance C of per-example gradients.

        Args:
            entries: For diagonal forms one tensor for each trainable variable, of its shape; for
                `"block"` one matrix for each layer, over its variables in their order; for
                `"full"` one matrix.
            examples: The number of examples (or batches) that C comes from; positive.
            of_batches: Whether `entries` are the covariance of the mean gradients of batches of
                `batch_size` rows, which is C / S. Defaults to False.

        Raises:
            ValueError: If the entries are not those of the variables that the optimizer was built
                on.
        """
        shapes = [tuple(entry.shape) for entry in entries]
        expected = [tuple(variable.shape) for variable in self._covariance]
        if shapes != expected:
            raise ValueError(
                f"The covariance of the gradients should have entries of shapes {expected} "
                f"({self.noise_structure}). Received: {shapes}. Use the structure that the "
                "optimizer names (`optimizer.noise_structure`), and freeze layers before the "
                "optimizer is built."
            )
        factor = float(self.batch_size) if of_batches else 1.0
        for index, entry in enumerate(entries):
            self._store(index, factor * ops.cast(entry, "float32"))
        self.assign(self._examples[0], ops.cast(examples, "float32"))

    @staticmethod
    def _checked_temperature(value):
        value = real_number("temperature", value)
        if value <= 0:
            raise ValueError(
                "`temperature` should be positive: H is made of the noise that it asks for. For "
                "T = 0, plain optimization, use SGLD or pSGLD, or an optimizer of Keras. "
                f"Received: temperature={value}"
            )
        return value

    @Sampler.temperature.setter
    def temperature(self, value):
        Sampler.temperature.fset(self, self._checked_temperature(value))

    # What is known.

    @property
    def is_warming_up(self):
        """Whether the steps are still those of the warm-up."""
        return not (self.built and bool(ops.convert_to_numpy(self._is_ready())))

    def noise_logs(self):
        """What the step is made of, as a dict of floats; callbacks put it into the logs.

        `warming_up`: 1 while the steps are ordinary optimization, else 0; and once it is 0,
        `capped_share`: of the coordinates (directions, for matrices) in which H is cut down, and
        `silent_coordinates`: number of those without variance and prior, which do not move; and
        what the method adds.
        """
        if not self.built:
            return {}
        if self.is_warming_up:
            self._warn_if_left_alone()
            return {"warming_up": 1.0}
        if self.noise_structure == "diagonal":
            capped, silent = self._diagonal_counts()
        else:
            capped = sum(float(np.sum(reach.numpy() < 1)) for reach in self._reach)
            silent = sum(float(count.numpy()) for count in self._silent)
            self._warn_of_singular(silent)
        total = sum(length(variable) for variable in self._trainable_variables)
        return {"warming_up": 0.0, "capped_share": capped / total, "silent_coordinates": silent}

    def _diagonal_counts(self):
        capped = silent = 0.0
        for index in range(len(self._trainable_variables)):
            H, _, bracket = (ops.convert_to_numpy(value) for value in self._diagonal_law(index))
            with np.errstate(divide="ignore"):
                whole = np.broadcast_to(2.0 * self.train_size * self.step_factor / bracket, H.shape)
            silent += float(np.sum(H == 0))
            capped += float(np.sum((H > 0) & (H / whole < 1 - 1e-6)))
        return capped, silent

    def _warn_if_left_alone(self):
        steps = int(self.iterations.numpy())
        matrices = self.noise_structure != "diagonal"
        if self._warned or not matrices or float(self._examples[0].numpy()) > 0:
            return
        if steps > self.warmup_steps:
            self._warned = True
            warnings.warn(
                f"After {steps} steps {type(self).__name__} still takes those of the warm-up, "
                "since nothing has told it the covariance of per-example gradients, or not enough "
                f"of them: {self._option}={self.noise_structure!r} needs "
                "`callbacks.GradientNoise()` in `fit`, and 50 examples for each row of a matrix. "
                f'{self._option}="diagonal" works without.',
                stacklevel=3,
            )

    def _warn_of_singular(self, silent):
        damped = any(float(np.max(damping.numpy(), initial=0)) > 0 for damping in self._damping)
        if self._warned or not (silent or damped):
            return
        self._warned = True
        rows = sum(int(reach.shape[0]) for reach in self._reach)
        warnings.warn(
            "The covariance of per-example gradients is singular to float32: the matrix to invert "
            f"has rank {rows - int(silent)} of {rows}, prior included, and the damping is "
            f"{'1e-5 of its diagonal' if damped else '0'}. Directions without variance and prior "
            "do not move, damped ones are slow. A Gaussian prior on all variables, and more "
            "examples, help.",
            stacklevel=3,
        )

    def get_config(self):
        config = super().get_config()
        config.update(
            batch_size=self.batch_size,
            warmup_steps=self.warmup_steps,
            update_every=self.update_every,
            max_step=self.max_step,
            memory_budget=self.memory_budget,
        )
        return config

    def __repr__(self):
        return (
            f"<{type(self).__name__} train_size={self.train_size}, batch_size={self.batch_size}, "
            f"temperature={float(self._temperature.numpy()):g}, "
            f"structure={self.noise_structure!r}, prior={self.prior}, seed={self.seed}>"
        )


def _minus_one(shape, dtype=None):
    return -ops.ones(shape, dtype)
