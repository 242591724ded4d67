"""The samplers' noise: a counter-based random stream.

A draw is a pure function of four 32-bit words, `(element, step, stream, seed)`, so there is no
generator state to save, to restore or to keep equal on several replicas: a resumed chain goes on
with the noise it would have seen, and nothing is drawn twice. The words are hashed by pcg4d and
two of the hashed words become one standard normal by the Box-Muller transform. Everything is
plain 32-bit arithmetic in `keras.ops`, which XLA fuses into the update that consumes it.

The integers are the same in eager, graph and compiled mode, and on every device; the normals
agree to rounding between modes and are bit for bit the same within one mode and machine.

References:

- M. Jarzynski, M. Olano, "Hash functions for GPU rendering", Journal of Computer Graphics
  Techniques 9(3), 2020 (pcg4d).
- G. E. P. Box, M. E. Muller, "A note on the generation of random normal deviates", Annals of
  Mathematical Statistics 29(2), 1958.
"""

import functools
import math
import numbers
import random as python_random

import keras
import numpy as np
from keras import ops

from keras_sgmcmc import compilation

# sin(pi s / 2) / s in powers of s^2, interpolated at Chebyshev's nodes: error below 7e-9.
_SINE = (
    1.57079632,
    -0.6459637596,
    0.07968991833,
    -0.004674143838,
    0.0001516717037,
)
# -log(1 + t) / t in powers of t, 1 + t in [1/sqrt(2), sqrt(2)]: relative error below 1.8e-7.
_LOG = (
    -0.99999995,
    0.50000365,
    -0.33335059,
    0.24969909,
    -0.19900166,
    0.17250831,
    -0.16222576,
    0.10106884,
)
# Bits of the float32 sqrt(2) / 2.
_HALF_ROOT = 0x3F3504F3

# Longest range that is compiled as a constant.
_LONGEST_RANGE = 4096


def draw_seed():
    """An integer seed from Python's generator, which `keras.utils.set_random_seed` governs."""
    return python_random.randint(1, 2**32 - 1)


def as_seed(seed):
    """A seed that a user gave, checked; a drawn one for None."""
    if seed is None:
        return draw_seed()
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed < 2**32:
        raise ValueError(f"`seed` should be an integer in [0, 2^32) or None. Received: seed={seed}")
    return int(seed)


def _uint32(value):
    if isinstance(value, int):
        # NumPy's: one operation, and not a cast too, of which there are many in a trace of a step.
        return ops.convert_to_tensor(np.uint32(value % 2**32))
    return ops.cast(ops.convert_to_tensor(value), "uint32")


