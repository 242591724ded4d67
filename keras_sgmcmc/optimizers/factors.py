"""Factors of the matrices that samplers with a full preconditioner invert."""

from keras import ops

from keras_sgmcmc import compilation

# Directions whose share of the matrix, scaled to a unit diagonal, is smaller are what rounding in
# float32 leaves of 0.
TOLERANCE = 1e-5


def factorise(matrix, precision, *, bounded, priors, xla=True):
    """Factor F with F (matrix + damping) F' = 1 in all directions that can be told from 0.

    The matrix is scaled to a unit diagonal first, so that the units of the weights don't matter.
    Coordinates with a zero on the diagonal get zeros. Where the rest is not positive definite to
    `TOLERANCE`, it is damped by `TOLERANCE` times its diagonal; directions that vanish to
    `TOLERANCE`, and in which there is no prior either, get zeros.

    One Cholesky factor is enough for most matrices. Eigenvectors are needed to find the directions
    to bound or to leave out, which XLA on a CPU is slow at (seconds for 500 rows).

    Args:
        matrix: Symmetric, positive semi-definite, [D, D].
        precision: Lambda, the part of the matrix that is the prior's, a vector, [D].
        bounded: Whether to find the directions in which Lambda is more than half of the matrix.
        priors: "all", "some" or "none" of the coordinates have a prior.
        xla: Whether XLA may be used, whose Cholesky factorisation doesn't raise.

    Returns:
        F, [D, D]; `reach`, [D], at most 1: twice it is the inverse of Lambda's share in a row's
        direction where `bounded` and that is above 1/2; the damping, [D]; the number of directions
        that got zeros, a float scalar.
    """
    bounded = bounded and priors != "none"
    diagonal = ops.diagonal(matrix)
    live = diagonal > 0
    inverse = ops.where(live, ops.rsqrt(ops.where(live, diagonal, 1.0)), 0.0)
    dead = ops.cast(ops.logical_not(live), matrix.dtype)
    unit = matrix * inverse[:, None] * inverse[None, :] + ops.diag(dead)
    share = precision * ops.square(inverse)
    ones, zeros = ops.ones_like(diagonal), ops.zeros_like(diagonal)
    identity = ops.diag(ones)

    def triangular(root, damping):
        factor = ops.solve_triangular(root, identity, lower=True) * inverse[None, :]
        return factor, ones, damping, ops.sum(dead)

    def spectral():
        return _spectral(unit, inverse, precision, share, bounded, ops.sum(dead), diagonal)

    root_of = compilation.compiled(ops.cholesky) if xla else _careful_cholesky
    root = root_of(unit)
    good = _exceeds(ops.square(ops.diagonal(root)), TOLERANCE)
    if bounded:
        # Positive definite where Lambda is less than half of the matrix in every direction.
        half = root_of(unit - 2.0 * ops.diag(share))
        good = ops.logical_and(good, _exceeds(ops.diagonal(half), 0.0))
    otherwise = spectral
    if priors == "all" and not bounded:

        def otherwise():
            root = root_of(unit + TOLERANCE * identity)
            positive = _exceeds(ops.diagonal(root), 0.0)
            return ops.cond(positive, lambda: triangular(root, TOLERANCE * diagonal), spectral)

    return ops.cond(good, lambda: triangular(root, zeros), otherwise)


def _careful_cholesky(matrix):
    """The Cholesky factor, NaN if there is none."""
    values, _ = ops.eigh(matrix)
    return ops.cond(
        ops.all(values > 0.1 * TOLERANCE),
        lambda: ops.cholesky(matrix),
        lambda: ops.full_like(matrix, float("nan")),
    )


def _exceeds(pivots, bound):
    # Not by the smallest: XLA's minimum may pass over the NaN of a factorisation that failed.
    return ops.all(pivots > bound)


def _spectral(unit, inverse, precision, share, bounded, dead, diagonal):
    values, vectors = ops.eigh(unit)
    in_prior = ops.sum(ops.square(vectors) * share[:, None], axis=0)
    kept = ops.logical_or(values > TOLERANCE, in_prior > 1e-3 * TOLERANCE)
    damping = ops.where(ops.min(values) > TOLERANCE, 0.0, TOLERANCE)
    roots = ops.where(kept, ops.rsqrt(ops.maximum(values, 0.0) + damping + 1e-30), 0.0)
    factor = roots[:, None] * ops.transpose(vectors) * inverse[None, :]
    reach = ops.ones_like(diagonal)
    if bounded:
        shares, rotation = ops.eigh(ops.matmul(factor * precision[None, :], ops.transpose(factor)))
        factor = ops.matmul(ops.transpose(rotation), factor)
        reach = 1.0 / ops.maximum(2.0 * shares, 1.0)
    silent = dead + ops.sum(ops.cast(ops.logical_not(kept), unit.dtype))
    return factor, reach, damping * diagonal, silent
