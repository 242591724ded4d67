"""Priors: groups, gradients against densities, immutability, serialization."""

import json

import fresh
import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
import tensorflow_probability as tfp

import keras_sgmcmc as sg

tfd = tfp.distributions
PATHS = ["model/hidden/kernel", "model/hidden/bias", "model/out/kernel", "model/out/bias"]


def test_one_precision_for_all():
    groups = sg.GaussianPrior(3).groups_of(PATHS)
    assert groups.names == ["all"] * 4
    assert groups.precisions == {"all": 3.0}


def test_one_precision_a_layer():
    groups = sg.GaussianPrior(3.0, groups="layer").groups_of(PATHS)
    assert groups.names == ["hidden", "hidden", "out", "out"]
    assert groups.precisions == {"hidden": 3.0, "out": 3.0}
    # Keras drops the model's name when it loads a model.
    assert (
        sg.GaussianPrior(groups="layer")
        .groups_of(["hidden/kernel", "hidden/bias", "out/kernel", "out/bias"])
        .names
        == groups.names
    )


def test_patterns_in_order_and_flat_groups():
    prior = sg.GaussianPrior(groups={"hidden/kernel": 10.0, "kernel": 2, "bias$": None})
    groups = prior.groups_of(PATHS)
    assert groups.names == ["hidden/kernel", None, "kernel", None]
    assert groups.precisions == {"hidden/kernel": 10.0, "kernel": 2.0}


def test_unused_patterns_and_unmatched_variables_are_errors():
    with pytest.raises(ValueError, match=r"No pattern of `groups` matches \['model/hidden/bias'"):
        sg.GaussianPrior(groups={"kernel": 1.0}).groups_of(PATHS)
    with pytest.raises(ValueError, match=r"patterns \['gamma'\] of `groups` match no variable"):
        sg.GaussianPrior(groups={"kernel|bias": 1.0, "gamma": 1.0}).groups_of(PATHS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": 0.0}, "`precision` should be a positive number"),
        ({"precision": "1"}, "`precision` should be a positive number"),
        ({"groups": "kernel"}, "`groups` should be None, 'layer', or a dict"),
        ({"groups": {}}, "`groups` should be None, 'layer', or a dict"),
        ({"groups": {"kernel": -1.0}}, r"groups\['kernel'\].*positive number"),
        ({"groups": {"(": 1.0}}, "no regular expression"),
        ({"groups": {1: 1.0}}, "should map strings"),
    ],
)
def test_bad_gaussian_priors_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sg.GaussianPrior(**arguments)


def test_priors_are_immutable_descriptions():
    prior = sg.GaussianPrior(groups={"kernel": 1.0, "bias": 2.0})
    with pytest.raises(AttributeError):
        prior.precision = 2.0
    with pytest.raises(TypeError):
        prior.groups["kernel"] = 2.0
    optimizer = sg.SGLD(train_size=10, prior=prior)
    optimizer.build(network().trainable_variables)
    optimizer.prior_precision["kernel"].assign(5.0)
    assert prior.groups["kernel"] == 1.0
    assert optimizer.get_config()["prior"]["config"]["groups"]["kernel"] == 1.0


def network():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="hidden")])


def test_precisions_are_variables_of_the_optimizer():
    optimizer = sg.SGLD(train_size=10, prior=sg.GaussianPrior(2.0, groups="layer"))
    with pytest.raises(ValueError, match="once the optimizer is built"):
        _ = optimizer.prior_precision
    optimizer.build(network().trainable_variables)
    ((name, variable),) = optimizer.prior_precision.items()
    assert name == "hidden"
    assert any(variable is v for v in optimizer.variables)
    assert sg.SGLD(train_size=10).prior_precision == {}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("distribution", "reference"),
    [
        (tfd.Normal(0.5, 2.0), scipy.stats.norm(0.5, 2.0)),
        (tfd.StudentT(3.0, 0.0, 1.5), scipy.stats.t(3.0, 0.0, 1.5)),
        (tfd.Laplace(0.0, 0.5), scipy.stats.laplace(0.0, 0.5)),
        (tfd.Cauchy(0.0, 2.0), scipy.stats.cauchy(0.0, 2.0)),
    ],
    ids=["Normal", "StudentT", "Laplace", "Cauchy"],
)
def test_gradient_is_that_of_the_density(distribution, reference, dtype):
    values = np.array([[-2.0, -0.3, 0.2], [0.7, 1.5, 3.0]])
    h = 1e-5
    expected = -(reference.logpdf(values + h) - reference.logpdf(values - h)) / (2 * h)
    got = sg.DistributionPrior(distribution).gradient(tf.constant(values, dtype), None)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, expected, rtol=1e-4)


