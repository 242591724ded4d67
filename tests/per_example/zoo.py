"""Models of many kinds with a batch for each, and per-example gradients by a plain loop."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

ROWS = 7


def _images(channels=2, size=6):
    return ("normal", (size, size, channels))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(5, activation="tanh")
        self.out = layers.Dense(2)

    def call(self, x):
        return self.out(self.hidden(x))


class TiedWeights(keras.Model):
    """The kernel of a Dense layer used once more, transposed."""

    def __init__(self):
        super().__init__()
        self.encoder = layers.Dense(3, activation="tanh", use_bias=False)

    def call(self, x):
        return keras.ops.matmul(self.encoder(x), keras.ops.transpose(self.encoder.kernel))


class OwnWeight(layers.Layer):
    def build(self, shape):
        self.slope = self.add_weight(shape=(shape[-1],), initializer="random_normal")
        self.dense = layers.Dense(3)
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x * self.slope)


class InFunction(layers.Layer):
    """A layer called in a `tf.function` of the user's own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(3, activation="tanh")
        self.run = tf.function(lambda x: self.dense(x))

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.run(x)


class FoldedBatch(layers.Layer):
    """Folds time into the batch axis."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(3, activation="tanh")

    def build(self, shape):
        self.dense.build((None, shape[-1]))

    def call(self, x):
        time, width = x.shape[1:]
        folded = self.dense(keras.ops.reshape(x, (-1, width)))
        return keras.ops.reshape(folded, (-1, time, 3))


class MovedBatch(FoldedBatch):
    """Puts time before the batch axis."""

    def call(self, x):
        return keras.ops.transpose(self.dense(keras.ops.transpose(x, (1, 0, 2))), (1, 0, 2))


class InLoop(layers.Layer):
    """A layer called in a loop over time."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(3, activation="tanh")

    def build(self, shape):
        self.dense.build((None, shape[-1]))

    def call(self, x):
        return keras.ops.sum(keras.ops.map(self.dense, keras.ops.transpose(x, (1, 0, 2))), axis=0)


def sequential(*stack, input_spec):
    return keras.Sequential([keras.Input(input_spec[1], dtype=_dtype(input_spec)), *stack])


def _dtype(spec):
    return "int32" if spec[0] == "tokens" else keras.config.floatx()


def _shared_layer():
    shared = layers.Dense(4, activation="tanh")
    a, b = keras.Input((4,)), keras.Input((4,))
    return keras.Model([a, b], layers.Dense(2)(shared(shared(a)) + shared(b)))


def _shared_convolution():
    shared = layers.Conv2D(2, 3, padding="same", activation="tanh")
    x = keras.Input((6, 6, 2))
    y = layers.MaxPooling2D()(shared(x))
    return keras.Model(x, layers.Dense(2)(layers.Flatten()(shared(y))))


def _two_outputs():
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    hidden = layers.Dense(5, activation="relu")(layers.Concatenate()([a, b]))
    return keras.Model(
        {"a": a, "b": b},
        {"u": layers.Dense(2, name="u")(hidden), "v": layers.Dense(1, name="v")(a)},
    )


def _residual():
    x = keras.Input((5,))
    h = layers.Dense(5, activation="gelu")(x)
    return keras.Model(x, layers.Dense(2)(layers.LayerNormalization()(x + h)))


def _attention(dropout=0.0):
    x = keras.Input((5,), dtype="int32")
    h = layers.Embedding(11, 6)(x)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 3, dropout=dropout)(h, h))
    h = h + layers.EinsumDense("...x,xy->...y", 6, bias_axes="y", activation="tanh")(h)
    return keras.Model(x, layers.Dense(2)(layers.GlobalAveragePooling1D()(h)))


def _masked_sequence():
    x = keras.Input((5,), dtype="int32")
    h = layers.Embedding(6, 4, mask_zero=True)(x)
    return keras.Model(x, layers.Dense(3)(h))


def _masked_recurrent(cell):
    x = keras.Input((5,), dtype="int32")
    return keras.Model(x, layers.Dense(2)(cell(3)(layers.Embedding(6, 4, mask_zero=True)(x))))


def _flat(*stack, spec):
    return sequential(*stack, layers.Flatten(), layers.Dense(2), input_spec=spec)