def _range(size, zero):
    if size <= _LONGEST_RANGE:
        return ops.cast(ops.arange(size, dtype="int32"), "uint32") + zero
    rows = -(-size // _LONGEST_RANGE)
    grid = _range(rows, zero)[:, None] * _uint32(_LONGEST_RANGE) + _range(_LONGEST_RANGE, zero)
    return ops.reshape(grid, (-1,))[:size]


def counter(shape, zero):
    """Position of each element in the row-major order of `shape`, modulo 2^32, as `uint32`.

    It is the sum of short ranges, one an axis. `zero` is a `uint32` scalar 0 that the compiler
    doesn't know to be 0: otherwise it would work the sum out, and hold the result as a constant of
    4 bytes for every weight of the model. Of few elements it is a constant: one operation.
    """
    size = math.prod(shape)
    if size <= _LONGEST_RANGE:
        return ops.convert_to_tensor(np.arange(size, dtype="uint32").reshape(shape))
    positions = zero
    stride = 1
    for axis in reversed(range(len(shape))):
        column = (-1,) + (1,) * (len(shape) - 1 - axis)
        steps = _range(shape[axis], zero) * _uint32(stride)
        positions = positions + ops.reshape(steps, column)
        stride *= shape[axis]
    return positions


def pcg4d(x, y, z, w):
    """Hash of four `uint32` tensors to four `uint32` tensors (Jarzynski & Olano 2020)."""
    factor, addend, half = (_uint32(constant) for constant in (1664525, 1013904223, 16))
    x, y, z, w = (v * factor + addend for v in (x, y, z, w))
    x = x + y * w
    y = y + z * x
    z = z + x * y
    w = w + y * z
    x, y, z, w = (ops.bitwise_xor(v, ops.right_shift(v, half)) for v in (x, y, z, w))
    x = x + y * w
    y = y + z * x
    z = z + x * y
    w = w + y * z
    return x, y, z, w


def words(shape, *, seed, step, stream):
    """Two independent uniform 32-bit words for each element of `shape`.

    Args:
        shape: Tuple of integers, fully defined.
        seed, step, stream: Integers or scalar integer tensors; their lowest 32 bits count.

    Returns:
        Two `uint32` tensors of shape `shape`.
    """
    _, _, z, w = pcg4d(*_counters(shape, seed, step, stream))
    return w, z


def _counters(shape, seed, step, stream):
    step, stream, seed = (_uint32(word) for word in (step, stream, seed))
    return counter(shape, zero=ops.bitwise_xor(step, step)), step, stream, seed


def normal_from_words(radius, angle, dtype):
    """One standard normal from two independent 32-bit words (Box & Muller 1958).

    `sqrt(-2 log u) sin(pi s / 2)` with u in (0, 1] from the upper 31 bits of `radius` and s in
    [-1, 1) from `angle`. Finite for every word: |normal| is at most 6.67.
    """
    cells = ops.cast(ops.cast(ops.right_shift(radius, _uint32(1)), "int32"), dtype) + 0.5
    s = ops.cast(ops.cast(angle, "int32"), dtype) * 2.0**-31
    if dtype == "float32":
        return ops.sqrt(_minus_two_log(cells)) * (s * _polynomial(_SINE, s * s))
    return ops.sqrt(-2.0 * ops.log(cells * 2.0**-31)) * ops.sin((math.pi / 2) * s)


def _minus_two_log(cells):
    """-2 log(cells / 2^31) of positive float32 numbers up to 2^31, never below 0.

    A general logarithm is slower, since it asks for zeros, infinities and the like.
    """
    bits = compilation.reinterpreted(cells, "int32")
    # cells = 2^e (1 + t): e + 127 stands from bit 23 on.
    exponent = ops.bitwise_and(bits - _HALF_ROOT, -(2**23))
    t = compilation.reinterpreted(bits - exponent, "float32") - 1.0
    below = ops.cast((31 * 2**23) - exponent, "float32") * (2 * math.log(2) * 2.0**-23)
    return below + (2.0 * t) * _polynomial(_LOG, t)


def _polynomial(coefficients, x):
    value = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = coefficient + x * value
    return value


@functools.cache
def _hashed_normal(dtype):
    """Function of (element, step, stream, seed), `uint32` tensors, to normals of `dtype`.

    A graph of its own, since its many operations would take most of the time in which the update
    of a model with many variables is traced.
    """

    def hashed(*counters):
        _, _, z, w = pcg4d(*counters)
        return normal_from_words(w, z, dtype)

    return compilation.any_shapes(hashed, *["uint32"] * 4)


def normal(shape, dtype, *, seed, step, stream, chains=None):
    """Standard normals of `shape` and `dtype` for `(seed, step, stream)`; see `words`.

    A first axis of `chains` has the normals of one seed after the other, from `seed` on.
    """
    if chains is None:
        counters = _counters(shape, seed, step, stream)
    else:
        *counters, seed = _counters((1, *shape[1:]), seed, step, stream)
        seeds = seed + ops.convert_to_tensor(np.arange(chains, dtype="uint32"))
        counters.append(ops.reshape(seeds, (chains,) + (1,) * (len(shape) - 1)))
    return ops.reshape(_hashed_normal(keras.backend.standardize_dtype(dtype))(*counters), shape)
