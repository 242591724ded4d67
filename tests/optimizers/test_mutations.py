"""The oracles see every fault that they are there for: each mutation must fail one of them."""

import pytest
import stationary
from keras import ops

import keras_sgmcmc as sg


def mutated(cls, **methods):
    return type(f"Mutated{cls.__name__}", (cls,), methods)


def scaled_noise(factor):
    def mutate(cls):
        def noise_variance(self, index, preconditioner):
            return factor * super(cls, self).noise_variance(index, preconditioner)

        return mutated(cls, noise_variance=noise_variance)

    return mutate


def no_root(cls):
    def noise_variance(self, index, preconditioner):
        # The step takes the root of Q: squaring it first is what a forgotten root does.
        return ops.square(super(cls, self).noise_variance(index, preconditioner))

    return mutated(cls, noise_variance=noise_variance)


def noise_without_train_size(cls):
    def noise_variance(self, index, preconditioner):
        variance = super(cls, self).noise_variance(index, preconditioner)
        return variance * self.train_size

    return mutated(cls, noise_variance=noise_variance)


def noise_without_temperature(cls):
    def noise_variance(self, index, preconditioner):
        return 2.0 * preconditioner / self.train_size

    return mutated(cls, noise_variance=noise_variance)


def no_prior(cls):
    return mutated(cls, _prior_gradient=lambda self, index, variable: None)


def prior_without_train_size(cls):
    def prior_gradient(self, index, variable):
        return super(cls, self)._prior_gradient(index, variable) * self.train_size

    return mutated(cls, _prior_gradient=prior_gradient)


def noise_not_preconditioned(cls):
    def noise_variance(self, index, preconditioner):
        del preconditioner
        return 2.0 * self._temperature * self.learning_rate / self.train_size

    return mutated(cls, noise_variance=noise_variance)


@pytest.mark.parametrize("cls", [sg.SGLD, sg.pSGLD])
@pytest.mark.parametrize(
    "mutate",
    [
        *(pytest.param(scaled_noise(f), id=f"noise*{f}") for f in (0.0, 0.5, 0.95, 1.05, 2.0)),
        no_root,
        noise_without_train_size,
    ],
)
@pytest.mark.parametrize("check", [stationary.check_pure_noise, stationary.check_quadratic])
def test_wrong_noise_is_seen(cls, mutate, check):
    with pytest.raises(AssertionError, match="variance"):
        check(mutate(cls))


@pytest.mark.parametrize("check", [stationary.check_pure_noise, stationary.check_quadratic])
def test_forgotten_temperature_is_seen(check):
    with pytest.raises(AssertionError, match="variance"):
        check(noise_without_temperature(sg.SGLD), temperature=0.25)


@pytest.mark.parametrize("check", [stationary.check_pure_noise, stationary.check_quadratic])
def test_noise_without_the_preconditioner_is_seen(check):
    with pytest.raises(AssertionError, match="variance"):
        check(noise_not_preconditioned(sg.pSGLD))


@pytest.mark.parametrize("mutate", [no_prior, prior_without_train_size])
@pytest.mark.parametrize("cls", [sg.SGLD, sg.pSGLD])
def test_wrong_prior_is_seen(cls, mutate):
    with pytest.raises(AssertionError, match="variance"):
        stationary.check_prior(mutate(cls))


@pytest.mark.parametrize("cls", [sg.SGLD, sg.pSGLD])
def test_halved_noise_is_seen_by_the_regression(cls):
    with pytest.raises(AssertionError):
        stationary.check_regression(scaled_noise(0.5)(cls))
