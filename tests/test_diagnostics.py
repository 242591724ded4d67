"""Diagnostics: ArviZ on the same arrays, AR(1) chains in closed form, errors by hand."""

import sys
import time
import warnings

import keras
import numpy as np
import pytest
from keras import layers, losses
from scipy import signal

import keras_sgmcmc as sg
from keras_sgmcmc import diagnostics
from keras_sgmcmc.posterior import Posterior

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import arviz


@pytest.fixture(autouse=True)
def _quiet():
    keras.config.disable_interactive_logging()
    yield
    keras.config.enable_interactive_logging()


def ar1(rho, *shape, seed=0):
    """Stationary chains of variance 1, shape [chains, draws, ...]."""
    rng = np.random.default_rng(seed)
    noise = np.sqrt(1 - rho**2) * rng.normal(size=shape)
    start = rho * rng.normal(size=(shape[0], 1, *shape[2:]))
    return signal.lfilter([1.0], [1.0, -rho], noise, axis=1, zi=start)[0]


# Arrays.


@pytest.mark.parametrize("chains", [1, 4])
@pytest.mark.parametrize("method", ["bulk", "tail", "mean", "square"])
def test_ess_is_arviz_on_the_same_array(chains, method):
    draws = ar1(0.6, chains, 150, 3, 2)
    got = diagnostics.effective_sample_size(draws, method=method)
    assert got.shape == (3, 2)
    name = {"square": "sd"}.get(method, method)
    want = arviz.ess(arviz.convert_to_dataset(draws), method=name)["x"].values
    np.testing.assert_array_equal(got, want)
    one = diagnostics.effective_sample_size(draws[..., 0, 0], method=method)
    assert one == want[0, 0]
    if chains == 1:
        assert diagnostics.effective_sample_size(draws[0, :, 0, 0], method=method) == want[0, 0]


def test_r_hat_and_standard_error_are_arviz_on_the_same_array():
    draws = ar1(0.6, 4, 150, 3) + np.array([0.0, 0.1, 3.0]) * np.arange(4)[:, None, None]
    dataset = arviz.convert_to_dataset(draws)
    r_hat = diagnostics.potential_scale_reduction(draws)
    np.testing.assert_array_equal(r_hat, arviz.rhat(dataset)["x"].values)
    assert r_hat[0] < 1.05 < 1.5 < r_hat[2]
    error = diagnostics.monte_carlo_standard_error(draws)
    np.testing.assert_allclose(error, arviz.mcse(dataset)["x"].values, rtol=1e-12)


def test_r_hat_of_one_chain_is_that_of_its_halves():
    draws = ar1(0.3, 1, 201)
    got = diagnostics.potential_scale_reduction(draws)
    assert got == arviz.rhat(np.concatenate([draws[:, :100], draws[:, -100:]]))
    assert got < 1.05
    assert diagnostics.potential_scale_reduction(draws + np.linspace(0, 5, 201)) > 1.5


@pytest.mark.parametrize("chains", [1, 4])
def test_ess_of_ar1_chains(chains):
    # Case 109. tau = (1 + rho) / (1 - rho) = 19; of the squares, whose lag-1 correlation is rho^2,
    # (1 + rho^2) / (1 - rho^2) = 9.53. The relative standard error of these estimates is about
    # sqrt(2 (2 window + 1) / n) = 5 %: 15 % is three.
    n = 100_000 // chains
    draws = ar1(0.9, chains, n, seed=1)
    for method, rho in (("bulk", 0.9), ("mean", 0.9), ("square", 0.81)):
        got = diagnostics.effective_sample_size(draws, method=method)
        assert got == pytest.approx(chains * n * (1 - rho) / (1 + rho), rel=0.15)
    assert diagnostics.autocorrelation_time(draws) == pytest.approx(19.0, rel=0.15)
    in_steps = diagnostics.autocorrelation_time(draws, cost=10)
    assert in_steps == pytest.approx(10 * diagnostics.autocorrelation_time(draws))
    error = diagnostics.monte_carlo_standard_error(draws)
    assert error == pytest.approx(np.sqrt(19.0 / (chains * n)), rel=0.1)


