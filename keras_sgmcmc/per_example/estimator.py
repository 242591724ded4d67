"""Sums of per-example gradients and of their squares or products, over a batch."""

from typing import NamedTuple

import keras
import tensorflow as tf

from keras_sgmcmc import compilation
from keras_sgmcmc.per_example import passes, taps
from keras_sgmcmc.per_example.plan import Plan, vectorized_gradients
from keras_sgmcmc.per_example.sources import rows as pick
from keras_sgmcmc.per_example.sources import size
from keras_sgmcmc.structures import (
    MEMORY_BUDGET,
    STRUCTURES,
    blocks_of,
    check_memory,
    length,
)
from keras_sgmcmc.validation import positive_integer

_CHECKED_EXAMPLES = 4
# Share of the budget that a chunk of examples may take.
_CHUNK_SHARE = 8
_LONGEST_CHUNK = 256
# Where the number of examples isn't known while tracing: filling the last chunk up costs.
_UNKNOWN_CHUNK = 32


class Moments(NamedTuple):
    """Sums over the examples i of a batch, with c_i the gradient of example i's own loss.

    For microbatches read "group j of m_j examples" for example, c_j for the sum of their gradients,
    and second for the sum of squares c_j^2 / m_j.

    Attributes:
        first: Sum of c_i: one tensor for each variable.
        second: Sum of c_i^2: one tensor for each variable; or of c_i c_i', one matrix for each
            block.
        examples: Number of examples, for each entry of `second`.
        groups: Number of microbatches, for each entry of `second`.
    """

    first: list
    second: list
    examples: list
    groups: list


class PerExampleGradients:
    """First and second moments of the per-example gradients of a model's compiled loss.

    The gradients of a batch's examples are never all held. Where the layers of a variable have a
    closed form (see `keras_sgmcmc.per_example.register`), the sums come from the layers' inputs and
    the gradients at their outputs, which one backward pass gives; elsewhere gradients are taken
    chunk by chunk with `tf.vectorized_map`, or one after the other where TensorFlow can't vectorize
    an operation. Passes run in inference mode and change nothing of the model.

    A closed form is used for a variable only if every use of the variable is a call of a layer that
    is recorded, and if it agrees with a plain loop on four examples (`verify`).

    Args:
        model: A compiled Keras model that has its variables.
        structure: `"diagonal"` (sums of squares), `"block"` (one matrix for each layer) or `"full"`
            (one matrix).
        microbatch_size: Examples whose gradients are taken together. Defaults to `1`.
        memory_budget: Bytes that matrices and temporary arrays may take.

    Raises:
        ValueError: If an argument is out of range, or the matrices don't fit the budget.
    """

    def __init__(self, model, structure="diagonal", microbatch_size=1, memory_budget=MEMORY_BUDGET):
        if structure not in STRUCTURES:
            raise ValueError(
                f"`structure` should be one of {STRUCTURES}. Received: structure={structure!r}"
            )
        if getattr(model, "_compile_loss", None) is None and not _own_loss(model):
            raise ValueError(
                "Per-example gradients are those of the compiled loss, and the model has none: "
                "`compile` it with `loss=`, or override `compute_loss`."
            )
        if hasattr(model, "stacked_chains"):
            raise ValueError(
                "A batch of stacked chains has rows for each of them, and so its gradients have no "
                "covariance for one chain: with `GradientNoise` leave out `vectorized=True`."
            )
        self.model = model
        self.structure = structure
        self.microbatch_size = positive_integer("microbatch_size", microbatch_size)
        self.memory_budget = positive_integer("memory_budget", memory_budget)
        self.variables = list(model.trainable_variables)
        self.blocks = blocks_of(self.variables, structure)
        check_memory(self.variables, structure, memory_budget)
        self._failed = {}
        self._plan = None

    @property
    def shapes(self):
        """Shapes of the entries of `Moments.second`."""
        if self.structure == "diagonal":
            return [tuple(variable.shape) for variable in self.variables]
        sizes = [sum(length(self.variables[i]) for i in block) for block in self.blocks]
        return [(rows, rows) for rows in sizes]

    # Which way each variable goes.

    def plan(self, data):
        """The `Plan` for batches like `data`, made when it is first asked for."""
        if self._plan is None:
            self._plan = Plan(self, data, self._failed)
        return self._plan

    def reject(self, failed):
        """Drop the closed forms of some variables: dict of position to the reason."""
        self._failed.update(failed)
        self._plan = None

    # The moments.

    def recording(self, data):
        """Context in which the model's own training step is recorded.

        Hand the record to `moments`. Nothing is recorded where the step can't be shared: if it is
        the model's own, or if a layer behaves differently in training.
        """
        plan = self.plan(data)
        if not plan.shared:
            return taps.recording([])
        return taps.recording([layer for layer, _ in plan.layers], self.model.optimizer)

    def moments(self, data, record=None):
        """`Moments` of one batch.

        Args:
            data: A batch, as Keras hands it to `train_step`.
            record: What `recording` gave around the step on this batch. Defaults to None: a pass of
                its own is made.
        """
        plan = self.plan(data)
        return _Sums(self, plan, data, record if plan.shared else None).moments()

    def prepare(self, data):
        """Verify the closed forms on a batch of arrays, and drop those that are wrong.

        Inside a training step use `verify` and `reject` instead.

        Returns:
            dict of the path of a variable to the reason why it goes the general way.
        """
        data = tf.nest.map_structure(tf.convert_to_tensor, data)
        plan = self.plan(data)
        if plan.closed:
            errors = tf.function(self.verify, autograph=False)(data)
            self.reject_wrong(errors.numpy())
        return dict(self.plan(data).reasons)

    def reject_wrong(self, errors):
        """Drop the closed forms whose errors, from `verify`, are too large; whether there were."""
        wrong = {
            index: f"its closed form is off by {error:.2g} from a plain loop"
            for index, error in enumerate(errors)
            if not error <= self.tolerance
        }
        if wrong:
            self.reject(wrong)
        return bool(wrong)

    def verify(self, data):
        """Largest error of the closed form of each variable, on four examples.

        Returns:
            Vector, one entry for each variable: largest absolute difference from a plain loop over
            the largest gradient; 0 for variables that go the general way.
        """
        plan = self.plan(data)
        return _Sums(self, plan, data, None).errors()

    @property
    def is_half(self):
        """Whether a layer computes in half precision."""
        return any("16" in layer.compute_dtype for layer in self.model._flatten_layers())

    @property
    def tolerance(self):
        """Largest error in `verify` that rounding explains."""
        return 0.1 if self.is_half else 1e-4


