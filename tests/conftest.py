import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("MPLBACKEND", "Agg")

import gc

import keras
import pytest

from keras_sgmcmc import compilation

# Freeing thousands of graphs takes minutes, a few gigabytes do no harm.
gc.disable()


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(1)


@pytest.fixture
def without_xla(monkeypatch):
    """For tests of something else than the arithmetic of the update: compiling it takes a second.

    The update stays a function of its own, that is traced and kept in the same way.
    """
    monkeypatch.setattr(compilation, "compiled", compilation.traced)
