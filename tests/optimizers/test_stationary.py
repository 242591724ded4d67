"""SGLD and pSGLD against closed forms: mean and covariance, T = 1 and 0.25, jit and not."""

import pytest
import stationary

import keras_sgmcmc as sg

samplers = pytest.mark.parametrize("cls", [sg.SGLD, sg.pSGLD])
temperatures = pytest.mark.parametrize("temperature", [1.0, 0.25])
modes = pytest.mark.parametrize("jit", [True, False], ids=["jit", "graph"])


@samplers
@temperatures
@modes
def test_pure_noise(cls, temperature, jit):
    stationary.check_pure_noise(cls, temperature, jit)


@samplers
@pytest.mark.parametrize("step", [1e-1, 1e-3])
@pytest.mark.parametrize("train_size", [1, 10_000])
def test_noise_scales_with_step_and_train_size(cls, step, train_size):
    stationary.check_pure_noise(cls, step=step, train_size=train_size)


@samplers
@temperatures
@modes
def test_quadratic(cls, temperature, jit):
    stationary.check_quadratic(cls, temperature, jit)


@pytest.mark.parametrize("step_times_curvature", [0.1, 1.0])
def test_discretisation(step_times_curvature):
    stationary.check_quadratic(sg.SGLD, step_times_curvature=step_times_curvature)


@samplers
@temperatures
@modes
def test_prior_without_data(cls, temperature, jit):
    stationary.check_prior(cls, temperature, jit)


@pytest.mark.parametrize("train_size", [1, 1_000])
def test_prior_does_not_depend_on_train_size(train_size):
    stationary.check_prior(sg.SGLD, train_size=train_size)


@samplers
@temperatures
@modes
def test_linear_regression(cls, temperature, jit):
    stationary.check_regression(cls, temperature, jit)
