"""What layers' gradients are made of: one rule for each exact type of layer.

A rule turns the calls of a layer, each an input and the gradient of the loss with respect to the
pre-activation, into the sources of its variables. `register` adds a rule for another layer.
"""

import itertools
import math
import string

import keras
import tensorflow as tf

from keras_sgmcmc.per_example.sources import Outer, Rows, Sum, merged, size

_RULES = {}


def register(layer_class, rule=None):
    """Register a closed form of the per-example gradients of a type of layer.

    Args:
        layer_class: The class; subclasses aren't covered, since they may do anything.
        rule: Function of (layer, calls) that returns the sources of the layer's variables, a list
            of `keras_sgmcmc.per_example.Source`. A call has `inputs`, the tensor that the layer was
            called on, `delta`, the gradient of the loss with respect to what goes into
            `layer.activation` (into the output, where there is none), and `call`, the layer's own
            `call` method. A variable without a source goes the general way. The rule raises
            `NotImplementedError`, with the reason, where it does not apply. Leave it out to use
            this function as a decorator.

    Returns:
        The rule, or the decorator.
    """
    if rule is None:
        return lambda rule: register(layer_class, rule)
    _RULES[layer_class] = rule
    return rule


def rule_of(layer):
    """The rule for a layer, None if there is none or if the layer isn't what its type says."""
    if getattr(layer, "quantization_mode", None) or getattr(layer, "lora_enabled", False):
        return None
    if "call" in vars(layer):
        return None
    return _RULES.get(type(layer))


def _positions(tensor, kept):
    """[examples, ..., kept last axes] as [examples, 1, positions, kept last axes]."""
    last = len(tensor.shape) - kept - 1
    if last == 0:
        return tensor[:, None, None]
    return merged(tensor, 1, last)[:, None]


def _bias(layer, deltas):
    bias = getattr(layer, "bias", None)
    return [] if bias is None else [Sum(bias, [(_positions(delta, 1),) for delta in deltas])]


@register(keras.layers.Dense)
def dense(layer, calls):
    def factors(part):
        a, d = part
        yield merged(a, 1, 2)[:, :, None], merged(d, 1, 2)[:, :, None]

    parts = [(_positions(call.inputs, 1), _positions(call.delta, 1)) for call in calls]
    kernel = Outer(layer.kernel, parts, factors, lambda blocks: blocks[0][..., 0, :, :])
    return [kernel, *_bias(layer, [call.delta for call in calls])]


def _convolution(layer, calls):
    """One product for each place of the kernel, of the inputs that it meets and the outputs."""
    rank = layer.rank
    if layer.data_format != "channels_last":
        raise NotImplementedError(f"data_format={layer.data_format!r}")
    places = list(itertools.product(*map(range, layer.kernel_size)))

    def pads(length, out, axis):
        reach = layer.dilation_rate[axis] * (layer.kernel_size[axis] - 1)
        if layer.padding == "causal":
            return reach, 0
        if layer.padding == "valid":
            return 0, 0
        total = max((out - 1) * layer.strides[axis] + reach + 1 - length, 0)
        return total // 2, total - total // 2

    def part(call):
        spatial = call.inputs.shape[1 : rank + 1], call.delta.shape[1 : rank + 1]
        if None in (*spatial[0], *spatial[1]):
            raise NotImplementedError("the lengths of the inputs are not known")
        padding = [pads(n, out, axis) for axis, (n, out) in enumerate(zip(*spatial, strict=True))]
        inputs = tf.pad(call.inputs, [(0, 0), *padding, (0, 0)])
        return inputs[:, None], call.delta[:, None]

    def grouped(tensor):
        positions = tensor.shape[1] * math.prod(tensor.shape[2:-1])
        channels = tensor.shape[-1] // layer.groups
        return tf.reshape(tensor, [size(tensor, 0), positions, layer.groups, channels])

    def factors(part):
        x, d = part
        for place in places:
            window = [slice(None), slice(None)]
            for axis, offset in enumerate(place):
                start = offset * layer.dilation_rate[axis]
                stride = layer.strides[axis]
                stop = start + (d.shape[2 + axis] - 1) * stride + 1
                window.append(slice(start, stop, stride))
            yield grouped(x[tuple(window)]), grouped(d)

    def assemble(blocks):
        # [..., groups, in, out] to [..., *kernel_size, in, groups * out]
        kernels = []
        for block in blocks:
            block = tf.experimental.numpy.moveaxis(block, -3, -2)
            last = len(block.shape) - 2
            kernels.append(merged(block, last, last + 1))
        axis = len(kernels[0].shape) - 2
        stacked = tf.stack(kernels, axis)
        shape = tf.concat([tf.shape(stacked)[:axis], layer.kernel.shape], 0)
        return tf.reshape(stacked, shape)

    kernel = Outer(layer.kernel, list(map(part, calls)), factors, assemble)
    return [kernel, *_bias(layer, [call.delta for call in calls])]