def test_elements_that_never_change_are_nan_with_a_warning():
    draws = ar1(0.5, 2, 50, 4)
    draws[..., 1] = 3.0
    draws[0, 7, 2] = np.nan
    functions = (
        diagnostics.effective_sample_size,
        diagnostics.autocorrelation_time,
        diagnostics.monte_carlo_standard_error,
        diagnostics.potential_scale_reduction,
    )
    for function in functions:
        with pytest.warns(UserWarning, match="2 of 4 elements"):
            got = function(draws)
        np.testing.assert_array_equal(np.isnan(got), [False, True, True, False])
    with pytest.warns(UserWarning, match="1 of 1"):
        assert np.isnan(diagnostics.effective_sample_size(np.ones(10)))
    # Chains that stand still apart from each other are not constant: they disagree.
    apart = np.repeat([[1.0], [2.0]], 10, axis=1)
    assert diagnostics.potential_scale_reduction(apart) == np.inf


def test_kish():
    assert diagnostics.kish_sample_size(np.full(10, 0.3)) == pytest.approx(10)
    assert diagnostics.kish_sample_size([3.0, 1.0]) == pytest.approx(16 / 10)
    assert diagnostics.kish_sample_size([1e300, 0.0, 0.0]) == pytest.approx(1)
    # Half of the draws do not count.
    draws, weights = ar1(0.5, 2, 100, 3), np.tile([0.0, 2.0], (2, 50))
    plain = diagnostics.effective_sample_size(draws)
    got = diagnostics.effective_sample_size(draws, weights=weights)
    np.testing.assert_allclose(got, plain / 2)
    equal = diagnostics.effective_sample_size(draws, weights=np.ones((2, 100)))
    np.testing.assert_allclose(equal, plain)
    mean = diagnostics.effective_sample_size(draws, method="mean")
    want = np.std(draws[:, 1::2], axis=(0, 1)) * np.sqrt(200 / 199) / np.sqrt(mean / 2)
    got = diagnostics.monte_carlo_standard_error(draws, weights=weights)
    np.testing.assert_allclose(got, want)


def test_effective_number_of_weighted_draws_says_how_the_mean_varies():
    # 400 weighted means of 200 draws. The relative standard error of a variance is
    # sqrt(2 / 400) = 7 %, 20 % is about three; Kish's share here is 0.75, rho = 0.5 a factor 3.
    weights = np.linspace(2.0, 0.0, 200)
    draws = ar1(0.5, 400, 200, seed=2)
    variance = np.var(draws @ weights / weights.sum())
    want = diagnostics.kish_sample_size(weights) / 3.0
    assert diagnostics.kish_sample_size(weights) / 200 == pytest.approx(0.75, rel=0.01)
    assert 1 / variance == pytest.approx(want, rel=0.2)


def test_relative_errors_by_hand():
    assert diagnostics.relative_error_mean([1.0, -2.0], [2.0, -3.0]) == pytest.approx(2 / 5)
    got = diagnostics.relative_error_covariance([[1.0, 0.5], [0.5, 2.0]], [[2.0, 0.0], [0.0, 2.0]])
    assert got == pytest.approx(2 / 4)
    assert diagnostics.relative_error_mean([1.0], [1.0]) == 0.0
    with pytest.raises(ValueError, match=r"`covariance`.*\(2, 2\) and \(2,\)"):
        diagnostics.relative_error_covariance(np.eye(2), np.ones(2))
    with pytest.raises(ValueError, match="`reference`"):
        diagnostics.relative_error_mean([1.0], [0.0])


