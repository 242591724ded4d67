"""Records what layers are called on, and what the backward pass brings back to them.

Nothing of the model is touched for good: while a pass runs under `recording`, layers have an
instance attribute `call`, and the optimizer `apply_gradients`, which are gone afterwards.
"""

import contextlib
import functools
import threading

import keras
import tensorflow as tf

from keras_sgmcmc.per_example.rules import rule_of

_thread = threading.local()  # replicas are traced in threads of their own
_lock = threading.Lock()
_users = {}  # id of an owner: how many threads have it tapped


class Call:
    """One call of a layer.

    Attributes:
        inputs: The tensor that the layer was called on.
        delta: Gradient of the loss with respect to the pre-activation, None until the backward pass
            has come by.
        call: The layer's own call on these arguments.
    """

    def __init__(self, inputs, call):
        self.inputs = inputs
        self.call = call
        self.delta = None


class Record:
    """What one pass has shown.

    Attributes:
        calls: dict of layer (by `id`) to its list of `Call`.
        unseen: dict of layer (by `id`) to the reason why its calls can't be relied on.
        gradients: The pairs (gradient, variable) that were handed to the optimizer.
        scale: What the loss was multiplied by, by the optimizer.
        penalties: dict of variable (by `id`) to the gradient of the penalty on it.
    """

    def __init__(self, frozen=None):
        self.calls = {}
        self.unseen = {}
        self.gradients = self.scale = self.penalties = None
        self.frozen = frozen
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def here(self):
        """Whether what runs now is part of the pass itself, not of a function inside it."""
        if self._graph is None:
            return tf.executing_eagerly()
        return tf.compat.v1.get_default_graph() is self._graph

    def call(self, layer, original, args, kwargs):
        """Run a layer's call with its tap."""
        if not self.here():
            self.unseen[id(layer)] = "is called inside a function, a loop or a branch of its own"
            return original(*args, **kwargs)
        inputs = args[0] if len(args) == 1 else None
        if not tf.is_tensor(inputs) or isinstance(inputs, tf.SparseTensor | tf.RaggedTensor):
            self.unseen[id(layer)] = "is not called on one dense tensor"
            return original(*args, **kwargs)
        if self.frozen is not None:
            if inputs.shape[0] != self.frozen:
                self.unseen[id(layer)] = "is called on something that isn't the batch"
            # Its variables give no gradient here: what is left comes from other uses of them.
            values = [(v, tf.stop_gradient(v.value)) for v in layer.trainable_variables]
            with keras.StatelessScope(state_mapping=values):
                return original(*args, **kwargs)
        record = Call(inputs, functools.partial(original, *args, **kwargs))
        self.calls.setdefault(id(layer), []).append(record)
        activation = vars(layer).get("activation")
        if activation is None:
            return self._tap(layer, record, original(*args, **kwargs))
        object.__setattr__(layer, "activation", lambda z: activation(self._tap(layer, record, z)))
        try:
            return original(*args, **kwargs)
        finally:
            object.__setattr__(layer, "activation", activation)

    def _tap(self, layer, record, z):
        @tf.custom_gradient
        def tap(z):
            def backward(dz):
                if record.delta is not None or not self.here():
                    self.unseen[id(layer)] = "is differentiated more than once"
                record.delta = dz
                return dz

            return tf.identity(z), backward

        return tap(z)


@contextlib.contextmanager
def recording(layers, optimizer=None, frozen=None):
    """A `Record` of what runs in this thread while the context lasts.

    Args:
        layers: The layers to tap.
        optimizer: An optimizer whose gradients to note.
        frozen: Number of examples of the batch: record nothing, but cut the gradients of the
            layers' variables inside their calls, and compare what they are called on with it.
            Defaults to None.
    """
    record = Record(frozen)
    before = getattr(_thread, "record", None)
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_attribute(layer, "call", _tapped_call(layer)))
        if optimizer is not None:
            stack.enter_context(
                _attribute(optimizer, "apply_gradients", _noted_gradients(optimizer))
            )
        _thread.record = record
        try:
            yield record
        finally:
            _thread.record = before


def _tapped_call(layer):
    original = layer.call

    def call(*args, **kwargs):
        record = getattr(_thread, "record", None)
        if record is None:
            return original(*args, **kwargs)
        return record.call(layer, original, args, kwargs)

    return call


def _noted_gradients(optimizer):
    original = optimizer.apply_gradients

    def apply_gradients(grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        record = getattr(_thread, "record", None)
        if record is not None:
            record.gradients = pairs
            # Before the step, which may change both.
            record.scale = optimizer.scale_loss(tf.constant(1.0))
            record.penalties = {
                id(v): _penalty_gradient(v)
                for _, v in pairs
                if getattr(v, "regularizer", None) is not None
            }
        return original(pairs, *args, **kwargs)

    return apply_gradients


def _penalty_gradient(variable):
    value = tf.convert_to_tensor(variable)
    with tf.GradientTape() as tape:
        tape.watch(value)
        penalty = variable.regularizer(value)
    return tape.gradient(penalty, value)


@contextlib.contextmanager
def _attribute(owner, name, value):
    """An instance attribute, there as long as any thread needs it."""
    key = (id(owner), name)
    with _lock:
        _users[key] = _users.get(key, 0) + 1
        if _users[key] == 1:
            object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        with _lock:
            _users[key] -= 1
            if not _users[key]:
                del _users[key]
                object.__delattr__(owner, name)


def supported_layers(model):
    """The layers of a model that have a rule and something to train, each once."""
    layers = {}
    for layer in model._flatten_layers(recursive=True, include_self=True):
        if rule_of(layer) is not None and layer.trainable_variables:
            layers[id(layer)] = layer
    return list(layers.values())
