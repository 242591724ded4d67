"""Which variables go by closed forms, and how the others go."""

import warnings

import keras
import tensorflow as tf

from keras_sgmcmc import compilation
from keras_sgmcmc.per_example import passes, taps
from keras_sgmcmc.per_example.rules import rule_of
from keras_sgmcmc.structures import layer_path

# A number that no other axis is likely to have.
_PROBED_EXAMPLES = 97
_CONTROL_FLOW = ("While", "StatelessWhile", "If", "StatelessIf")
# On a CPU these corrupt the memory of TensorFlow 2.21 when `vectorized_map` runs them without XLA.
_UNSAFE_WITHOUT_XLA = ("Einsum", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")


class Plan:
    """Which variables go by closed forms, and how the others go.

    Attributes:
        layers: Pairs (layer, rule) whose closed forms are used.
        closed: Positions of the variables that go by a closed form.
        general: Positions of those that don't.
        reasons: dict of path of a variable to the reason why it goes the general way.
        shared: Whether the backward pass of the training step serves.
        mode: How the general way goes: "xla", "graph" or "loop".
        example_bytes: Bytes that one example takes on the general way.
    """

    def __init__(self, estimator, data, failed):
        model, variables = estimator.model, estimator.variables
        layers = [(layer, rule_of(layer)) for layer in taps.supported_layers(model)]
        unseen = {}

        examples = passes.tensors(data)[0].shape[0] or _PROBED_EXAMPLES

        def probe(data):
            record, gradients = passes.backward(
                model, data, variables, [layer for layer, _ in layers], frozen=examples
            )
            unseen.update(record.unseen)
            used = [gradient is not None for gradient in gradients]
            reached.extend(used)

        reached = []
        passes.traced(probe, data, [examples])
        sources = self._try_rules(estimator, data, layers, unseen)
        owners = {id(v): layer for layer, _ in layers for v in layer.trainable_variables}
        shared_owner = _shared_variables([layer for layer, _ in layers])
        self.reasons, self.closed = {}, []
        masked = _is_masked(model, data)
        for index, variable in enumerate(variables):
            owner = owners.get(id(variable))
            if index in failed:
                reason = failed[index]
            elif masked:
                reason = "the loss is masked, so examples share its normalization"
            elif owner is None:
                reason = "its layer has no closed form"
            elif id(variable) in shared_owner:
                reason = "several layers hold it"
            elif reached[index]:
                reason = "it is used outside its layer's call"
            elif id(owner) in unseen:
                reason = f"layer {owner.name} {unseen[id(owner)]}"
            elif id(variable) not in sources.get(id(owner), {id(variable)}):
                reason = "its layer's rule gives no source for it"
            else:
                self.closed.append(index)
                continue
            self.reasons[variable.path] = reason
        held = {id(variables[index]) for index in self.closed}
        self.layers = [
            (layer, rule)
            for layer, rule in layers
            if any(id(v) in held for v in layer.trainable_variables)
        ]
        self.general = [i for i in range(len(variables)) if i not in set(self.closed)]
        own_step = type(model).train_step is not keras.Model.train_step
        # Where a pass is made for some variables, it serves the others too.
        self.shared = bool(self.layers) and not self.general and not own_step
        self.shared = self.shared and passes.trains_as_it_predicts(model, data)
        self.mode, self.example_bytes = None, 0
        if self.general:
            self._choose_mode(estimator, data)

    @staticmethod
    def _try_rules(estimator, data, layers, unseen):
        """dict of layer to the variables (all by `id`) that its rule has sources for.

        Layers whose rule does not apply are noted in `unseen`.
        """
        sources = {}

        def attempt(data):
            tapped = [layer for layer, _ in layers if id(layer) not in unseen]
            record, _ = passes.backward(estimator.model, data, estimator.variables, tapped)
            for layer, rule in layers:
                calls = [c for c in record.calls.get(id(layer), []) if c.delta is not None]
                if not calls:
                    continue
                try:
                    sources[id(layer)] = {id(source.variable) for source in rule(layer, calls)}
                except NotImplementedError as error:
                    unseen[id(layer)] = f"has no closed form: {error}"

        passes.traced(attempt, data)
        return sources

    def _choose_mode(self, estimator, data):
        model = estimator.model
        variables = [estimator.variables[i] for i in self.general]
        group = estimator.microbatch_size
        graph = passes.traced(
            lambda data: passes.backward(model, data, variables)[1], data, [group]
        )
        operations = graph.get_operations()
        self.example_bytes = sum(_bytes(out) for op in operations for out in op.outputs)
        hard_for_xla = any("Conv" in op.type or op.type in _CONTROL_FLOW for op in operations)
        unsafe = any(
            op.type in _UNSAFE_WITHOUT_XLA
            or (op.type == "Softmax" and len(op.outputs[0].shape) > 2)
            for op in operations
        )
        can_jit = all(layer.supports_jit for layer in model._flatten_layers())
        if can_jit and not hard_for_xla:
            self.mode = "xla"
        else:
            self.mode = "loop" if unsafe else "graph"
        if self.mode == "loop":
            return
        try:
            passes.traced(
                lambda data: vectorized_gradients(
                    model, variables, data, passes.tensors(data), "graph"
                ),
                data,
                [2, group],
            )
        except Exception as error:  # pfor raises whatever its converters do
            self.mode = "loop"
            layers = sorted({layer_path(variable) for variable in variables})
            warnings.warn(
                "TensorFlow can't vectorize an operation of this model, so the per-example "
                f"gradients of {layers} are taken one after the other, which is slow; "
                "`microbatch_size` makes it cheaper. "
                f"The reason: {str(error).strip().splitlines()[0][:200]}",
                stacklevel=2,
            )


def vectorized_gradients(model, variables, data, rows, mode, scale=None):
    """Gradients of the mean losses of groups of examples.

    Args:
        model: The model.
        variables: What to differentiate by.
        data: A batch, for its structure.
        rows: Its tensors: [groups, examples of a group, ...].
        mode: "xla", "graph" or "loop", which takes one group.
        scale: Function that scales the loss. Defaults to None.

    Returns:
        One tensor for each variable: [groups, *shape].
    """

    def gradients(flat):
        _, found = passes.backward(model, passes.with_tensors(data, flat), variables, scale=scale)
        return [
            tf.zeros(v.shape, v.dtype) if g is None else tf.cast(compilation.densify(g), v.dtype)
            for g, v in zip(found, variables, strict=True)
        ]

    if mode == "loop":
        return [gradient[None] for gradient in gradients([row[0] for row in rows])]

    def mapped(rows):
        return tf.vectorized_map(gradients, rows, fallback_to_while_loop=False)

    return compilation.compiled(mapped)(rows) if mode == "xla" else mapped(rows)


def _shared_variables(layers):
    """Variables that several layers hold."""
    seen, several = set(), set()
    for layer in layers:
        for variable in layer.trainable_variables:
            (several if id(variable) in seen else seen).add(id(variable))
    return several


def _is_masked(model, data):
    masked = []

    def forward(data):
        x, _, _ = passes.arguments(data)
        with keras.StatelessScope():
            outputs = model(x, training=False) if model._call_has_training_arg else model(x)
        masked.extend(
            getattr(out, "_keras_mask", None) is not None for out in tf.nest.flatten(outputs)
        )

    passes.traced(forward, data)
    return any(masked)


def _bytes(tensor):
    count = tensor.shape.num_elements()
    return 0 if count is None else count * max(1, tensor.dtype.size)
