"""Factors of the matrices that samplers with a full preconditioner invert."""

from keras import ops

from keras_sgmcmc import compilation

# Directions whose share of the matrix, scaled to a unit diagonal, is smaller are what rounding in
# float32 leaves of 0.
TOLERANCE = 1e-5


def factorise(matrix, precision, *, largest_share, priors, xla=True):
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
        largest_share: The share of the matrix, at least 1/2, up to which Lambda is no bound in a
            direction; None if it never is.
        priors: "all", "some" or "none" of the coordinates have a prior.
        xla: Whether XLA may be used, whose Cholesky factorisation doesn't raise.

    Returns:
        F, [D, D]; `reach`, [D], 1, or half of the inverse of Lambda's share in a row's direction
        where that is above `largest_share`; the damping, [D]; the number of directions
        that got zeros, a float scalar.
    """
    bounded = largest_share is not None and priors != "none"
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
        limit = largest_share if bounded else None
        return _spectral(unit, inverse, precision, share, limit, ops.sum(dead), diagonal)

    root_of = compilation.compiled(ops.cholesky) if xla else _careful_cholesky
    root = root_of(unit)
    good = _exceeds(ops.square(ops.diagonal(root)), TOLERANCE)
    otherwise = spectral
    if bounded:
        # Positive definite where Lambda is a smaller share of the matrix in every direction.
        rest = root_of(unit - ops.diag(share) / largest_share)
        regular, good = good, ops.logical_and(good, _exceeds(ops.diagonal(rest), 0.0))

        def otherwise():
            def cut():
                factor, _, damping, silent = triangular(root, zeros)
                return *_cut(factor, precision, largest_share), damping, silent

            return ops.cond(regular, cut, spectral)

    elif priors == "all":

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


def _spectral(unit, inverse, precision, share, largest_share, dead, diagonal):
    values, vectors = ops.eigh(unit)
    in_prior = ops.sum(ops.square(vectors) * share[:, None], axis=0)
    kept = ops.logical_or(values > TOLERANCE, in_prior > 1e-3 * TOLERANCE)
    damping = ops.where(ops.min(values) > TOLERANCE, 0.0, TOLERANCE)
    roots = ops.where(kept, ops.rsqrt(ops.maximum(values, 0.0) + damping + 1e-30), 0.0)
    factor = roots[:, None] * ops.transpose(vectors) * inverse[None, :]
    reach = ops.ones_like(diagonal)
    if largest_share is not None:
        factor, reach = _cut(factor, precision, largest_share)
    silent = dead + ops.sum(ops.cast(ops.logical_not(kept), unit.dtype))
    return factor, reach, damping * diagonal, silent


def _cut(factor, precision, largest_share):
    """The factor whose rows are the directions of Lambda, and how far H reaches in them."""
    shares, rotation = ops.eigh(ops.matmul(factor * precision[None, :], ops.transpose(factor)))
    factor = ops.matmul(ops.transpose(rotation), factor)
    return factor, ops.where(shares > largest_share, 0.5 / ops.maximum(shares, 0.5), 1.0)
