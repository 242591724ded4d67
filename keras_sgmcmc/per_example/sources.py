"""Per-example gradients in factored form, so that nothing of size batch x parameters is made.

A source holds what one variable's gradient is made of: tensors whose first axis is the example and
whose second axis runs over the calls of the layer. Examples are merged into groups by moving them
to the second axis (`grouped`), scaled by scaling one factor (`scaled`), and picked by slicing
(`rows`).
"""

import math

import tensorflow as tf

# What one chunk of per-example gradients may take; more leaves the cache and is slower.
_CHUNK_BYTES = 8 * 2**20
# Up to so many positions, products of pairs of positions cost less than each example's gradient.
_FEW_POSITIONS = 4


def size(tensor, axis):
    """Length of an axis, a Python integer where it is known."""
    static = tensor.shape[axis]
    return tf.shape(tensor)[axis] if static is None else static


def merged(tensor, first, last):
    """`tensor` with the axes `first` to `last` merged into one."""
    axes = range(first, last + 1)
    lengths = [size(tensor, axis) for axis in axes]
    length = math.prod(lengths) if all(isinstance(n, int) for n in lengths) else -1
    if length == 0:  # -1 can't be told in an empty tensor
        length = tf.reduce_prod(tf.shape(tensor)[first : last + 1])
    head = [size(tensor, axis) for axis in range(first)]
    tail = [size(tensor, axis) for axis in range(last + 1, len(tensor.shape))]
    return tf.reshape(tensor, [*head, length, *tail])


def padded(tensor, multiple):
    """`tensor` with zero rows added until their number is a multiple of `multiple`."""
    missing = -size(tensor, 0) % multiple
    if isinstance(missing, int) and missing == 0:
        return tensor
    return tf.pad(tensor, [[0, missing], *[[0, 0]] * (len(tensor.shape) - 1)])


def over_chunks(function, tensors, chunk, initial):
    """Sum of `function(some rows of every tensor)` over chunks of at most `chunk` rows.

    Rows of zeros fill the last chunk, so `function` must map them to zero.
    """
    count = size(tensors[0], 0)
    if isinstance(count, int):
        if count <= chunk:
            return function(*tensors)
    else:
        chunk = tf.maximum(1, tf.minimum(chunk, count))
    tensors = [padded(tensor, chunk) for tensor in tensors]
    number = size(tensors[0], 0) // chunk
    return tf.while_loop(
        lambda index, total: index < number,
        lambda index, total: (
            index + 1,
            tf.nest.map_structure(
                tf.add, total, function(*[rows(tensor, index * chunk, chunk) for tensor in tensors])
            ),
        ),
        [0, initial],
        parallel_iterations=1,
    )[1]


def rows(tensor, start, count):
    """`count` rows of a tensor, from row `start` on."""
    rest = len(tensor.shape) - 1
    picked = tf.slice(tensor, [start, *[0] * rest], [count, *[-1] * rest])
    picked.set_shape([count if isinstance(count, int) else None, *tensor.shape[1:]])
    return picked


