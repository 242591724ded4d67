"""Plots of the elements that mix worst, by ArviZ."""

import numpy as np

from keras_sgmcmc.diagnostics import convergence, tables
from keras_sgmcmc.validation import positive_integer

# Elements of a variable, or predictions, among which the worst are looked for.
_CANDIDATES = 200


def plot_trace(posterior, x=None, *, elements=4, batch_size=32):
    """Density and course of the elements that mix worst, a colour for each chain.

    Of the elements that `Posterior.summary` looks at by default, those of the smallest bulk ESS.
    Want courses without drift, and the same densities in all chains.

    Args:
        posterior: A `Posterior`.
        x: Inputs, as for `Posterior.summary`. Defaults to None, which plots weights; otherwise
            predictions E[y | x, theta_s] are plotted.
        elements: Number of elements to plot. Defaults to `4`.
        batch_size: Rows of a forward pass. Defaults to 32.

    Returns:
        Array of Matplotlib axes.

    Raises:
        ValueError: If there are fewer than 4 draws a chain, or no element ever changes.
        ImportError: If ArviZ is not installed.
    """
    arviz = convergence.import_arviz()
    series = _worst(posterior, x, elements, batch_size)
    axes = arviz.plot_trace(
        series, var_names=list(series), compact=False, legend=_chains(series) > 1
    )
    for density, course in axes:
        density.set(xlabel=_unit(x), ylabel="density")
        course.set(xlabel="draw", ylabel=_unit(x))
    return _finished(axes)


def plot_rank(posterior, x=None, *, elements=4, batch_size=32):
    """Histograms of the ranks of each chain's draws among all, of the elements that mix worst.

    They are flat where the chains agree (Vehtari et al. 2021, section 4.3).

    Args, Returns, Raises: As `plot_trace`; also ValueError for a single chain.
    """
    arviz = convergence.import_arviz()
    series = _worst(posterior, x, elements, batch_size)
    if _chains(series) == 1:
        raise ValueError(
            "`posterior` should hold several chains, whose ranks are compared. Received: a single "
            "one. Join chains by Posterior.concatenate, or look at plot_trace."
        )
    columns = min(len(series), 2)
    grid = (-(-len(series) // columns), columns)
    axes = arviz.plot_rank(series, var_names=list(series), grid=grid, figsize=(11, 3.5 * grid[0]))
    for axis in np.ravel(axes):
        axis.set(xlabel="rank among all draws")
    return _finished(axes)


def plot_autocorrelation(posterior, x=None, *, elements=4, max_lag=100, batch_size=32):
    """Autocorrelation against the lag, of the elements that mix worst, chain by chain.

    The band is where independent draws would lie.

    Args:
        posterior, x, elements, batch_size: As for `plot_trace`.
        max_lag: Largest lag, in draws. Defaults to `100`.

    Returns, Raises: As `plot_trace`.
    """
    arviz = convergence.import_arviz()
    max_lag = positive_integer("max_lag", max_lag)
    series = _worst(posterior, x, elements, batch_size)
    max_lag = min(max_lag, next(iter(series.values())).shape[1])
    grid = (len(series), _chains(series))
    size = (3 + 2.5 * grid[1], 1 + 2 * grid[0])
    axes = arviz.plot_autocorr(
        series, var_names=list(series), max_lag=max_lag, grid=grid, figsize=size, textsize=8
    )
    for axis in np.ravel(axes):
        # The second line is the bare number of the chain.
        axis.set_title(axis.get_title().replace("\n", "\nchain "), fontsize=8)
        axis.set(xlabel="lag in draws", ylabel="autocorrelation", ylim=(-0.5, 1.0))
    return _finished(np.reshape(axes, grid))


def plot_energy(posterior, x, y, *, batch_size=32):
    """The loss of the draws: its distribution, and that of its changes from draw to draw.

        energy_s = -sum_i log p(y_i | x_i, theta_s)

    Changes that are much smaller than the spread of the energy itself say that the chain wanders
    slowly between levels of the loss. BFMI is the ratio of their mean squares, near 2 for
    independent draws, and bad below 0.3 (Betancourt 2016).

    Args:
        posterior: A `Posterior`.
        x: Inputs, as for `Posterior.predict`; those that the chain was trained on, usually.
        y: Targets, as in `model.fit`.
        batch_size: Rows of a forward pass. Defaults to 32.

    Returns:
        A Matplotlib axis.

    Raises:
        ValueError: If the loss is no density that is known.
        ImportError: If ArviZ is not installed.

    Reference:
        M. Betancourt, "Diagnosing suboptimal cotangent disintegrations in Hamiltonian Monte Carlo",
        2016.
    """
    arviz = convergence.import_arviz()
    from matplotlib.ticker import AutoLocator

    densities = tables.log_likelihood(posterior, x, y, batch_size)
    energy = posterior.by_chain(-densities.sum(axis=1, dtype="float64"))
    axis = arviz.plot_energy(arviz.from_dict(sample_stats={"energy": energy}))
    axis.set(
        xlabel="energy - its mean, and changes of the energy (nats)",
        ylabel="density",
        title="Energy -log p(y | x, weights) of the draws",
    )
    axis.xaxis.set_major_locator(AutoLocator())
    axis.figure.tight_layout()
    return axis


def _worst(posterior, x, elements, batch_size):
    """Dict: name of an element -> its draws [chains, draws], the least bulk ESS first."""
    elements = positive_integer("elements", elements)
    if x is None:
        groups = tables.weight_elements(posterior, _CANDIDATES)
    else:
        groups = tables.prediction_elements(posterior, x, _CANDIDATES, batch_size)
    found = []
    for group in groups:
        values = posterior.by_chain(group.values).astype("float64")
        good = np.flatnonzero(np.all(convergence.moving(values), axis=0))
        ess = convergence.effective_sample_size(values[..., good])
        for i, number in zip(good, ess, strict=True):
            index = ", ".join(map(str, group.indices[i]))
            found.append((number, f"{group.name}[{index}]", values[..., i]))
    if not found:
        raise ValueError("No element of `posterior` ever changes: there is nothing to plot.")
    found.sort(key=lambda entry: entry[0])
    return {name: values for _, name, values in found[:elements]}


def _chains(series):
    return len(next(iter(series.values())))


def _unit(x):
    return "weight" if x is None else "prediction"


def _finished(axes):
    np.ravel(axes)[0].figure.tight_layout()
    return axes