@pytest.mark.parametrize("jit", [True, False])
def test_a_distribution_prior_is_sampled(jit):
    """No data: the law of a weight is the Student-t prior, by its quantiles."""
    columns = 8_000
    variable = keras.Variable(np.random.default_rng(0).standard_t(5, columns).astype("float32"))
    prior = sg.DistributionPrior(tfd.StudentT(5.0, 0.0, 1.0))
    optimizer = sg.SGLD(0.05, train_size=1, prior=prior, seed=2)

    @tf.function(jit_compile=jit)
    def block():
        for _ in tf.range(100):
            optimizer.apply([tf.zeros(columns)], [variable])

    optimizer.build([variable])
    for _ in range(3):
        block()
    # Kolmogorov-Smirnov at 8,000 independent chains: the discretisation moves it by less.
    assert scipy.stats.kstest(variable.numpy(), scipy.stats.t(5).cdf).pvalue > 1e-3


DISTRIBUTIONS = [
    tfd.Normal(0, 1),
    tfd.StudentT(3.0, 0.0, 1.0),
    tfd.Laplace(0.0, 0.5),
    tfd.Horseshoe(1.0),
    tfd.Independent(tfd.Normal(np.zeros(3, "float32"), 1.0), 1),
    tfd.MixtureSameFamily(tfd.Categorical(probs=[0.3, 0.7]), tfd.Normal([0.0, 1.0], [1.0, 2.0])),
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: d.name)
def test_distributions_are_serialised_by_class_and_parameters(distribution):
    prior = sg.DistributionPrior(distribution)
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(prior)))
    again = keras.saving.deserialize_keras_object(config)
    assert again == prior
    value = tf.constant(np.linspace(-2, 2, 6).reshape(2, 3), "float32")
    np.testing.assert_allclose(again.gradient(value, None), prior.gradient(value, None), rtol=1e-6)


@keras.saving.register_keras_serializable(package="test_priors")
def log_normal():
    return tfd.TransformedDistribution(tfd.Normal(0.0, 1.0), tfp.bijectors.Exp())


def test_what_cannot_be_saved_is_refused_with_the_remedy():
    for distribution, message in (
        (log_normal(), "`bijector` of TransformedDistribution can't be saved.*register_keras"),
        (tfd.Normal(tf.Variable(0.0), 1.0), "`loc` of Normal is a variable.*register_keras"),
        (lambda: tfd.Normal(0.0, 1.0), "isn't registered.*register_keras"),
        (3.0, "should be a TensorFlow Probability distribution"),
        (lambda: 3.0, "should be a TensorFlow Probability distribution"),
    ):
        with pytest.raises(ValueError, match=message):
            sg.DistributionPrior(distribution)


def test_registered_functions_are_saved_by_name():
    prior = sg.DistributionPrior(log_normal)
    config = keras.saving.serialize_keras_object(prior)
    again = keras.saving.deserialize_keras_object(config)
    assert again == prior
    value = tf.constant([0.5, 2.0])
    np.testing.assert_allclose(again.gradient(value, None), prior.gradient(value, None))
    config["config"]["distribution"]["registered_function"] = "elsewhere>prior"
    with pytest.raises(ValueError, match="Import the module that registers it"):
        keras.saving.deserialize_keras_object(config)


LOAD = """
import sys
import keras
import keras_sgmcmc
model = keras.saving.load_model(sys.argv[1])
print(model.optimizer.prior)
"""


def test_priors_load_in_a_fresh_process_in_safe_mode(tmp_path):
    model = network()
    prior = sg.DistributionPrior(tfd.StudentT(3.0, 0.0, 1.0))
    model.compile(optimizer=sg.SGLD(train_size=10, prior=prior), loss="mse")
    model.save(tmp_path / "model.keras")
    assert "StudentT" in fresh.run(LOAD, tmp_path / "model.keras")
