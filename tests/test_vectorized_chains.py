"""Chains that are stepped together: each is the chain that it would be alone, and right."""

import importlib
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_sgmcmc as sg
from keras_sgmcmc import theory
from keras_sgmcmc.vectorized_chains import StackedChains

# The package's function of this name hides the module.
sample_chains = importlib.import_module("keras_sgmcmc.chains")

# As many chains as no layer has units.
ROWS, BATCH, CHAINS = 60, 10, 3


def arrays():
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal((ROWS, 3)).astype("float32") for name in ("a", "b")}
    return x, rng.standard_normal((ROWS, 2)).astype("float32")


def network(sampler):
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    inner = layers.Dense(4, "tanh", name="inner")
    both = layers.concatenate([inner(a), inner(b)])
    model = keras.Model({"a": a, "b": b}, layers.Dense(2, name="outer")(both))
    model.compile(sampler, sg.GaussianNegativeLogLikelihood(0.5), metrics=["mae"])
    return model


SAMPLERS = {
    "SGLD": lambda **given: sg.SGLD(1e-2, train_size=ROWS, **given),
    "pSGLD": lambda **given: sg.pSGLD(1e-3, train_size=ROWS, epsilon=1e-2, **given),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_chain_moves_as_it_would_alone(name):
    """By the mean gradient of its own batch, the prior of its groups and its own noise."""
    x, y = arrays()
    prior = sg.GaussianPrior(groups={"inner": 5.0, "outer": 0.5})

    def build(seed):
        keras.utils.set_random_seed(seed)
        return network(SAMPLERS[name](prior=prior, seed=seed))

    alone = [build(seed) for seed in range(CHAINS)]
    stacked = StackedChains([build(seed) for seed in range(CHAINS)], seed=0)
    data = sg.minibatches(x, y, BATCH, steps=6).reseeded(1, CHAINS)
    history = stacked.fit(data, shuffle=False, verbose=0).history
    inputs, targets = data.batches(0, 6)
    losses = []
    for step in range(6):
        for number, model in enumerate(alone):
            own = slice(number * BATCH, (number + 1) * BATCH)
            batch = {key: value[step, own] for key, value in inputs.items()}
            losses.append(model.train_on_batch(batch, targets[step, own], return_dict=True))
            model.reset_metrics()
    for variables in zip(
        stacked.trainable_variables, *(model.trainable_variables for model in alone), strict=True
    ):
        ours, *theirs = map(ops.convert_to_numpy, variables)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert history["loss"][0] == pytest.approx(np.mean([row["loss"] for row in losses]), rel=1e-5)
    assert history["mae"][0] == pytest.approx(np.mean([row["mae"] for row in losses]), rel=1e-5)


def test_chains_have_the_seeds_that_they_have_one_by_one(monkeypatch):
    """Of first weights, batches and noise; in one program, or in one on each of two cores."""
    monkeypatch.setattr(sample_chains, "_CHAINS_A_PROGRAM", 1)
    programs = []

    def stack(models, seed):
        programs.append(len(models))
        return StackedChains(models, seed)

    monkeypatch.setattr(sample_chains, "StackedChains", stack)
    x, y = arrays()
    data = sg.minibatches(x, y, BATCH, steps=8)
    arguments = {"chains": 3, "burn_in": 1, "thinning": 3, "seed": 2**32 - 2, "verbose": 0}

    def build_model():
        model = network(SAMPLERS["SGLD"](prior=1.0))
        model.compile(model.optimizer, model.loss, steps_per_execution=4)
        return model

    alone = sg.sample_chains(build_model, data, **arguments)
    for cores, shares in ((1, [3]), (2, [1, 2])):
        monkeypatch.setattr(sample_chains, "_core_count", lambda cores=cores: cores)
        programs.clear()
        together = sg.sample_chains(build_model, data, vectorized=True, **arguments)
        assert sorted(programs) == shares
        np.testing.assert_array_equal(together.chain_ids, alone.chain_ids)
        np.testing.assert_array_equal(together.steps, alone.steps)
        for ours, theirs in zip(together.draws.values(), alone.draws.values(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("without_xla")
def test_an_output_without_a_loss():
    x, y = arrays()

    def build_model():
        given = keras.Input((3,))
        outputs = {name: layers.Dense(2, name=name)(given) for name in ("a", "b")}
        model = keras.Model(given, outputs)
        loss = {"a": sg.GaussianNegativeLogLikelihood(0.5)}
        model.compile(sg.SGLD(1e-3, train_size=ROWS), loss)
        return model

    data = sg.minibatches(x["a"], {"a": y}, BATCH, steps=4)
    arguments = {"chains": 2, "burn_in": 1, "thinning": 1, "seed": 1, "verbose": 0}
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        alone = sg.sample_chains(build_model, data, **arguments)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        together = sg.sample_chains(build_model, data, vectorized=True, **arguments)
    for ours, theirs in zip(together.draws.values(), alone.draws.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize(
    ("expected", "callbacks", "steps_per_execution", "devices"),
    [
        ([0, 8], None, 2, None),
        ([0], None, 1, None),
        ([0], lambda number: [], 2, None),
        ([0, 8], lambda number: [], 1, ["CPU:0", "CPU:0"]),
    ],
)
def test_shares(expected, callbacks, steps_per_execution, devices, monkeypatch):
    x, y = arrays()
    monkeypatch.setattr(sample_chains, "_core_count", lambda: 4)
    seeds = []

    def stack(models, seed):
        seeds.append(seed)
        return StackedChains(models, seed)

    monkeypatch.setattr(sample_chains, "StackedChains", stack)

    def build_model():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        sampler = sg.SGLD(1e-2, train_size=ROWS)
        loss = sg.GaussianNegativeLogLikelihood(0.5)
        model.compile(sampler, loss, steps_per_execution=steps_per_execution)
        return model

    posterior = sg.sample_chains(
        build_model,
        sg.minibatches(x["a"], y, BATCH, steps=4),
        chains=16,
        burn_in=0,
        thinning=2,
        seed=0,
        callbacks=callbacks,
        devices=devices,
        vectorized=True,
        verbose=0,
    )
    assert sorted(seeds) == expected
    np.testing.assert_array_equal(posterior.chain_ids, np.repeat(np.arange(16), 2))


def test_the_draws_are_from_the_posterior_and_the_chains_independent():
    """Columns of one layer, 64 in each of 8 chains; the noise of small batches is reckoned with."""
    N, batch, columns, chains, sigma, precision = 200, 50, 64, 8, 0.5, 20.0
    rng = np.random.default_rng(0)
    x = np.linalg.qr(rng.standard_normal((N, 2)))[0] @ [[10.0, 4.0], [0.0, 8.0]]
    y = x @ [[1.0], [-1.0]] + sigma * rng.standard_normal((N, 1))
    A = x.T @ x / sigma**2 + precision * np.eye(2)
    eta = 0.05 * N / np.linalg.eigvalsh(A)[-1]
    mean = np.linalg.solve(A, x.T @ y / sigma**2)
    exact = theory.linear_regression_stationary_covariance(
        x, y[:, 0], eta, 2 * eta / N, S=batch, noise_std=sigma, prior_precision=precision
    )
    y = np.repeat(y, columns, 1)

    def build_model():
        layer = layers.Dense(columns, use_bias=False)
        model = keras.Sequential([keras.Input((2,)), layer])
        sampler = sg.SGLD(eta, train_size=N, prior=precision)
        loss = sg.GaussianNegativeLogLikelihood(sigma)
        model.compile(sampler, loss, steps_per_execution=100)
        return model

    posterior = sg.sample_chains(
        build_model,
        sg.minibatches(x.astype("float32"), y.astype("float32"), batch, steps=2000),
        chains=chains,
        burn_in=400,
        thinning=20,
        seed=1,
        vectorized=True,
        verbose=0,
    )
    np.testing.assert_array_equal(posterior.chain_ids, np.repeat(np.arange(chains), 80))
    np.testing.assert_array_equal(posterior.steps, np.tile(np.arange(420, 2001, 20), chains))
    (draws,) = posterior.draws.values()
    draws = draws.reshape(chains, 80, 2, columns) - mean
    found = np.einsum("csia,csja->cija", draws, draws) / 80
    each = found.transpose(0, 3, 1, 2).reshape(-1, 2, 2)
    errors = each.std(0) / np.sqrt(len(each))
    assert np.all(errors < 0.02 * np.diag(exact).min())
    np.testing.assert_array_less(np.abs(each.mean(0) - exact), 4 * errors)
    centre = draws.mean(1).transpose(0, 2, 1).reshape(-1, 2)
    assert np.all(np.abs(centre.mean(0)) < 4 * centre.std(0) / np.sqrt(len(centre)))
    # No noise is shared: neither by the columns of a chain, nor by the same columns of two.
    apart = draws[:, :, 0] / np.sqrt(exact[0, 0])
    shared = np.einsum("csa,dsa->cd", apart, apart) / (80 * columns)
    assert np.abs(shared - np.diag(np.diag(shared))).max() < 5 / np.sqrt(80 * columns / 2)


def test_refusals():
    x, y = arrays()
    data = sg.minibatches(x, y, BATCH, steps=20)
    arguments = {"chains": 2, "burn_in": 0, "vectorized": True, "verbose": 0}

    def sample(build_model, data=data, **given):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sg.sample_chains(build_model, data, **{**arguments, **given})

    def built(sampler=None, *more, **given):
        sampler = sampler or sg.SGLD(1e-2, train_size=ROWS)
        model = keras.Sequential([keras.Input((3,)), *more, layers.Dense(2, **given)])
        model.compile(sampler, sg.GaussianNegativeLogLikelihood(0.5))
        return model

    fisher = lambda: sg.SGFS(train_size=ROWS, batch_size=BATCH)  # noqa: E731
    for match, refused in {
        r"SGLD and pSGLD.*Received: optimizer=.*SGFS": lambda: built(fisher()),
        "include_gamma.*as that of one model": lambda: built(
            sg.pSGLD(1e-3, train_size=ROWS, epsilon=1e-2, include_gamma=True)
        ),
        "would clip the gradients of all chains": lambda: built(
            sg.SGLD(1e-2, train_size=ROWS, global_clipnorm=1.0)
        ),
        "have one .statistics": lambda: built(None, layers.BatchNormalization()),
        "seed of a random layer": lambda: built(None, layers.Dropout(0.5)),
        "neither regularizers nor constraints": lambda: built(kernel_regularizer="l2"),
    }.items():
        with pytest.raises(ValueError, match=match):
            sample(refused)
    averaging = built()
    averaging.compile(averaging.optimizer, "binary_crossentropy")
    with pytest.raises(ValueError, match="averages the log-likelihood of a row"):
        sample(lambda: averaging, chains=1)
    model = built()
    with pytest.raises(ValueError, match="should return a new model"):
        sample(lambda: model)
    with pytest.raises(ValueError, match="with `GradientNoise` leave out `vectorized=True`"):
        sample(built, callbacks=lambda number: [sg.callbacks.GradientNoise()])
    with pytest.raises(ValueError, match="needs `minibatches`"):
        sample(built, lambda seed: data)
    with pytest.raises(ValueError, match="`directory` is not available with `vectorized=True`"):
        sample(built, directory="somewhere")