register(keras.layers.Conv1D, _convolution)
register(keras.layers.Conv2D, _convolution)
register(keras.layers.Conv3D, _convolution)


@register(keras.layers.EinsumDense)
def einsum_dense(layer, calls):
    inputs, rest = layer.equation.replace(" ", "").split(",")
    kernel, output = rest.split("->")
    hidden = len(calls[0].inputs.shape) - len(inputs.replace("...", ""))
    unused = [c for c in string.ascii_letters if c not in layer.equation][:hidden]
    inputs, output = (text.replace("...", "".join(unused)) for text in (inputs, output))
    example = inputs[0]
    if example != output[0] or example in kernel:
        raise NotImplementedError(f"equation={layer.equation!r} mixes examples")
    if set(inputs) - set(kernel) - set(output) or set(kernel) - set(inputs) - set(output):
        raise NotImplementedError(f"equation={layer.equation!r} sums over an axis")
    groups = [c for c in kernel if c in inputs and c in output]
    summed = [c for c in kernel if c in inputs and c not in output]
    made = [c for c in kernel if c not in inputs]
    positions = [c for c in inputs[1:] if c not in kernel]

    def arranged(tensor, labels, last):
        # [examples, 1, positions, groups, last]
        order = [labels.index(c) for c in [example, *positions, *groups, *last]]
        tensor = tf.transpose(tensor, order)
        sizes = [tensor.shape[i] for i in range(1 + len(positions), len(order))]
        widths = math.prod(sizes[: len(groups)]), math.prod(sizes[len(groups) :])
        count = [tensor.shape[i] for i in range(1, 1 + len(positions))]
        count = -1 if None in count else math.prod(count)
        return tf.reshape(tensor, [size(tensor, 0), 1, count, *widths])

    def factors(part):
        yield tuple(merged(tensor, 1, 2) for tensor in part)

    def assemble(blocks):
        (block,) = blocks
        lengths = dict(zip(kernel, layer.kernel.shape, strict=True))
        order = [*groups, *summed, *made]
        lead = len(block.shape) - 3
        shape = tf.concat([tf.shape(block)[:lead], [lengths[c] for c in order]], 0)
        axes = [lead + order.index(c) for c in kernel]
        return tf.transpose(tf.reshape(block, shape), [*range(lead), *axes])

    parts = [
        (arranged(call.inputs, inputs, summed), arranged(call.delta, output, made))
        for call in calls
    ]
    sources = [Outer(layer.kernel, parts, factors, assemble)]
    if layer.bias is not None:
        axes = [output.index(c) for c in layer.bias_axes]
        sources.append(_affine(layer.bias, [call.delta for call in calls], sorted(axes)))
    return sources


def _affine(variable, products, axes):
    """The source of a variable that broadcasts along all but the given `axes` of a product."""

    def part(product):
        others = [axis for axis in range(1, len(product.shape)) if axis not in axes]
        ordered = tf.transpose(product, [0, *others, *axes])
        ordered = _positions(ordered, len(axes))
        shape = [size(ordered, 0), 1, size(ordered, 2), *variable.shape]
        return (tf.reshape(ordered, shape),)

    return Sum(variable, list(map(part, products)))


@register(keras.layers.Embedding)
def embedding(layer, calls):
    parts = [
        (_positions(tf.cast(call.inputs, "int32"), 0), _positions(call.delta, 1)) for call in calls
    ]
    return [Rows(layer.embeddings, parts)]


def _normalization(scale, offset):
    """The rule of a layer that ends with scale * normalized + offset."""

    def rule(layer, calls):
        scale_variable = getattr(layer, scale, None)
        offset_variable = getattr(layer, offset, None) if offset else None
        axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
        sources = []
        rank = len(calls[0].delta.shape)
        axes = [axis % rank for axis in axes]
        if scale_variable is not None:
            plain = [(scale_variable, tf.ones(scale_variable.shape, scale_variable.dtype))]
            if offset_variable is not None:
                plain.append((offset_variable, tf.zeros_like(plain[0][1])))
            products = []
            for call in calls:
                with keras.StatelessScope(state_mapping=plain):
                    normalized = call.call()
                dtype = scale_variable.dtype
                products.append(tf.cast(call.delta, dtype) * tf.cast(normalized, dtype))
            sources.append(_affine(scale_variable, products, axes))
        if offset_variable is not None:
            sources.append(_affine(offset_variable, [call.delta for call in calls], axes))
        return sources

    return rule


register(keras.layers.LayerNormalization, _normalization("gamma", "beta"))
register(keras.layers.GroupNormalization, _normalization("gamma", "beta"))
register(keras.layers.BatchNormalization, _normalization("gamma", "beta"))
register(keras.layers.RMSNormalization, _normalization("scale", None))