class _Sums:
    """The work on one batch."""

    def __init__(self, estimator, plan, data, record):
        self.plan, self.data = plan, data
        self.model, self.variables = estimator.model, estimator.variables
        self.estimator = estimator
        self.group = estimator.microbatch_size
        self.tensors = passes.tensors(data)
        self.examples = size(self.tensors[0], 0)
        self._take_record(record)
        self._sources = None

    def _take_record(self, record):
        """The record of a pass, and the `factor` from what it holds to c_i."""
        self.penalized = record is not None
        if self.penalized:
            self.record, scale = record, record.scale
            gradients = {id(variable): gradient for gradient, variable in record.gradients}
            self.gradients = {i: gradients.get(id(self.variables[i])) for i in self.plan.closed}
            # Keras divides the loss of a replica by the number of replicas.
            scale /= compilation.replicas()
        else:
            variables = [self.variables[i] for i in self.plan.closed]
            scale_loss = _scale_loss(self.model)
            layers = [layer for layer, _ in self.plan.layers]
            self.record, gradients = passes.backward(
                self.model, self.data, variables, layers, scale_loss
            )
            self.gradients = dict(zip(self.plan.closed, gradients, strict=True))
            scale = scale_loss(tf.constant(1.0))
        self.factor = tf.cast(self.examples, "float64") / tf.cast(scale, "float64")

    def _one_example_scale(self):
        """What scales the loss of one example alone like that of the batch, and its value."""
        scale_loss = _scale_loss(self.model)
        share = 1.0 / tf.cast(self.examples, "float32")
        return lambda loss: scale_loss(loss) * tf.cast(share, loss.dtype), scale_loss(share)

    def sources(self):
        """dict of position to the `Source` of a variable that goes by a closed form."""
        if self._sources is None:
            self._sources = {}
            positions = {id(self.variables[i]): i for i in self.plan.closed}
            for layer, rule in self.plan.layers:
                calls = [c for c in self.record.calls.get(id(layer), []) if c.delta is not None]
                if not calls:
                    continue
                for source in rule(layer, calls):
                    position = positions.get(id(source.variable))
                    if position is not None:
                        self._sources[position] = source
        return self._sources

    def first_sum(self, index):
        """Sum of the gradients of variable `index`, that goes by a closed form."""
        variable = self.variables[index]
        gradient = self.gradients.get(index)
        if gradient is None:
            return tf.zeros(variable.shape, variable.dtype)
        gradient = tf.cast(compilation.densify(gradient), variable.dtype)
        # Some gradients have lost their static shape on the way.
        gradient = tf.ensure_shape(gradient, variable.shape)
        total = gradient * tf.cast(self.factor, variable.dtype)
        if self.penalized and id(variable) in self.record.penalties:
            examples = tf.cast(self.examples, variable.dtype)
            total -= examples * self.record.penalties[id(variable)]
        return total

    def moments(self):
        if self.estimator.structure == "diagonal":
            return self._diagonal()
        return self._products()

    def _diagonal(self):
        count = len(self.variables)
        first, second = [None] * count, [None] * count
        examples, groups = [self.examples] * count, [-(-self.examples // self.group)] * count
        sources = self.sources()
        for index in self.plan.closed:
            first[index] = self.first_sum(index)
            source = sources.get(index)
            if source is None:
                second[index] = tf.zeros_like(first[index])
            else:
                second[index] = tf.ensure_shape(self._squares(source), first[index].shape)
        if self.plan.general:
            whole = self.examples // self.group
            zeros = [tf.zeros(v.shape, v.dtype) for v in self._general_variables()]

            def add(total, start, count):
                gradients = self._general_gradients(start, count)
                sums = [tf.reduce_sum(g, 0) for g in gradients]
                squares = [tf.reduce_sum(tf.square(g), 0) / self.group for g in gradients]
                return tf.nest.map_structure(tf.add, total, [sums, squares])

            sums, squares = self._over_groups(whole, add, [zeros, zeros])
            for index, s, q in zip(self.plan.general, sums, squares, strict=True):
                first[index], second[index] = s, q
                examples[index], groups[index] = whole * self.group, whole
        return Moments(first, second, examples, groups)

    def _squares(self, source):
        """Sum of c_j^2 / m_j."""
        if self.group == 1:
            squares = source.squares()
            return squares * tf.cast(tf.square(self.factor), squares.dtype)
        number = -(-self.examples // self.group)
        sizes = tf.minimum(self.group, self.examples - self.group * tf.range(number))
        factors = self.factor / tf.sqrt(tf.cast(sizes, "float64"))
        return source.grouped(self.group).scaled(factors).squares()

    def _products(self):
        """Sums of outer products, over chunks of whole groups."""
        whole = self.examples // self.group
        chunk = self._chunk(whole)
        sources = {
            index: source.grouped(self.group).scaled(self.factor).extended(chunk)
            for index, source in self.sources().items()
        }
        blocks = self.estimator.blocks

        def add(total, start, count):
            rows = dict(zip(self.plan.general, self._general_gradients(start, count), strict=True))
            real = start + tf.range(count) < whole
            for index in self.plan.closed:
                variable = self.variables[index]
                if index in sources:
                    gradients = sources[index].rows(start, count).gradients()
                    rows[index] = _where(real, gradients)
                else:
                    rows[index] = tf.zeros([count, *variable.shape], variable.dtype)
            first = [tf.reduce_sum(rows[index], 0) for index in range(len(self.variables))]
            second = []
            for block in blocks:
                flat = tf.concat([tf.reshape(rows[i], [count, -1]) for i in block], 1)
                second.append(tf.matmul(flat, flat, transpose_a=True) / self.group)
            return tf.nest.map_structure(tf.add, total, [first, second])

        zeros = [tf.zeros(v.shape, v.dtype) for v in self.variables]
        matrices = [
            tf.zeros(shape, self.variables[block[0]].dtype)
            for shape, block in zip(self.estimator.shapes, blocks, strict=True)
        ]
        first, second = self._over_groups(whole, add, [zeros, matrices])
        return Moments(first, second, [whole * self.group] * len(second), [whole] * len(second))

    # The general way.

    def _general_variables(self):
        return [self.variables[i] for i in self.plan.general]

    def _chunk(self, groups):
        """Number of groups that are worked on at once."""
        needed = self.plan.example_bytes if self.plan.general else 0
        if self.estimator.structure != "diagonal":
            needed += 8 * sum(map(length, self.variables))
        chunk = self.estimator.memory_budget // _CHUNK_SHARE // max(1, needed)
        chunk = min(chunk, groups if isinstance(groups, int) else _UNKNOWN_CHUNK, _LONGEST_CHUNK)
        return 1 if self.plan.mode == "loop" else max(1, chunk)

    def _over_groups(self, number, add, initial):
        """`add(total, start, count)` over all chunks of groups."""
        chunk = self._chunk(number)
        # Rows of zeros fill the last chunk; what comes of them is dropped.
        self._padded = [
            tf.pad(t, [[0, chunk * self.group], *[[0, 0]] * (len(t.shape) - 1)])
            for t in self.tensors
        ]
        if isinstance(number, int) and number <= chunk:
            return add(initial, 0, chunk)
        return tf.while_loop(
            lambda start, total: start < number,
            lambda start, total: (start + chunk, add(total, start, chunk)),
            [0, initial],
            parallel_iterations=1,
        )[1]

    def _general_gradients(self, start, count):
        """Sums of the gradients of `count` groups from `start` on; zeros past the last."""
        if not self.plan.general:
            return []
        rows = []
        for tensor in self._padded:
            some = pick(tensor, start * self.group, count * self.group)
            lengths = [size(some, axis) for axis in range(1, len(some.shape))]
            rows.append(tf.reshape(some, [count, self.group, *lengths]))
        scale_loss, scale = self._one_example_scale()
        gradients = vectorized_gradients(
            self.model, self._general_variables(), self.data, rows, self.plan.mode, scale_loss
        )
        real = start + tf.range(count) < self.examples // self.group
        factor = self.group / tf.cast(scale, "float64")
        return [_where(real, g) * tf.cast(factor, g.dtype) for g in gradients]

    # The check.

    def errors(self):
        sources = {index: s.scaled(self.factor) for index, s in self.sources().items()}
        variables = [self.variables[i] for i in self.plan.closed]
        number = tf.minimum(_CHECKED_EXAMPLES, self.examples)
        scale_loss, scale = self._one_example_scale()

        def example(index, worst):
            one = passes.with_tensors(self.data, [pick(t, index, 1) for t in self.tensors])
            _, truth = passes.backward(self.model, one, variables, scale=scale_loss)
            found = []
            for position, variable, gradient in zip(
                self.plan.closed, variables, truth, strict=True
            ):
                zeros = tf.zeros(variable.shape, variable.dtype)
                if gradient is None:
                    gradient = zeros
                gradient = tf.cast(compilation.densify(gradient), variable.dtype)
                gradient /= tf.cast(scale, variable.dtype)
                form = zeros
                if position in sources:
                    form = sources[position].rows(index, 1).gradients()[0]
                found.append([_largest(form - gradient), _largest(gradient)])
            found = tf.cast(tf.convert_to_tensor(found), "float32")
            return index + 1, tf.maximum(worst, tf.reshape(found, [-1, 2]))

        if not variables:
            return tf.zeros([len(self.variables)])
        worst = tf.while_loop(
            lambda index, worst: index < number,
            example,
            [0, tf.zeros([len(variables), 2])],
            parallel_iterations=1,
        )[1]
        # A layer whose gradients vanish is compared with the others.
        floor = (5e-2 if self.estimator.is_half else 1e-3) * tf.reduce_max(worst[:, 1]) + 1e-30
        errors = worst[:, 0] / tf.maximum(worst[:, 1], floor)
        return tf.scatter_nd(tf.constant(self.plan.closed)[:, None], errors, [len(self.variables)])


def _own_loss(model):
    return type(model).compute_loss is not keras.Model.compute_loss


def _where(real, rows):
    shape = [-1, *[1] * (len(rows.shape) - 1)]
    return tf.where(tf.reshape(real, shape), rows, tf.zeros_like(rows))


def _largest(tensor):
    return tf.reduce_max(tf.abs(tensor))


def _scale_loss(model):
    """What scales the loss, so that half precision does not lose small gradients."""
    return (lambda loss: loss) if model.optimizer is None else model.optimizer.scale_loss