def test_errors():
    for shape in ((3,), (1, 3), (100, 3), (1, 2, 5), (0, 10)):
        with pytest.raises(
            ValueError, match=r"`draws`.*at least 4 draws.*Received: shape.*\[None\]"
        ):
            diagnostics.effective_sample_size(np.zeros(shape))
    with pytest.raises(ValueError, match=r"`draws`.*at least 8 draws of a single chain.*\(1, 7\)"):
        diagnostics.potential_scale_reduction(np.arange(7.0))
    with pytest.raises(ValueError, match=r"`method`.*'bulk'.*Received: method='median'"):
        diagnostics.effective_sample_size(np.arange(9.0), method="median")
    with pytest.raises(ValueError, match=r"`weights`.*\(1, 9\).*\(1, 8\)"):
        diagnostics.effective_sample_size(np.arange(9.0), weights=np.ones(8))
    for bad in ([1.0, -1.0], [0.0, 0.0], [np.nan, 1.0]):
        with pytest.raises(ValueError, match="`weights`"):
            diagnostics.kish_sample_size(bad)
    with pytest.raises(ValueError, match="`cost`"):
        diagnostics.autocorrelation_time(np.arange(9.0), cost=0)


def test_missing_arviz_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"keras-sgmcmc\[diagnostics\]"):
        diagnostics.effective_sample_size(np.arange(9.0))
    with pytest.raises(ImportError, match=r"keras-sgmcmc\[diagnostics\]"):
        chain(network()).summary()


# Posterior.


