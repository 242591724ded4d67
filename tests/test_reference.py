"""HMC, NUTS and ADVI against exact posteriors, and what they refuse.

Monte Carlo means are held to 4 of their standard errors, which come from batch means. With the 20
to 40 numbers that a test compares, a right sampler fails one run in 500; the seeds are fixed.
"""

import warnings

import keras
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import tensorflow as tf
import tensorflow_probability as tfp

import keras_sgmcmc as sg
from keras_sgmcmc import reference
from keras_sgmcmc.reference import potential as potentials
from keras_sgmcmc.reference.potential import Potential
from tests import oracles

NOISE_STD, PRECISION = 0.5, 2.0


def linear_model(dimension, loss=None, optimizer="sgd", **options):
    model = keras.Sequential(
        [keras.Input((dimension,)), keras.layers.Dense(1, use_bias=False, **options)]
    )
    loss = sg.GaussianNegativeLogLikelihood(NOISE_STD) if loss is None else loss
    model.compile(optimizer=optimizer, loss=loss)
    return model


def linear_data(rows=60, dimension=3):
    """Correlated features of unlike scales."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, dimension))
    x[:, 1] += x[:, 0]
    x[:, 2] *= 5.0
    y = x @ np.array([1.0, -1.0, 0.3]) + NOISE_STD * rng.normal(size=rows)
    return x, y


def z_scores(values, expected, batches=25):
    """(mean - expected) / its standard error, and the error; values (chains, draws, K)."""
    chains, draws, size = values.shape
    means = values[:, : draws - draws % batches].reshape(chains * batches, -1, size).mean(1)
    error = means.std(0, ddof=1) / np.sqrt(len(means))
    return (means.mean(0) - expected) / error, error


def check_gaussian(chains, mean, covariance):
    """Mean and every entry of the whitened covariance; 4 errors see 5 % of a variance."""
    white = np.linalg.inv(np.linalg.cholesky(covariance))
    w = (chains - mean) @ white.T
    i, j = np.tril_indices(len(mean))
    scores, _ = z_scores(w, 0.0)
    assert np.all(np.abs(scores) < 4.0), scores
    scores, errors = z_scores(w[..., i] * w[..., j], np.eye(len(mean))[i, j])
    assert np.all(4.0 * errors < 0.05), errors
    assert np.all(np.abs(scores) < 4.0), scores


@pytest.mark.parametrize(
    ("method", "temperature", "draws"),
    [("nuts", 1.0, 8000), ("hmc", 0.5, 16000)],
)
def test_linear_regression_has_the_exact_posterior(method, temperature, draws):
    x, y = linear_data()
    model = linear_model(3)
    before = model.get_weights()
    options = {"temperature": temperature, "draws": draws, "warmup": 400, "seed": 5, "verbose": 0}
    posterior = getattr(reference, method)(model, x, y, prior=PRECISION, **options)
    mean, covariance = oracles.linear_posterior(x, y[:, None], NOISE_STD, PRECISION)
    (chains,) = posterior.chains.values()
    assert chains.shape == (4, draws, 3, 1)
    check_gaussian(chains[..., 0].astype("float64"), mean[:, 0], temperature * covariance)
    # It is a Posterior like any other.
    assert len(posterior) == 4 * draws
    assert posterior.steps[[0, draws - 1, draws]].tolist() == [1, draws, 1]
    assert np.array_equal(posterior.weights(draws)[0], chains[1, 0])
    part = posterior[::100]
    assert type(part) is sg.Posterior
    assert len(part) == 4 * draws // 100
    (values,) = part.draws.values()
    np.testing.assert_allclose(part.predict(x[:7], verbose=0), x[:7] @ values.mean(0), atol=1e-4)
    # Diagnostics.
    (ess,), (r_hat,) = posterior.ess().values(), posterior.r_hat().values()
    assert ess.shape == r_hat.shape == (3, 1)
    assert np.all(ess > 0.2 * len(posterior))
    assert np.all(np.abs(r_hat - 1.0) < 0.01)
    assert posterior.divergences.tolist() == [0] * 4
    assert np.all((posterior.acceptance > 0.6) & (posterior.acceptance < 0.99))
    assert np.all(posterior.gradients >= 4 * draws * (method == "hmc"))
    # A transition takes a gradient at least, and each of five windows looks for a step size.
    assert np.all(posterior.warmup_gradients >= 400 + 5 * (1 + 2 * 2))
    # The scales were learnt, and the model was left alone.
    (scale,) = posterior.scale.values()
    std = np.sqrt(temperature * np.diag(covariance))
    np.testing.assert_allclose(scale[:, 0], std, rtol=0.3)
    assert all(map(np.array_equal, before, model.get_weights()))


def test_a_student_prior_against_quadrature():
    # Two rows far from 0, so that the prior has a say and the posterior is skewed.
    x, y = np.full((2, 1), 0.5), np.array([2.0, 2.6])
    prior = tfp.distributions.StudentT(3.0, 0.0, 0.3)
    model = linear_model(1, sg.GaussianNegativeLogLikelihood(1.0))
    posterior = reference.hmc(
        model, x, y, prior=sg.DistributionPrior(prior), draws=16000, warmup=400, seed=1, verbose=0
    )

    def density(theta):
        residual = y - 0.5 * theta
        return np.exp(-0.5 * residual @ residual) * scipy.stats.t.pdf(theta / 0.3, 3)

    moments = [
        scipy.integrate.quad(lambda t, k=k: t**k * density(t), -30, 30, points=[0, 5], limit=200)[0]
        for k in range(3)
    ]
    mean = moments[1] / moments[0]
    variance = moments[2] / moments[0] - mean**2
    (chains,) = posterior.chains.values()
    values = chains[..., 0].astype("float64")
    scores, _ = z_scores(values, mean)
    assert abs(scores[0]) < 4.0
    scores, errors = z_scores((values - mean) ** 2, variance)
    assert 4.0 * errors[0] < 0.25 * variance
    assert abs(scores[0]) < 4.0


def test_hmc_and_nuts_agree_on_logistic_regression():
    rng = np.random.default_rng(7)
    x = rng.normal(size=(80, 2)).astype("float32")
    y = (x @ [1.5, -1.0] + 0.5 + rng.logistic(size=80) > 0).astype("int32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    # With no argument the prior is that of the compiled sampler.
    model.compile(optimizer=sg.SGLD(1e-2, train_size=80, prior=1.0), loss=loss)
    means, errors = [], []
    for method, draws in ((reference.hmc, 3000), (reference.nuts, 2000)):
        posterior = method(model, x, y, draws=draws, warmup=300, seed=2, verbose=0)
        theta = np.concatenate(
            [a.reshape(4, draws, -1) for a in posterior.chains.values()], axis=-1
        ).astype("float64")
        i, j = np.tril_indices(3)
        values = np.concatenate([theta, theta[..., i] * theta[..., j]], axis=-1)
        means.append(values.mean((0, 1)))
        errors.append(z_scores(values, 0.0)[1])
    scores = (means[0] - means[1]) / np.hypot(*errors)
    assert np.all(np.abs(scores) < 4.0), scores
    assert np.all(errors[0][:3] < 0.025)


def test_advi_has_the_mean_and_the_mean_field_variances_of_a_gaussian():
    x, y = linear_data()
    model = linear_model(3)
    before = model.get_weights()
    posterior = reference.advi(model, x, y, prior=PRECISION, draws=4000, seed=3, verbose=0)
    mean, covariance = oracles.linear_posterior(x, y[:, None], NOISE_STD, PRECISION)
    expected = 1.0 / np.diag(np.linalg.inv(covariance))
    # Mean-field is far off the marginal variances here, so the two can be told apart.
    assert expected[0] < 0.7 * covariance[0, 0]
    ((name, fitted),), (std,) = posterior.mean.items(), posterior.std.values()
    assert np.all(np.abs(fitted - mean) < 0.02 * np.sqrt(expected)[:, None])
    np.testing.assert_allclose(std[:, 0] ** 2, expected, rtol=0.04)
    # The draws are of that Gaussian: 4 standard errors of a mean and of a variance.
    draws = posterior.draws[name][..., 0]
    assert np.all(np.abs(draws.mean(0) - fitted[:, 0]) < 4.0 * std[:, 0] / np.sqrt(4000))
    np.testing.assert_allclose(draws.var(0), std[:, 0] ** 2, rtol=4.0 * np.sqrt(2 / 4000))
    # The bound is below the log evidence by KL(q || posterior).
    marginal = NOISE_STD**2 * np.eye(len(x)) + x @ x.T / PRECISION
    evidence = scipy.stats.multivariate_normal.logpdf(y, cov=marginal)
    divergence = 0.5 * (np.linalg.slogdet(covariance)[1] - np.log(expected).sum())
    assert posterior.elbo.shape == (5000,)
    tail = posterior.elbo[-1000:].astype("float64")
    error = 4.0 * tail.std() / np.sqrt(len(tail))
    assert error < 0.3 * divergence
    assert abs(tail.mean() - evidence + divergence) < error + 0.01
    assert all(map(np.array_equal, before, model.get_weights()))


@pytest.mark.parametrize("method", ["hmc", "advi"])
def test_seeds_reproduce_bit_for_bit(method, monkeypatch):
    x, y = linear_data(20)
    model = linear_model(3)
    options = {"draws": 12, "jit_compile": False, "verbose": 0}
    if method == "advi":
        options["steps"] = 120
    else:
        options.update(warmup=12, chains=2, leapfrog_steps=3)

    def run(seed):
        (draws,) = getattr(reference, method)(model, x, y, seed=seed, **options).draws.values()
        return draws

    with warnings.catch_warnings():
        # So short a run says nothing.
        warnings.filterwarnings("ignore", "The chains disagree|.* diverged")
        one = run(1)
        # How many transitions a call makes follows the clock, and must not matter.
        monkeypatch.setattr(reference.markov_chains, "_SECONDS", 1e-9)
        assert np.array_equal(one, run(1))
        assert not np.isclose(one, run(2)).any()


# The potential.


def log_prob(potential, *vectors):
    return potential.log_prob(tf.constant(np.stack(vectors), potential.dtype), potential.data)


def test_the_potential_is_that_of_the_samplers():
    x, y = linear_data(10)
    weight = np.linspace(0.5, 2.0, 10)
    model = linear_model(3, kernel_regularizer=keras.regularizers.L2(0.01))
    theta = np.array([[0.3, -0.7, 0.2], [1.0, 0.1, -0.5]])
    potential = Potential(model, x, y, weight, 2.0, temperature=0.5)
    expected = [
        np.sum(weight * scipy.stats.norm.logpdf(y, x @ t, NOISE_STD))
        - 10 * 0.01 * t @ t
        + np.sum(scipy.stats.norm.logpdf(t, scale=1 / np.sqrt(2.0)))
        for t in theta
    ]
    with tf.GradientTape() as tape:
        vectors = tf.constant(theta, "float32")
        tape.watch(vectors)
        values = potential.log_prob(vectors, potential.data)
    np.testing.assert_allclose(values, 2.0 * np.array(expected), rtol=1e-5)
    gradient = x.T @ (weight[:, None] * (y[:, None] - x @ theta.T)) / NOISE_STD**2
    gradient = 2.0 * (gradient.T - (2.0 + 0.2) * theta)
    np.testing.assert_allclose(tape.gradient(values, vectors), gradient, rtol=1e-4)


def test_priors_are_those_of_the_optimizers():
    x, y = linear_data(10)
    theta = np.array([0.3, -0.7, 0.2])

    def prior_part(prior, model):
        flat = Potential(model, x, y, None, None, 1.0)
        with_prior = Potential(model, x, y, None, prior, 1.0)
        return float((log_prob(with_prior, theta) - log_prob(flat, theta))[0])

    def gaussian(precision):
        return scipy.stats.norm.logpdf(theta, scale=precision**-0.5).sum()

    plain = linear_model(3)
    sampler = sg.SGLD(1e-2, train_size=10, prior=3.0)
    model = linear_model(3, optimizer=sampler)
    laplace = scipy.stats.laplace.logpdf(theta, scale=0.4).sum()
    cases = [
        (3.0, plain, gaussian(3.0)),
        (sg.GaussianPrior(groups={"kernel": 5.0}), plain, gaussian(5.0)),
        (sg.GaussianPrior(groups={"kernel": None}), plain, 0.0),
        (sg.DistributionPrior(tfp.distributions.Laplace(0.0, 0.4)), plain, laplace),
        ("optimizer", plain, 0.0),
        ("optimizer", model, gaussian(3.0)),
    ]
    for prior, owner, expected in cases:
        assert prior_part(prior, owner) == pytest.approx(expected, abs=2e-4)
    sampler.build(model.trainable_variables)
    sampler.prior_precision["all"].assign(7.0)
    assert prior_part("optimizer", model) == pytest.approx(gaussian(7.0), abs=2e-4)


def test_networks_run_in_inference_mode_and_keep_their_state():
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, "tanh", activity_regularizer=keras.regularizers.L2(0.1))(inputs)
    hidden = keras.layers.BatchNormalization()(keras.layers.Dropout(0.5)(hidden))
    frozen = keras.layers.Dense(2, trainable=False)
    model = keras.Model(inputs, [keras.layers.Dense(1)(hidden), frozen(hidden)])
    loss = sg.GaussianNegativeLogLikelihood(1.0)
    model.compile(loss=[loss, loss])
    x, y = linear_data(16)
    targets = [y, np.zeros((16, 2))]
    before = [v.numpy() for v in model.variables]
    potential = Potential(model, x, targets, None, None, 1.0)
    expected = -16 * model.evaluate(x, targets, batch_size=16, verbose=0, return_dict=True)["loss"]
    assert float(log_prob(potential, potential.start)[0]) == pytest.approx(expected, rel=1e-5)
    posterior = reference.advi(model, x, targets, steps=3, draws=2, jit_compile=False, verbose=0)
    assert posterior.variables == model.trainable_variables
    after = [v.numpy() for v in model.variables]
    assert all(map(np.array_equal, before, after))
    assert [a.shape for a in posterior.predict(x, verbose=0)] == [(16, 1), (16, 2)]


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:.* diverged")
def test_float64_models_stay_in_float64():
    x, y = linear_data(10)
    model = linear_model(3, dtype="float64")
    potential = Potential(model, x, y, None, 2.0, 1.0)
    theta = np.array([0.3, -0.7, 0.2])
    expected = scipy.stats.norm.logpdf(y, x @ theta, NOISE_STD).sum()
    expected += scipy.stats.norm.logpdf(theta, scale=2.0**-0.5).sum()
    assert float(log_prob(potential, theta)[0]) == pytest.approx(expected, rel=1e-13)
    options = {"draws": 3, "seed": 1, "verbose": 0, "jit_compile": False}

    def nuts():
        options_of_chains = {"warmup": 12, "chains": 1, "max_tree_depth": 2}
        (draws,) = reference.nuts(model, x, y, **options_of_chains, **options).draws.values()
        return draws

    draws = nuts()
    assert draws.dtype == np.float64
    assert np.array_equal(draws, nuts())
    (draws,) = reference.advi(model, x, y, steps=3, **options).draws.values()
    assert draws.dtype == np.float64


def test_models_that_xla_cannot_compile_go_on_without(caplog):
    def identity(values):
        moved = tf.numpy_function(lambda v: v, [values], values.dtype)
        return values + tf.stop_gradient(tf.ensure_shape(moved, values.shape) - values)

    x, y = linear_data(10)
    layers = [keras.Input((3,)), keras.layers.Dense(1), keras.layers.Lambda(identity)]
    model = keras.Sequential(layers)
    model.compile(loss=sg.GaussianNegativeLogLikelihood(1.0))
    posterior = reference.advi(model, x, y, steps=3, draws=2, verbose=0)
    assert len(posterior) == 2
    assert "XLA can't compile this model" in caplog.text


def test_datasets_and_starting_points():
    x, y = linear_data(10)
    model = linear_model(3)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    potential = Potential(model, dataset, None, None, None, 1.0)
    assert potential.train_size == 10
    arrays = Potential(model, x, y, None, None, 1.0)
    assert np.array_equal(log_prob(potential, potential.start), log_prob(arrays, potential.start))
    start = [[np.full((3, 1), c)] for c in (1.0, 2.0)]
    vectors = reference.markov_chains._starting_points(potential, start, 2, seed=1)
    assert np.array_equal(vectors, [[1.0] * 3, [2.0] * 3])
    with pytest.raises(ValueError, match="`start` needs, for each of 3 chains"):
        reference.hmc(model, x, y, chains=3, start=start)


def test_divergences_and_disagreeing_chains_are_reported():
    model = linear_model(3)
    posterior = reference.ChainsPosterior(
        model,
        model.trainable_variables,
        [[np.full((3, 1), c)] for c in range(8)],
        steps=range(8),
        chain_ids=[0] * 4 + [1] * 4,
    )
    posterior.divergences = np.array([0, 3])
    with pytest.warns(UserWarning, match="3 of 8 transitions diverged"):
        reference.markov_chains._report(posterior, 3)
    posterior.divergences[:] = 0
    with pytest.warns(UserWarning, match="largest R-hat of a weight is"):
        reference.markov_chains._report(posterior, 4)


def test_r_hat_by_hand():
    rng = np.random.default_rng(1)
    values = rng.normal(size=(2, 10)) + np.array([[0.0], [1.0]])
    halves = values.reshape(4, 5)
    within = np.mean([np.var(h, ddof=1) for h in halves])
    between = 5 * np.var([np.mean(h) for h in halves], ddof=1)
    expected = np.sqrt((4 / 5 * within + between / 5) / within)
    assert reference.markov_chains._r_hat(values) == pytest.approx(expected)


# What is refused.


def test_models_that_have_no_posterior_are_refused(monkeypatch):
    x, y = linear_data(10)
    model = linear_model(3)
    with pytest.raises(ValueError, match="not compiled with a loss"):
        reference.hmc(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), x, y)
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile(loss="mse")
    with pytest.raises(ValueError, match="is not built"):
        reference.nuts(unbuilt, x, y)
    for policy in ("float16", "mixed_float16", "bfloat16"):
        half = linear_model(3, dtype=policy)
        with pytest.raises(ValueError, match="too coarse for the energies"):
            reference.advi(half, x, y)
    frozen = linear_model(3, trainable=False)
    with pytest.raises(ValueError, match="no trainable weights"):
        reference.hmc(frozen, x, y)
    with pytest.raises(ValueError, match="mean of the loss over the rows"):
        reference.hmc(linear_model(3, keras.losses.MeanSquaredError(reduction="sum")), x, y)
    with pytest.raises(ValueError, match="Targets are needed"):
        reference.hmc(model, x)
    with pytest.raises(ValueError, match="The loss is nan"):
        reference.hmc(model, x, np.full(10, np.nan))
    with pytest.raises(ValueError, match=r"need .* GiB, more than 4 GiB.*fewer `draws`, `warmup`"):
        reference.hmc(model, x, y, draws=10**9)
    monkeypatch.setattr(potentials, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="The data take"):
        reference.hmc(model, x, y)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("hmc", {"temperature": 0.0}, "`temperature` should be a positive number"),
        ("hmc", {"leapfrog_steps": 0}, "`leapfrog_steps` should be an integer >= 1"),
        ("hmc", {"prior": "gaussian"}, "`prior` should be a positive number"),
        ("hmc", {"prior": sg.priors.Prior()}, "need the log density of the prior"),
        ("hmc", {"jit_compile": "always"}, "`jit_compile` should be 'auto', True or False"),
        ("nuts", {"target_accept": 1.0}, "`target_accept` should be a positive number and < 1"),
        ("nuts", {"draws": 0}, "`draws` should be an integer >= 1"),
        ("nuts", {"seed": -1}, "`seed` should be an integer"),
        ("advi", {"monte_carlo_samples": 3}, "`monte_carlo_samples` should be even"),
        ("advi", {"learning_rate": 0}, "`learning_rate` should be a positive number"),
    ],
)
def test_arguments_out_of_range_are_refused(method, options, message):
    x, y = linear_data(10)
    with pytest.raises(ValueError, match=message):
        getattr(reference, method)(linear_model(3), x, y, **options)


def test_scales_that_do_not_fit_are_warned_of():
    x, y = linear_data(10)
    model = linear_model(3, optimizer=sg.SGLD(1e-2, train_size=50))
    with pytest.warns(UserWarning, match="not the 10 rows given here"):
        Potential(model, x, y, None, None, 1.0)
    with pytest.warns(UserWarning, match="is rounded to about"):
        Potential(linear_model(3), x, 1e5 * y, None, None, 1.0)
    with pytest.warns(UserWarning, match="means Gaussian noise of variance 0.5"):
        Potential(linear_model(3, "mse"), x, y, None, None, 1.0)
    constrained = linear_model(3, kernel_constraint="non_neg")
    with pytest.warns(UserWarning, match=r"constraints of .* are ignored"):
        Potential(constrained, x, y, None, None, 1.0)
