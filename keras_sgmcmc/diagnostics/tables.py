"""What `Posterior.summary` and `Posterior.to_arviz` return."""

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
from keras import tree

from keras_sgmcmc.diagnostics import convergence

# Predictions of all draws that are held at a time.
_BYTES = 2**28


class Elements(NamedTuple):
    """Evenly spaced elements of a variable or of the predictions, in every draw."""

    name: str
    size: int  # of all elements
    indices: list  # of those taken, tuples
    values: Any  # [S, taken]


def evenly(size, count):
    """At most `count` of the integers below `size`, evenly spaced, both ends included."""
    return np.round(np.linspace(0, size - 1, min(size, count))).astype(int)


def weight_elements(posterior, count):
    """`Elements` of each floating variable."""
    for i, (name, variable) in enumerate(posterior._named_variables().items()):
        shape = tuple(variable.shape)
        size = math.prod(shape)
        if not size or not np.issubdtype(posterior._draws[0][i].dtype, np.floating):
            continue
        taken = evenly(size, count)
        values = np.stack([draw[i].reshape(-1)[taken] for draw in posterior._draws])
        yield Elements(name, size, list(zip(*np.unravel_index(taken, shape), strict=True)), values)


def prediction_elements(posterior, x, count, batch_size):
    """`Elements` of each output: of evenly spaced rows as many as memory allows, up to `count`."""
    arrays = tree.map_structure(np.asarray, x)
    rows = len(tree.flatten(arrays)[0]) if _are_rows(tree.flatten(arrays)) else 0
    if not rows:
        raise ValueError(
            "`x` should be an array, or a structure of arrays, of one number of rows, at least "
            f"one. Received: {type(x).__name__}. Of a Dataset, give the rows that matter as arrays."
        )
    options = {"batch_size": batch_size, "reduce": None, "verbose": 0}
    first = posterior[:1].predict(tree.map_structure(lambda a: a[:1], arrays), **options)
    row_bytes = sum(a.nbytes for a in tree.flatten(first)) * len(posterior)
    chosen = evenly(rows, min(count, max(1, _BYTES // row_bytes)))
    outputs = posterior.predict(tree.map_structure(lambda a: a[chosen], arrays), **options)
    for path, values in tree.flatten_with_path(outputs):
        name = "/".join(["predictions", *map(str, path)])
        shape = values.shape[1:]
        taken = evenly(math.prod(shape), count)
        row, *rest = np.unravel_index(taken, shape)
        indices = list(zip(chosen[row], *rest, strict=True))
        size = rows * math.prod(shape[1:])
        yield Elements(name, size, indices, values.reshape(len(values), -1)[:, taken])


def _are_rows(arrays):
    return len({a.shape[0] if a.ndim else None for a in arrays}) == 1 and arrays[0].ndim > 0


def summary(posterior, x, seconds, max_elements, batch_size):
    convergence.import_arviz()
    import pandas

    if not len(posterior):
        raise ValueError("The posterior holds no draw, so there is nothing to summarise.")
    weights = posterior.by_chain(posterior.draw_weights)
    chains, draws = weights.shape
    if draws < 4:
        raise ValueError(
            f"A summary needs at least 4 draws a chain. Received: {draws}. Sample longer or thin "
            "less."
        )
    rows = {e.name: _row(posterior, e, weights) for e in weight_elements(posterior, max_elements)}
    if x is not None:
        for elements in prediction_elements(posterior, x, max_elements, batch_size):
            rows[elements.name] = _row(posterior, elements, weights)
    table = pandas.DataFrame.from_dict(rows, orient="index")
    if seconds is not None:
        table["ess_per_second"] = table["ess_bulk"] / seconds
    table.attrs.update(chains=chains, draws=draws, kish=convergence.kish_sample_size(weights))
    still = table["still"].sum()
    if still:
        warnings.warn(
            f"{still} of the {table['checked'].sum()} elements looked at never change or are not "
            "finite: dead units, saturated probabilities, frozen weights? They are counted in the "
            "column `still` and left out of the others, which are NaN where nothing is left.",
            stacklevel=3,
        )
    return table


def _row(posterior, elements, weights):
    values = posterior.by_chain(elements.values).astype("float64")
    changes, finite = convergence.moving(values)
    values = values[..., changes & finite]

    def ess(method):
        return convergence.effective_sample_size(values, method=method, weights=weights)

    long = len(values) > 1 or values.shape[1] >= 8
    r_hat = convergence.potential_scale_reduction(values) if long else np.empty(0)
    bulk = ess("bulk")
    ess_mean = ess("mean")
    error = convergence.standard_error(values, ess_mean, weights)
    return {
        "size": elements.size,
        "checked": elements.values.shape[1],
        "still": int(np.sum(~(changes & finite))),
        "r_hat": _worst(np.max, r_hat),
        "r_hat_above_1.01": _worst(np.mean, r_hat > 1.01),
        "ess_bulk": _worst(np.min, bulk),
        "ess_bulk_median": _worst(np.median, bulk),
        "ess_tail": _worst(np.min, ess("tail")),
        "ess_mean": _worst(np.min, ess_mean),
        "ess_square": _worst(np.min, ess("square")),
        "mcse_mean": _worst(np.max, error),
    }


def _worst(function, values):
    return float(function(values)) if values.size else np.nan


def to_arviz(posterior, x, y, batch_size):
    arviz = convergence.import_arviz()
    if not len(posterior):
        raise ValueError("The posterior holds no draw, so there is nothing to convert.")
    if y is not None and x is None:
        raise ValueError("`y` goes with `x`. Received: x=None")
    # netCDF takes no slash in a name.
    draws = {name.replace("/", "."): values for name, values in posterior.draws.items()}
    dims = _dims({name: values.shape[1:] for name, values in draws.items()})
    stats = {"step": posterior.steps, "weight": posterior.draw_weights}
    groups = {"posterior": draws, "sample_stats": stats}
    prediction_dims = {}
    if x is not None:
        outputs = posterior.predict(x, batch_size=batch_size, reduce=None, verbose=0)
        groups["predictions"] = {}
        for path, values in tree.flatten_with_path(outputs):
            name = ".".join(["predictions", *map(str, path)])
            groups["predictions"][name] = values
            axes = range(values.ndim - 2)
            prediction_dims[name] = ["row", *(f"{name}_dim_{i}" for i in axes)]
    if y is not None:
        densities = log_likelihood(posterior, x, y, batch_size)
        groups["log_likelihood"], dims["y"] = {"y": densities}, ["row"]
        stats["energy"] = -densities.sum(axis=1, dtype="float64")
    groups = {
        group: {name: posterior.by_chain(values) for name, values in variables.items()}
        for group, variables in groups.items()
    }
    return arviz.from_dict(**groups, dims=dims, pred_dims=prediction_dims)


def log_likelihood(posterior, x, y, batch_size):
    """log p(y_i | x_i, theta_s), [S, n]."""
    return posterior.log_predictive_density(x, y, batch_size, verbose=0, reduce=None)


def _dims(shapes):
    """Dimensions of each variable; the last is shared by the variables of a layer."""
    sizes, dims = {}, {}
    for name, shape in shapes.items():
        dims[name] = [f"{name}_dim_{i}" for i in range(len(shape))]
        layer = name.rpartition(".")[0] or name
        if shape and sizes.setdefault(layer, shape[-1]) == shape[-1]:
            dims[name][-1] = f"{layer}_out"
    return dims
