"""SGLD and pSGLD against closed forms: mean and covariance, T = 1 in XLA and 0.25 without."""

import numpy as np
import pytest
import stationary
from harness import assert_close, run

import keras_sgmcmc as sg

samplers = pytest.mark.parametrize("cls", [sg.SGLD, sg.pSGLD])
modes = pytest.mark.parametrize(("temperature", "jit"), [(1.0, True), (0.25, False)])


@samplers
@modes
def test_pure_noise(cls, temperature, jit):
    stationary.check_pure_noise(cls, temperature, jit)


@samplers
@pytest.mark.parametrize("step", [1e-1, 1e-3])
@pytest.mark.parametrize("train_size", [1, 10_000])
def test_noise_scales_with_step_and_train_size(cls, step, train_size):
    stationary.check_pure_noise(cls, step=step, train_size=train_size)


@samplers
@modes
def test_quadratic(cls, temperature, jit):
    stationary.check_quadratic(cls, temperature, jit)


@pytest.mark.parametrize("step_times_curvature", [0.1, 1.0])
def test_discretisation(step_times_curvature):
    stationary.check_quadratic(sg.SGLD, step_times_curvature=step_times_curvature)


@samplers
@modes
def test_prior_without_data(cls, temperature, jit):
    stationary.check_prior(cls, temperature, jit)


@pytest.mark.parametrize("train_size", [1, 1_000])
def test_prior_does_not_depend_on_train_size(train_size):
    stationary.check_prior(sg.SGLD, train_size=train_size)


@samplers
@modes
def test_linear_regression(cls, temperature, jit):
    stationary.check_regression(cls, temperature, jit)


def test_psgld_adapts_freezes_and_finds_scales_that_differ_by_100():
    """Standard deviations 1 and 100 (N = 1, full batch), preconditioner learned and then frozen."""
    columns = 5_000
    curvature = np.array([[1.0], [1e-4]], "float32")
    optimizer = sg.pSGLD(0.1, train_size=1, adaptation_steps=500, seed=2, epsilon=1e-5)
    start = np.random.default_rng(0).standard_normal((2, columns)) / np.sqrt(curvature)
    draws = run(
        optimizer,
        start.astype("float32"),
        lambda theta, _: curvature * theta,
        steps=12_000,
        keep_every=2_000,
    ).astype("float64")[1:]
    moments = optimizer._second_moments[0].numpy()
    H = 0.1 / (1e-5 + np.sqrt(moments))
    exact = 1 / (curvature * (1 - H * curvature / 2))
    ratios = (draws**2 / exact).mean(axis=0)
    error = ratios.std(axis=1, ddof=1) / np.sqrt(columns)
    assert_close(ratios.mean(axis=1), np.ones(2), error, "variance", largest_error=0.02)
    assert np.all(np.abs((draws**2).mean(axis=(0, 2)) * curvature[:, 0] - 1) < 0.1)
