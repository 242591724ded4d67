"""Checks of arguments: what was expected, what came."""

import math
import numbers


def positive_integer(name, value, minimum=1):
    """`value` as an int; NumPy integers and integral floats are accepted, bools are not."""
    integral = isinstance(value, numbers.Integral) or (
        isinstance(value, numbers.Real) and float(value).is_integer()
    )
    if isinstance(value, bool) or not integral or value < minimum:
        raise ValueError(f"`{name}` should be an integer >= {minimum}. Received: {name}={value!r}")
    return int(value)


def real_number(name, value, *, positive=False, minimum=None, below=None):
    """`value` as a float in the range asked for; NumPy scalars are accepted, bools are not."""
    wanted = "a finite number"
    if positive:
        wanted = "a positive number"
    elif minimum is not None:
        wanted += f" >= {minimum:g}"
    if below is not None:
        wanted += f" and < {below:g}"
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    good = good and math.isfinite(value)
    good = good and not (positive and value <= 0)
    good = good and not (minimum is not None and value < minimum)
    good = good and not (below is not None and value >= below)
    if not good:
        raise ValueError(f"`{name}` should be {wanted}. Received: {name}={value!r}")
    return float(value)