class Source:
    """Per-example gradients of one variable, summed over the calls of its layer.

    Args:
        variable: The variable.
        parts: One tuple of tensors for each call of the layer: [examples, rows, ...]. The last
            tensor of a tuple is the one that the gradient is linear in, without a constant.
    """

    def __init__(self, variable, parts):
        self.variable = variable
        self.parts = parts

    def _like(self, parts):
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__, parts=parts)
        return clone

    def _map(self, function):
        return self._like([tuple(map(function, part)) for part in self.parts])

    def rows(self, start, count):
        """The examples from `start` on, `count` of them."""
        return self._map(lambda tensor: rows(tensor, start, count))

    def extended(self, count):
        """`count` more examples, with gradients of zero."""
        return self._map(
            lambda tensor: tf.pad(tensor, [[0, count], *[[0, 0]] * (len(tensor.shape) - 1)])
        )

    def grouped(self, group):
        """Groups of `group` examples in a row, as examples. Rows of zeros fill the last one."""
        if group == 1:
            return self

        def gather(tensor):
            tensor = padded(tensor, group)
            rows = [size(tensor, 0) // group, group * size(tensor, 1)]
            lengths = [size(tensor, axis) for axis in range(2, len(tensor.shape))]
            return tf.reshape(tensor, [*rows, *lengths])

        return self._map(gather)

    def scaled(self, factors):
        """The gradient of example i times `factors[i]`, or all times a scalar."""

        def scale(part):
            *others, last = part
            last = tf.cast(last, self.variable.dtype)
            shape = [-1, *[1] * (len(last.shape) - 1)] if len(factors.shape) else []
            return *others, last * tf.cast(tf.reshape(factors, shape), last.dtype)

        return self._like([scale(part) for part in self.parts])

    def gradients(self):
        """Each example's gradient: [examples, *shape of the variable]."""
        raise NotImplementedError

    def squares(self):
        """Sum over the examples of the elementwise square, of the variable's shape."""
        rows = max(1, _CHUNK_BYTES // (4 * max(1, math.prod(self.variable.shape))))
        flat = [tensor for part in self.parts for tensor in part]

        def chunk_squares(*tensors):
            tensors = iter(tensors)
            parts = [tuple(next(tensors) for _ in part) for part in self.parts]
            return tf.reduce_sum(tf.square(self._like(parts).gradients()), 0)

        zeros = tf.zeros(self.variable.shape, self.variable.dtype)
        return over_chunks(chunk_squares, flat, rows, zeros)


class Sum(Source):
    """g_b = sum over rows and positions of d_b: biases, scales, offsets.

    Parts: (d [examples, rows, positions, *shape],).
    """

    def gradients(self):
        sums = [tf.reduce_sum(tf.cast(d, self.variable.dtype), [1, 2]) for (d,) in self.parts]
        return tf.add_n(sums)

    def squares(self):
        return tf.reduce_sum(tf.square(self.gradients()), 0)


class Outer(Source):
    """g_b = sum over rows and positions of a_b' d_b: kernels.

    Args:
        variable: The kernel.
        parts: One tuple of tensors for each call.
        factors: Function of a part that yields the pairs (a [examples, positions, groups, in],
            d [examples, positions, groups, out]), one for each block of the kernel.
        assemble: Function of the blocks [..., groups, in, out] that makes the kernel [..., *shape].
    """

    def __init__(self, variable, parts, factors, assemble):
        super().__init__(variable, parts)
        self._factors = factors
        self._assemble = assemble

    def _blocks(self):
        dtype = self.variable.dtype
        for pairs in zip(*(self._factors(part) for part in self.parts), strict=True):
            yield tuple(
                tf.concat([tf.cast(tensor, dtype) for tensor in tensors], 1)
                if len(pairs) > 1
                else tf.cast(tensors[0], dtype)
                for tensors in zip(*pairs, strict=True)
            )

    def gradients(self):
        return self._assemble([_products(a, d) for a, d in self._blocks()])

    def squares(self):
        return self._assemble([_sum_of_squares(a, d) for a, d in self._blocks()])


def _products(a, d):
    """[examples, positions, groups, in] and [..., out] to [examples, groups, in, out]."""
    if a.shape[2] == 1:
        return tf.matmul(a[:, :, 0], d[:, :, 0], transpose_a=True)[:, None]
    return tf.matmul(tf.transpose(a, [0, 2, 3, 1]), tf.transpose(d, [0, 2, 1, 3]))


def _sum_over_examples(a, d):
    """Sum over examples of a' d: [examples, groups, in], [examples, groups, out]."""
    if a.shape[1] == 1:
        return tf.matmul(a[:, 0], d[:, 0], transpose_a=True)[None]
    return tf.matmul(tf.transpose(a, [1, 2, 0]), tf.transpose(d, [1, 0, 2]))


def _sum_of_squares(a, d):
    """Sum over examples of (sum over positions of a' d)^2: [groups, in, out]."""
    positions = a.shape[1]
    if positions == 1:
        return _sum_over_examples(tf.square(a[:, 0]), tf.square(d[:, 0]))
    if positions is not None and positions <= _FEW_POSITIONS:
        # The square of a sum is a sum over pairs.
        pairs = [(p, q) for p in range(positions) for q in range(p + 1)]
        return tf.add_n(
            [
                (1.0 if p == q else 2.0) * _sum_over_examples(a[:, p] * a[:, q], d[:, p] * d[:, q])
                for p, q in pairs
            ]
        )
    shape = [a.shape[2], a.shape[3], d.shape[3]]
    return over_chunks(
        lambda a, d: tf.reduce_sum(tf.square(_products(a, d)), 0),
        [a, d],
        max(1, _CHUNK_BYTES // (a.dtype.size * math.prod(shape))),
        tf.zeros(shape, a.dtype),
    )


class Rows(Source):
    """g_b adds d_b up in the rows that its tokens name: embeddings.

    Parts: (tokens [examples, rows, positions], d [examples, rows, positions, width]).
    """

    def _flat(self):
        tokens = tf.concat([merged(tokens, 1, 2) for tokens, _ in self.parts], 1)
        d = tf.concat([merged(d, 1, 2) for _, d in self.parts], 1)
        return tf.cast(tokens, "int32"), tf.cast(d, self.variable.dtype)

    def gradients(self):
        tokens, d = self._flat()
        examples, (vocabulary, width) = size(tokens, 0), self.variable.shape
        rows = tokens + vocabulary * tf.range(examples)[:, None]
        sums = tf.math.unsorted_segment_sum(
            tf.reshape(d, [-1, width]), tf.reshape(rows, [-1]), examples * vocabulary
        )
        return tf.reshape(sums, [examples, vocabulary, width])

    def squares(self):
        # (sum of d over the places of a token)^2 = sum over its places of d times that sum.
        tokens, d = self._flat()
        length = size(tokens, 1)
        vocabulary, width = self.variable.shape

        def chunk_squares(tokens, d):
            same = tf.cast(tokens[:, :, None] == tokens[:, None, :], d.dtype)
            products = d * tf.matmul(same, d)
            return tf.math.unsorted_segment_sum(
                tf.reshape(products, [-1, width]), tf.reshape(tokens, [-1]), vocabulary
            )

        rows = 1
        if isinstance(length, int):
            rows = max(1, _CHUNK_BYTES // (4 * max(1, length) ** 2))
        zeros = tf.zeros([vocabulary, width], d.dtype)
        return over_chunks(chunk_squares, [tokens, d], rows, zeros)