# name: (make the model, input specs, target specs, compile arguments)
_NUMBERS = ("normal", (4,))
_SEQUENCE = ("normal", (5, 4))
_TOKENS = ("tokens", (5,))
_TWO = ("normal", (2,))
ZOO = {
    "dense": (
        lambda: sequential(layers.Dense(6, "relu"), layers.Dense(2), input_spec=_NUMBERS),
        _NUMBERS,
        _TWO,
        {},
    ),
    "dense_positions": (
        lambda: _flat(layers.Dense(3, "tanh"), spec=_SEQUENCE),
        _SEQUENCE,
        _TWO,
        {},
    ),
    "dense_three_axes": (
        lambda: _flat(layers.Dense(3, "tanh"), spec=("normal", (2, 3, 4))),
        ("normal", (2, 3, 4)),
        _TWO,
        {},
    ),
    "classifier": (
        lambda: sequential(layers.Dense(6, "relu"), layers.Dense(3), input_spec=_NUMBERS),
        _NUMBERS,
        ("classes", 3),
        {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
    ),
    "regularized": (
        lambda: sequential(
            layers.Dense(6, "tanh", kernel_regularizer="l2", bias_regularizer="l1"),
            layers.Dense(2, kernel_regularizer="l2"),
            input_spec=_NUMBERS,
        ),
        _NUMBERS,
        _TWO,
        {},
    ),
    "activity_regularized": (
        lambda: sequential(
            layers.Dense(6, "tanh", activity_regularizer="l2"),
            layers.Dense(2),
            input_spec=_NUMBERS,
        ),
        _NUMBERS,
        _TWO,
        {},
    ),
    "shared_layer": (_shared_layer, [_NUMBERS, _NUMBERS], _TWO, {}),
    "shared_convolution": (_shared_convolution, _images(), _TWO, {}),
    "subclassed": (Subclassed, _NUMBERS, _TWO, {}),
    "residual": (_residual, ("normal", (5,)), _TWO, {}),
    "two_outputs": (
        _two_outputs,
        {"a": _NUMBERS, "b": ("normal", (3,))},
        {"u": _TWO, "v": ("normal", (1,))},
        {"loss": {"u": "mse", "v": "mae"}, "loss_weights": {"u": 0.3, "v": 2.0}},
    ),
    "convolution": (
        lambda: _flat(
            layers.Conv2D(3, 3, activation="tanh"), layers.MaxPooling2D(), spec=_images()
        ),
        _images(),
        _TWO,
        {},
    ),
    "convolution_strided_same": (
        lambda: _flat(layers.Conv2D(3, (3, 2), strides=(2, 1), padding="same"), spec=_images(2, 7)),
        _images(2, 7),
        _TWO,
        {},
    ),
    "convolution_dilated": (
        lambda: _flat(layers.Conv2D(3, 3, dilation_rate=2, padding="same"), spec=_images()),
        _images(),
        _TWO,
        {},
    ),
    "convolution_grouped": (
        lambda: _flat(
            layers.Conv2D(6, 3, groups=2, activation="relu", padding="same"),
            layers.Conv2D(4, 2, groups=2, use_bias=False),
            spec=_images(4),
        ),
        _images(4),
        _TWO,
        {},
    ),
    "convolution_1d_causal": (
        lambda: _flat(
            layers.Conv1D(3, 2, padding="causal", dilation_rate=2, activation="tanh"),
            spec=_SEQUENCE,
        ),
        _SEQUENCE,
        _TWO,
        {},
    ),
    "convolution_3d": (
        lambda: _flat(layers.Conv3D(2, 2), spec=("normal", (3, 3, 3, 2))),
        ("normal", (3, 3, 3, 2)),
        _TWO,
        {},
    ),
    "embedding": (lambda: _flat(layers.Embedding(4, 3), spec=_TOKENS), _TOKENS, _TWO, {}),
    "attention": (_attention, _TOKENS, _TWO, {}),
    "attention_dropout": (lambda: _attention(0.3), _TOKENS, _TWO, {}),
    "einsum": (
        lambda: _flat(
            layers.EinsumDense("abc,bcd->abd", (5, 3), bias_axes="bd"),
            layers.EinsumDense("abc,cde->abde", (5, 2, 3), bias_axes="e", activation="tanh"),
            spec=_SEQUENCE,
        ),
        _SEQUENCE,
        _TWO,
        {},
    ),
    "normalizations": (
        lambda: _flat(
            layers.Conv2D(4, 3),
            layers.GroupNormalization(2),
            layers.LayerNormalization(axis=[1, 3]),
            layers.RMSNormalization(),
            layers.BatchNormalization(),
            spec=_images(),
        ),
        _images(),
        _TWO,
        {},
    ),
    "batch_normalization": (
        lambda: sequential(
            layers.Dense(6),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dense(2),
            input_spec=_NUMBERS,
        ),
        _NUMBERS,
        _TWO,
        {},
    ),
    "dropout": (
        lambda: sequential(
            layers.Dense(16, "relu"), layers.Dropout(0.5), layers.Dense(2), input_spec=_NUMBERS
        ),
        _NUMBERS,
        _TWO,
        {},
    ),
    "lstm_unrolled": (
        lambda: _flat(layers.LSTM(3, unroll=True), spec=_SEQUENCE),
        _SEQUENCE,
        _TWO,
        {},
    ),
    "gru_masked": (lambda: _masked_recurrent(layers.GRU), _TOKENS, _TWO, {}),
    "simple_rnn": (lambda: _flat(layers.SimpleRNN(3), spec=_SEQUENCE), _SEQUENCE, _TWO, {}),
    "depthwise": (
        lambda: _flat(
            layers.DepthwiseConv2D(3),
            layers.SeparableConv2D(3, 2),
            layers.MaxPooling2D(),
            spec=_images(),
        ),
        _images(),
        _TWO,
        {},
    ),
    "masked_sequence": (
        _masked_sequence,
        _TOKENS,
        ("normal", (5, 3)),
        {},
    ),
    "tied_weights": (TiedWeights, _NUMBERS, _NUMBERS, {}),
    "own_weight": (lambda: _flat(OwnWeight(), spec=_NUMBERS), _NUMBERS, _TWO, {}),
    "in_function": (lambda: _flat(InFunction(), spec=_NUMBERS), _NUMBERS, _TWO, {}),
    "folded_batch": (lambda: _flat(FoldedBatch(), spec=_SEQUENCE), _SEQUENCE, _TWO, {}),
    "moved_batch": (lambda: _flat(MovedBatch(), spec=_SEQUENCE), _SEQUENCE, _TWO, {}),
    "in_loop": (lambda: _flat(InLoop(), spec=_SEQUENCE), _SEQUENCE, _TWO, {}),
    "time_distributed": (
        lambda: _flat(layers.TimeDistributed(layers.Dense(3, "tanh")), spec=_SEQUENCE),
        _SEQUENCE,
        _TWO,
        {},
    ),
}


def make(name, rows=ROWS, **compile_arguments):
    """A compiled and built model of the zoo, and its batch (x, y) of NumPy arrays."""
    keras.utils.set_random_seed(3)
    build, inputs, targets, arguments = ZOO[name]
    rng = np.random.default_rng(5)

    def draw(spec):
        kind, shape = spec
        if kind == "tokens":
            return rng.integers(0, 4, (rows, *shape)).astype("int32")
        if kind == "classes":
            return rng.integers(0, shape, rows).astype("int32")
        return rng.normal(size=(rows, *shape)).astype(keras.config.floatx())

    def structure(specs):
        if isinstance(specs, dict):
            return {key: structure(spec) for key, spec in specs.items()}
        if isinstance(specs, list):
            return [structure(spec) for spec in specs]
        return draw(specs)

    x, y = structure(inputs), structure(targets)
    model = build()
    model.compile(**{"optimizer": "sgd", "loss": "mse", **arguments, **compile_arguments})
    model(x)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.3 * rng.normal(size=variable.shape).astype(variable.dtype))
    return model, x, y


def loop(model, x, y, sample_weight=None, group=1):
    """Gradients of the examples' own losses, one after the other: [groups, parameters].

    For `group > 1` means over groups of examples. The penalties on weights are left out.
    """

    @tf.function(autograph=False)
    def gradients(x, y, sample_weight):
        with tf.GradientTape() as tape:
            outputs = model(x, training=False)
            loss = model.compute_loss(x, y, outputs, sample_weight, training=False)
            for variable in model.trainable_variables:
                if variable.regularizer is not None:
                    loss -= variable.regularizer(variable)
        found = tape.gradient(loss, model.trainable_variables)
        return [
            tf.zeros(v.shape) if g is None else tf.convert_to_tensor(g)
            for g, v in zip(found, model.trainable_variables, strict=True)
        ]

    found = []
    for start in range(0, len(tf.nest.flatten(x)[0]), group):
        rows = [_rows(part, slice(start, start + group)) for part in (x, y, sample_weight)]
        found.append(np.concatenate([np.ravel(gradient) for gradient in gradients(*rows)]))
    return np.stack(found).astype("float64")


def _rows(structure, rows):
    if structure is None:
        return None
    return tf.nest.map_structure(lambda array: tf.constant(array[rows]), structure)
