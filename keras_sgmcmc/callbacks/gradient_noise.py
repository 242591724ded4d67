"""The covariance of per-example gradients, estimated inside the training step."""

import math
import warnings

import keras
import tensorflow as tf

from keras_sgmcmc import compilation
from keras_sgmcmc.callbacks.in_graph_callback import InGraphCallback
from keras_sgmcmc.noise_covariance import (
    RunningCovariance,
    diagonals,
    effective_rank,
    estimate,
    examples_needed,
    statistic,
    trace,
)
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.per_example import Moments, PerExampleGradients
from keras_sgmcmc.structures import MEMORY_BUDGET, STRUCTURES, layer_path
from keras_sgmcmc.validation import positive_integer, real_number

# Enough for the tail index.
_TAIL_COORDINATES = 10_000
# Share of the wanted noise above which that of the batches is worth a warning.
_LARGEST_NOISE_RATIO = 0.1


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class GradientNoise(InGraphCallback):
    """Estimate the covariance C of per-example gradients in every training step.

    With c_i the gradient of the loss of example i alone, and g the mean of the c_i of a batch of n,

        C_batch = sum_i (c_i - g)(c_i - g)' / (n - 1),       C <- C + kappa (C_batch - C),

    with kappa = n / (examples so far), the plain average over all examples (Ahn et al. 2012,
    algorithm 1), or `1 - decay` once that is larger. With microbatches of m examples, whose means
    are g_j, C_batch = m sum_j (g_j - g)(g_j - g)' / (n / m - 1): as unbiased, and noisier.

    The layers' inputs and output gradients, which the training step computes anyway, give the sums
    in closed form for most layers; see `keras_sgmcmc.per_example`. Passes are in inference mode
    (no dropout, moving statistics in batch normalization), and penalties on weights are left out.
    Closed forms are verified on the first batch; what has none, or a wrong one, takes a slower way,
    and a warning names it.

    An optimizer that has `update_noise_covariance(covariance, examples)` gets the average: not
    before it covers one expected pass over the data (`"diagonal"`) or 50 examples for each row of
    a matrix; what was gathered in the optimizer's `warmup_steps` is forgotten at their end. With
    other optimizers the callback is a diagnosis.

    History and the progress bar show, at the end of an epoch, `gradient_noise_trace` (tr C),
    `gradient_noise_rank` ((tr C)^2 / tr C^2) and `gradient_noise_scale`; and `noise_ratio`, the
    predicted excess of the variance, if the optimizer is `SGLD` or `pSGLD`. A warning, once, says
    if that is above 0.1.

    Args:
        microbatch_size: Examples whose gradients are taken together, m. More makes the general way
            cheaper. A batch needs two microbatches. Defaults to `1`.
        decay: In (0, 1), of an exponential average. Defaults to None: all batches count the same.
        every: Steps between two estimates. Defaults to `1`.
        structure: `"diagonal"`, `"block"` (a matrix for each layer) or `"full"`. Defaults to None:
            what the optimizer asks for (`optimizer.noise_structure`), or else `"diagonal"`.
        memory_budget: Bytes that matrices, and temporary arrays as much again, may take.

    Raises:
        ValueError: If an argument is out of range; at the first batch, if the matrices don't fit
            `memory_budget` or if it has only one microbatch.

    Example:

    >>> noise = sg.callbacks.GradientNoise(every=10)
    >>> model.fit(sg.minibatches(x, y, 100), epochs=10, callbacks=[noise])
    >>> noise.covariance["dense/kernel"]  # the variance of each weight's per-example gradient

    References: S. Ahn, A. Korattikara, M. Welling, "Bayesian posterior sampling via stochastic
    gradient Fisher scoring", ICML 2012. S. McCandlish et al., "An empirical model of large-batch
    training", 2018.
    """

    def __init__(
        self,
        microbatch_size=1,
        decay=None,
        every=1,
        structure=None,
        memory_budget=MEMORY_BUDGET,
    ):
        super().__init__()
        self.microbatch_size = positive_integer("microbatch_size", microbatch_size)
        self.decay = None if decay is None else real_number("decay", decay, positive=True, below=1)
        self.every = positive_integer("every", every)
        if structure is not None and structure not in STRUCTURES:
            raise ValueError(
                f"`structure` should be one of {STRUCTURES} or None. "
                f"Received: structure={structure!r}"
            )
        self.structure = structure
        self.memory_budget = positive_integer("memory_budget", memory_budget)
        self._estimator = None

    # What is known.

    @property
    def covariance(self):
        """The covariance of per-example gradients, as NumPy arrays.

        dict of a variable's path to its variances (of the variable's shape); for `"block"` dict of
        a layer's path to a matrix over its variables, in their order; for `"full"` one matrix over
        `model.trainable_variables`. In units of the squared gradient of the mean loss.
        """
        self._check_started()
        entries = [entry.numpy() for entry in self._average.entries]
        variables, blocks = self._estimator.variables, self._estimator.blocks
        if blocks is None:
            paths = [variable.path for variable in variables]
            return dict(zip(paths, entries, strict=True))
        if self._estimator.structure == "full":
            return entries[0]
        layers = [layer_path(variables[block[0]]) for block in blocks]
        return dict(zip(layers, entries, strict=True))

    @property
    def examples(self):
        """Number of examples in the average."""
        self._check_started()
        return int(self._average.examples.numpy())

    @property
    def trace(self):
        """tr C."""
        self._check_started()
        return trace(self._average.entries, self._estimator.structure)

    @property
    def effective_rank(self):
        """(tr C)^2 / tr(C^2), between 1 and the number of parameters; of the diagonal if C is."""
        self._check_started()
        return effective_rank(self._average.entries, self._estimator.structure)

    @property
    def gradient_noise_scale(self):
        """tr C / |G|^2, the batch size at which noise and mean gradient G weigh the same.

        |G|^2 is estimated without bias by |g|^2 - tr(C) / n, averaged like C; infinite where that
        is not positive, since the noise hides the gradient (McCandlish et al. 2018, eq. 2.9 and
        appendix A).
        """
        self._check_started()
        square = float(self._square_gradient.numpy())
        return self.trace / square if square > 0 else math.inf

    @property
    def noise_ratio(self):
        """tr(H C H / S) / tr(2 T H / N) of `SGLD` and `pSGLD`; S are the rows of an update.

        The predicted share by which the variance of the draws is too large.
        """
        self._check_started()
        if not self._adds_all_noise():
            raise ValueError(
                "`noise_ratio` is that of a sampler that adds all the noise that is wanted, `SGLD` "
                f"or `pSGLD`. Received: {type(self.optimizer).__name__}"
            )
        variances = diagonals(self._average.entries, self._estimator.structure)
        variances = self._by_variable(variances, [v.shape for v in self._estimator.variables])
        accumulated = self.optimizer.gradient_accumulation_steps or 1
        return self.optimizer.noise_ratio(variances, float(self._rows.numpy()) * accumulated)

    def _adds_all_noise(self):
        optimizer = self.optimizer
        return isinstance(optimizer, Sampler) and not optimizer.uses_batch_noise

    @property
    def tail_index(self):
        """Index alpha of a symmetric stable law fitted to the noise of the batch gradient.

        2 is Gaussian, less has heavier tails. For X_k, the coordinates of the batch gradient in
        units of their standard deviation, Var(log |X|) = (pi^2 / 6) (1 / alpha^2 + 1 / 2) (Ma &
        Nikias 1995), over up to 10,000 coordinates and all steps. It means something where the
        gradient is mostly noise, which is after burn-in.
        """
        self._check_started()
        count, mean, square = (float(value) for value in self._log_moments.numpy())
        if count < 2:
            return math.nan
        inverse = 6 * max(square - mean**2, 0.0) / math.pi**2 - 0.5
        return 2.0 if inverse <= 0.25 else 1 / math.sqrt(inverse)

    @property
    def ways(self):
        """dict of a variable's path to how its gradients are taken: "closed form", or why not."""
        self._check_started()
        plan = self._estimator._plan
        reasons = {} if plan is None else plan.reasons
        return {
            variable.path: reasons.get(variable.path, "closed form")
            for variable in self._estimator.variables
        }

    def _check_started(self):
        if self._estimator is None:
            raise RuntimeError(
                "`GradientNoise` knows nothing before the first batch: pass it to "
                "`model.fit(..., callbacks=[...])` first."
            )

    # The step.

    def create_state(self):
        structure = self.structure or getattr(self.optimizer, "noise_structure", "diagonal")
        self._estimator = PerExampleGradients(
            self.model, structure, self.microbatch_size, self.memory_budget
        )
        variables, blocks = self._estimator.variables, self._estimator.blocks
        firsts = variables if blocks is None else [variables[block[0]] for block in blocks]
        shapes = self._estimator.shapes
        self._average = RunningCovariance(shapes, [v.dtype for v in firsts], self.decay)
        self._needed = examples_needed(
            shapes, structure, getattr(self.optimizer, "train_size", None)
        )
        self._square_gradient = statistic((), "square_gradient")
        self._log_moments = statistic((3,), "log_moments")
        self._rows = statistic((), "rows")
        self._errors = statistic((len(variables),), "closed_form_errors")
        self._verified = statistic((), "verified")
        self._awaiting_verification, self._reported = True, False
        averages = [self._average.examples, *self._average.entries]
        self.keep("gradient_noise", [*averages, self._square_gradient, self._log_moments])
        self._warned_of_noise = False

    def wrap(self, step):
        def wrapped(data):
            number, updates = self.next_update()
            due = tf.logical_and(updates, number % self.every == 0)
            self._verify(data)
            if not self._estimator.plan(data).shared:
                # At the weights that the batch finds, not at those that it has moved.
                self._measure(data, None, due, number)
                return step(data)
            with self._estimator.recording(data) as record:
                logs = step(data)
            self._measure(data, record, due, number)
            return logs

        return wrapped

    def _verify(self, data):
        if not self._awaiting_verification:
            return
        verified = tf.convert_to_tensor(self._verified)
        errors = tf.cond(
            verified > 0,
            lambda: tf.convert_to_tensor(self._errors),
            lambda: self._estimator.verify(data),
        )
        # A step that loss scaling skips says nothing.
        finite = tf.reduce_all(tf.math.is_finite(errors))
        self._errors.assign(tf.where(finite, errors, tf.zeros_like(errors)))
        self._verified.assign(tf.maximum(verified, tf.cast(finite, verified.dtype)))

    def _measure(self, data, record, due, step):
        if not compilation.is_distributed():
            tf.cond(
                due,
                lambda: self._update(self._moments(data, record), step, True),
                lambda: tf.constant(0),
            )
            return
        # Neither sums over replicas nor assignments to their variables may stand in a branch.
        moments = tf.cond(due, lambda: self._moments(data, record), self._no_moments)
        context = tf.distribute.get_replica_context()
        self._update(context.all_reduce(tf.distribute.ReduceOp.SUM, moments), step, due)

    def _moments(self, data, record):
        moments = self._estimator.moments(data, record)
        for examples, groups in zip(moments.examples, moments.groups, strict=True):
            if isinstance(groups, int) and groups * compilation.replicas() < 2:
                raise ValueError(
                    "The covariance of per-example gradients needs batches of at least two "
                    "microbatches. Received: "
                    f"microbatch_size={self.microbatch_size} and a batch of {examples} examples"
                )
        counts = [[tf.cast(n, "float32") for n in c] for c in (moments.examples, moments.groups)]
        return Moments(moments.first, moments.second, *counts)

    def _no_moments(self):
        first = [tf.zeros(v.shape, v.dtype) for v in self._estimator.variables]
        second = [tf.zeros(entry.shape, entry.dtype) for entry in self._average.entries]
        zeros = [tf.constant(0.0)] * len(second)
        return Moments(first, second, zeros, zeros)

    def _update(self, moments, step, due):
        warmup = tf.cast(getattr(self.optimizer, "warmup_steps", None) or 0, step.dtype)
        settled = step > warmup
        first_settled = tf.logical_and(settled, step - self.every <= warmup)
        weights = sum(math.prod(first.shape) for first in moments.first)
        compilation.compiled_if_large(self._add, weights)(
            moments, tf.convert_to_tensor(due), settled, first_settled
        )
        self._feed(settled)
        return tf.constant(0)

    def _add(self, moments, valid, settled, first_settled):
        """Add the moments of a batch to the averages, if they are valid."""
        structure = self._estimator.structure
        number = moments.examples[0]
        estimates = estimate(moments, self._estimator.blocks)
        variances = diagonals(estimates, structure)
        total = tf.add_n([tf.cast(tf.reduce_sum(v), "float32") for v in variances])
        squares = [tf.reduce_sum(tf.square(first)) for first in moments.first]
        square = tf.add_n([tf.cast(s, "float32") for s in squares]) / tf.square(number)
        valid &= tf.math.is_finite(total) & tf.math.is_finite(square)
        rate = self._average.update(estimates, number, valid, first_settled)
        self._rows.assign(tf.where(valid, tf.cast(number, "float32"), self._rows))
        old = tf.convert_to_tensor(self._square_gradient)
        square -= total / number
        self._square_gradient.assign(tf.where(valid, old + rate * (square - old), old))
        self._add_logs(moments.first, number, valid & settled)

    def _add_logs(self, first, number, valid):
        """Add to the moments of log |X| from which the tail index comes."""
        every = -(-sum(math.prod(f.shape) for f in first) // _TAIL_COORDINATES)
        variances = diagonals(self._average.entries, self._estimator.structure)
        variances = self._by_variable(variances, [f.shape for f in first])

        def some(tensors):
            thinned = [tf.reshape(t, [-1])[::every] for t in tensors]
            return tf.concat([tf.cast(t, "float32") for t in thinned], 0)

        mean, variance = some(first), some(variances)
        usable = (mean != 0.0) & (variance > 0.0) & valid
        ratios = tf.square(mean / tf.sqrt(tf.where(usable, number * variance, 1.0)))
        usable &= ratios > 0.0
        logs = 0.5 * tf.math.log(tf.where(usable, ratios, 1.0))
        count = tf.reduce_sum(tf.cast(usable, "float32"))
        sums = tf.stack([tf.reduce_sum(logs), tf.reduce_sum(tf.square(logs))])
        old = tf.convert_to_tensor(self._log_moments)
        total = old[0] + count
        share = tf.math.divide_no_nan(count, total)
        moved = old[1:] + share * (tf.math.divide_no_nan(sums, count) - old[1:])
        self._log_moments.assign(tf.concat([[total], moved], 0))

    def _by_variable(self, variances, shapes):
        """The diagonals of the entries of C as one tensor for each variable, of its shape."""
        blocks = self._estimator.blocks or [[i] for i in range(len(shapes))]
        found = {}
        for block, diagonal in zip(blocks, variances, strict=True):
            # The variables of a block follow each other.
            parts = tf.split(diagonal, [math.prod(shapes[i]) for i in block])
            found.update(zip(block, parts, strict=True))
        return [tf.reshape(found[i], shape) for i, shape in enumerate(shapes)]

    def _feed(self, settled):
        if not hasattr(self.optimizer, "update_noise_covariance"):
            return
        examples = tf.convert_to_tensor(self._average.examples)
        warm = tf.logical_and(examples >= float(self._needed), settled)

        def feed():
            entries = [tf.convert_to_tensor(entry) for entry in self._average.entries]
            self.optimizer.update_noise_covariance(
                entries, tf.convert_to_tensor(self._average.examples)
            )

        compilation.conditionally(warm, feed)

    # Around the step.

    def on_train_batch_end(self, batch, logs=None):
        if self._reported or self._estimator is None:
            return
        if self._awaiting_verification:
            if not float(self._verified.numpy()):
                return
            self._awaiting_verification = False
            if self._estimator.reject_wrong(self._errors.numpy()):
                self._average.reset()
                self._log_moments.assign([0.0] * 3)
                self.retrace()
                return  # what goes the general way is settled at the next batch
        self._reported = True
        self._report_ways()

    def _report_ways(self):
        slow = {path: way for path, way in self.ways.items() if way != "closed form"}
        # A loop was warned about when it was planned.
        if slow and self._estimator._plan.mode != "loop":
            listed = "; ".join(f"{path}: {way}" for path, way in slow.items())
            warnings.warn(
                "The per-example gradients of some variables have no closed form and are taken "
                f"example by example, which costs many plain steps ({listed}). Raise `every` or "
                "`microbatch_size` to pay less.",
                stacklevel=2,
            )

    def on_epoch_end(self, epoch, logs=None):
        if logs is None or self._estimator is None or not self.examples:
            return
        logs["gradient_noise_trace"] = self.trace
        logs["gradient_noise_rank"] = self.effective_rank
        logs["gradient_noise_scale"] = self.gradient_noise_scale
        if self._adds_all_noise():
            logs["noise_ratio"] = self.noise_ratio
            self._warn_of_noise(logs["noise_ratio"])
        if hasattr(self.optimizer, "noise_logs"):
            logs.update(self.optimizer.noise_logs())

    def _warn_of_noise(self, ratio):
        # At T = 0 none is wanted.
        if self._warned_of_noise or not _LARGEST_NOISE_RATIO < ratio < math.inf:
            return
        self._warned_of_noise = True
        warnings.warn(
            f"The batches bring {ratio:.3g} times the noise that {type(self.optimizer).__name__} "
            "wants, and it adds all of it: expect variances that are too large by that share. Take "
            "larger batches or a smaller learning rate (the ratio is proportional to learning rate "
            "/ batch size), or SGFS, which counts the noise of the batches.",
            stacklevel=3,
        )

    def get_config(self):
        return {
            "microbatch_size": self.microbatch_size,
            "decay": self.decay,
            "every": self.every,
            "structure": self.structure,
            "memory_budget": self.memory_budget,
        }

    @classmethod
    def from_config(cls, config):
        return cls(**config)