def network(units=2):
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(5, "tanh", name="first"), layers.Dense(units, name="last")]
    )
    model.compile(loss=losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def chain(model, count=40, seed=0, rho=0.5, weights=None):
    arrays = [ar1(rho, 1, count, *v.shape, seed=seed + i)[0] for i, v in enumerate(model.weights)]
    draws = [[a[s] for a in arrays] for s in range(count)]
    return Posterior(model, model.weights, draws, 10 * np.arange(1, count + 1), weights)


def inputs(rows=6):
    return np.random.default_rng(5).normal(size=(rows, 3)).astype("float32")


def path(posterior, name):
    return next(p for p in posterior.draws if p.endswith(name))


def test_chains_are_told_apart():
    model = network()
    parts = [chain(model, count, seed=9 * i) for i, count in enumerate((4, 6))]
    both = Posterior.concatenate(parts)
    assert both.chain_ids.tolist() == [0] * 4 + [1] * 6
    three = Posterior.concatenate([both[2:], parts[0]])
    assert three.chain_ids.tolist() == [0] * 2 + [1] * 6 + [2] * 4
    # The shortest chain decides, and the last draws stay.
    np.testing.assert_array_equal(both.by_chain(both.steps), [[10, 20, 30, 40], [30, 40, 50, 60]])
    # Neither a part nor another order mixes the chains.
    shuffled = both[np.random.default_rng(0).permutation(10)]
    np.testing.assert_array_equal(shuffled.by_chain(shuffled.steps), both.by_chain(both.steps))
    for name, values in both.draws.items():
        np.testing.assert_array_equal(
            shuffled.by_chain(shuffled.draws[name]), both.by_chain(values)
        )
    assert both[::2].by_chain(both[::2].steps).tolist() == [[10, 30], [30, 50]]
    assert Posterior(model, [], [[], []], [1, 2], chain_ids=[7, 3]).chain_ids.tolist() == [7, 3]
    with pytest.raises(ValueError, match="`chain_ids` needs one entry for each of 2"):
        Posterior(model, [], [[], []], [1, 2], chain_ids=[1])
    with pytest.raises(ValueError, match=r"`values`.*10 draws.*\(3,\)"):
        both.by_chain(np.ones(3))


def test_seconds_add_up_and_are_unknown_of_a_part():
    model = network()
    first, second = chain(model), chain(model, seed=50)
    assert Posterior.concatenate([first, second]).seconds is None
    first.seconds, second.seconds = 3.0, 4.0
    assert Posterior.concatenate([first, second]).seconds == 7.0
    assert first[:20].seconds is None


def test_summary_is_the_worst_of_the_elements():
    model = network()
    posterior = Posterior.concatenate([chain(model, seed=9 * i) for i in range(3)])
    x = inputs()
    table = posterior.summary(x, seconds=2.0)
    names = list(posterior.draws)
    assert table.index.tolist() == [*names, "predictions"]
    assert table.attrs == {"chains": 3, "draws": 40, "kish": pytest.approx(120)}
    groups = dict(posterior.draws)
    groups["predictions"] = posterior.predict(x, reduce=None)
    for name, values in groups.items():
        draws = posterior.by_chain(values)
        row = table.loc[name]
        ess = diagnostics.effective_sample_size(draws)
        r_hat = diagnostics.potential_scale_reduction(draws)
        assert (row["size"], row["checked"], row["still"]) == (ess.size, ess.size, 0)
        assert row["r_hat"] == r_hat.max()
        assert row["r_hat_above_1.01"] == pytest.approx(np.mean(r_hat > 1.01))
        assert row["ess_bulk"] == pytest.approx(ess.min())
        assert row["ess_bulk_median"] == pytest.approx(np.median(ess))
        assert row["ess_per_second"] == pytest.approx(ess.min() / 2)
        for method in ("tail", "mean", "square"):
            ess = diagnostics.effective_sample_size(draws, method=method)
            assert row[f"ess_{method}"] == pytest.approx(ess.min())
        error = diagnostics.monte_carlo_standard_error(draws)
        assert row["mcse_mean"] == pytest.approx(error.max())


def test_summary_of_one_chain_of_weighted_draws():
    model = network()
    weights = np.arange(1.0, 41.0)
    plain, weighted = chain(model).summary(), chain(model, weights=weights).summary()
    assert "ess_per_second" not in plain
    share = diagnostics.kish_sample_size(weights) / 40
    assert 0.7 < share < 0.8
    for column in ("ess_bulk", "ess_tail", "ess_mean", "ess_square"):
        np.testing.assert_allclose(weighted[column], share * plain[column])
    np.testing.assert_array_equal(weighted["r_hat"], plain["r_hat"])
    posterior = chain(model)
    posterior.seconds = 4.0
    np.testing.assert_allclose(posterior.summary()["ess_per_second"], plain["ess_bulk"] / 4)


def test_function_space_does_not_see_exchanged_units():
    # Two chains that are one, but for the order of the hidden units: only predictions agree.
    model = network()
    centre = [np.random.default_rng(3).normal(size=v.shape) for v in model.weights]
    draws = [[m + 0.1 * d for m, d in zip(centre, draw, strict=True)] for draw in chain(model)]
    order = [1, 2, 3, 4, 0]
    exchanged = [[k[:, order], b[order], k2[order], b2] for k, b, k2, b2 in draws]
    steps = np.arange(1, 41)
    parts = [Posterior(model, model.weights, d, steps) for d in (draws, exchanged)]
    table = Posterior.concatenate(parts).summary(inputs())
    assert table.loc[path(parts[0], "first/kernel"), "r_hat"] > 1.5
    assert table.loc["predictions", "r_hat"] < 1.1


def test_summary_looks_at_evenly_spaced_elements():
    posterior = chain(network())
    table = posterior.summary(inputs(101), max_elements=4)
    kernel = path(posterior, "first/kernel")
    assert table["checked"].tolist() == [4, 4, 4, 2, 4]
    assert table["size"].tolist() == [15, 5, 10, 2, 202]
    values = posterior.draws[kernel].reshape(40, 15)[:, [0, 5, 9, 14]]
    want = diagnostics.effective_sample_size(posterior.by_chain(values)).min()
    assert table.loc[kernel, "ess_bulk"] == pytest.approx(want)
    # Rows 0, 33, 67 and 100 of x; of their 8 outputs the first, third, sixth and last.
    each = posterior.predict(inputs(101)[[0, 33, 67, 100]], reduce=None).reshape(40, 8)
    want = diagnostics.effective_sample_size(each[None][..., [0, 2, 5, 7]]).min()
    assert table.loc["predictions", "ess_bulk"] == pytest.approx(want, rel=1e-4)


def test_summary_counts_elements_that_stand_still():
    model = network()
    draws = [[a.copy() for a in draw] for draw in chain(model)]
    for draw in draws:
        draw[0][:, 1] = 0.0
        draw[1][:] = 2.0
    posterior = Posterior(model, model.weights, draws, range(40))
    with pytest.warns(UserWarning, match="8 of the 32 elements"):
        table = posterior.summary()
    assert table["still"].tolist() == [3, 5, 0, 0]
    columns = ["r_hat", "ess_bulk", "ess_square", "mcse_mean"]
    assert table.loc[path(posterior, "first/bias"), columns].isna().all()
    assert table.loc[path(posterior, "first/kernel"), columns].notna().all()


def test_summary_errors():
    model = network()
    with pytest.raises(ValueError, match=r"at least 4 draws a chain. Received: 3"):
        Posterior.concatenate([chain(model, 3), chain(model)]).summary()
    with pytest.raises(ValueError, match="no draw"):
        chain(model)[:0].summary()
    with pytest.raises(ValueError, match="`seconds`"):
        chain(model).summary(seconds=0)
    with pytest.raises(ValueError, match="`max_elements`"):
        chain(model).summary(max_elements=0)
    with pytest.raises(ValueError, match=r"`x` should be an array"):
        chain(model).summary(np.empty((0, 3)))
    assert chain(model, 5).summary()["r_hat"].isna().all()  # 8 draws are needed for that alone


def test_predictions_of_several_outputs_have_a_row_each():
    entry = keras.Input((3,))
    outputs = {"a": layers.Dense(1, name="a")(entry), "b": layers.Dense(2, name="b")(entry)}
    model = keras.Model(entry, outputs)
    model.compile(loss={"a": "mse", "b": "mse"})
    posterior = chain(model)
    table = posterior.summary(inputs())
    assert table.index[-2:].tolist() == ["predictions/a", "predictions/b"]
    assert table["size"].tolist()[-2:] == [6, 12]
    data = posterior.to_arviz(inputs())
    assert set(data.predictions) == {"predictions.a", "predictions.b"}


def test_to_arviz(tmp_path):
    model = network()
    posterior = Posterior.concatenate([chain(model, seed=9 * i) for i in range(2)])
    x, y = inputs(), np.arange(6) % 2
    data = posterior.to_arviz(x, y)
    for name, values in posterior.draws.items():
        variable = data.posterior[name.replace("/", ".")]
        np.testing.assert_array_equal(variable.values, posterior.by_chain(values))
    kernel = path(posterior, "first/kernel").replace("/", ".")
    layer = kernel.removesuffix(".kernel")
    assert data.posterior[kernel].dims == ("chain", "draw", f"{kernel}_dim_0", f"{layer}_out")
    assert data.posterior[f"{layer}.bias"].dims == ("chain", "draw", f"{layer}_out")
    assert data.sample_stats["step"].values.tolist() == [list(range(10, 401, 10))] * 2
    np.testing.assert_allclose(data.sample_stats["weight"].values, np.full((2, 40), 1 / 80))
    assert data.predictions["predictions"].dims == ("chain", "draw", "row", "predictions_dim_0")
    p = data.predictions["predictions"].values
    log_p = np.log(p[:, :, range(6), y])
    np.testing.assert_allclose(data.log_likelihood["y"].values, log_p, rtol=1e-3, atol=1e-5)
    energy = data.sample_stats["energy"].values
    np.testing.assert_allclose(energy, -log_p.sum(-1), rtol=1e-4)
    ess = arviz.ess(data.posterior)[f"{layer}.bias"].values
    bias = posterior.draws[path(posterior, "first/bias")]
    want = diagnostics.effective_sample_size(posterior.by_chain(bias))
    np.testing.assert_allclose(ess, want, rtol=1e-5)
    data.to_netcdf(str(tmp_path / "draws.nc"))
    again = arviz.from_netcdf(str(tmp_path / "draws.nc"))
    np.testing.assert_array_equal(again.posterior[kernel].values, data.posterior[kernel].values)
    with pytest.raises(ValueError, match="`y` goes with `x`"):
        posterior.to_arviz(y=y)
    with pytest.raises(ValueError, match="no draw"):
        posterior[:0].to_arviz()


def test_dimension_is_shared_only_where_its_length_is():
    class Odd(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(3, 4), name="kernel")
            self.bias = self.add_weight(shape=(3,), name="bias")
            self.scale = self.add_weight(shape=(), name="scale")

        def call(self, x):
            return x @ self.kernel

    model = keras.Sequential([keras.Input((3,)), Odd(name="odd")])
    data = chain(model).to_arviz().posterior
    layer = path(chain(model), "odd/kernel").replace("/", ".").removesuffix(".kernel")
    assert data[f"{layer}.kernel"].dims[-1] == f"{layer}_out"
    assert data[f"{layer}.bias"].dims[-1] == f"{layer}.bias_dim_0"
    assert data[f"{layer}.scale"].dims == ("chain", "draw")


def test_draws_know_the_time_that_they_took():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile(sg.SGLD(1e-3, train_size=40), sg.GaussianNegativeLogLikelihood(1.0))
    samples = sg.callbacks.PosteriorSamples(burn_in=5, thinning=2)
    data = sg.minibatches(inputs(40), np.zeros((40, 1), "float32"), 10, seed=0)
    begin = time.perf_counter()
    model.fit(data, epochs=10, callbacks=[samples], verbose=0)
    seconds = time.perf_counter() - begin
    posterior = samples.posterior
    assert 0 < posterior.seconds < seconds
    assert "ess_per_second" in posterior.summary()


# Plots.


@pytest.fixture
def figures():
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def test_plots(figures):
    model = network()
    posterior = Posterior.concatenate([chain(model, seed=9 * i) for i in range(2)])
    x, y = inputs(), np.arange(6) % 2
    axes = diagnostics.plot_trace(posterior, elements=3)
    assert axes.shape == (3, 2)
    # Those of the least effective number, by name and index.
    ess = {
        f"{name}[{', '.join(map(str, index))}]": diagnostics.effective_sample_size(
            posterior.by_chain(values[(slice(None), *index)])
        )
        for name, values in posterior.draws.items()
        for index in np.ndindex(values.shape[1:])
    }
    titles = {axis.get_title() for axis in axes[:, 0]}
    assert titles == set(sorted(ess, key=ess.get)[:3])
    assert all("predictions[" in a.get_title() for a in diagnostics.plot_trace(posterior, x)[:, 0])
    assert np.size(diagnostics.plot_rank(posterior, x)) == 4
    axes = diagnostics.plot_autocorrelation(posterior, elements=2, max_lag=20)
    assert axes.shape == (2, 2)
    for row, name in zip(axes, sorted(ess, key=ess.get), strict=False):
        for i, axis in enumerate(row):
            assert axis.get_title() == f"{name}\nchain {i}"
            (lines,) = [c for c in axis.collections if hasattr(c, "get_segments")]
            heights = [segment[1, 1] for segment in lines.get_segments()]
            variable, _, index = name.rstrip("]").partition("[")
            element = tuple(map(int, index.split(", ")))
            draws = posterior.by_chain(posterior.draws[variable])[(i, slice(None), *element)]
            np.testing.assert_allclose(heights, arviz.autocorr(draws)[:20], atol=1e-5)
    axis = diagnostics.plot_energy(posterior, x, y)
    assert axis.get_title()
    assert diagnostics.plot_autocorrelation(posterior[:40], elements=1).shape == (1, 1)


def test_plot_errors():
    model = network()
    with pytest.raises(ValueError, match=r"several chains.*concatenate"):
        diagnostics.plot_rank(chain(model))
    still = Posterior(model, model.weights, [chain(model)[0]] * 9, range(9))
    with pytest.raises(ValueError, match="ever changes"):
        diagnostics.plot_trace(still)
    with pytest.raises(ValueError, match="`elements`"):
        diagnostics.plot_trace(chain(model), elements=0)
    with pytest.raises(ValueError, match="`max_lag`"):
        diagnostics.plot_autocorrelation(chain(model), max_lag=0)
