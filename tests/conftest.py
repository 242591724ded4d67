import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("MPLBACKEND", "Agg")

import functools
import gc
import inspect

import pytest


def pytest_configure(config):
    # Workers wait for the process that hands them their tests, and itself runs none.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _set_up_tensorflow()


def _set_up_tensorflow():
    import keras
    import tensorflow as tf
    from tensorflow.python.framework import ops as graph_ops

    # Of two devices a strategy has two replicas.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    # Most of the time goes into thousands of graphs that run for a moment, for which Grappler and
    # short tracebacks cost more than they bring, as does a note of where each operation was made.
    # What runs in a process of its own (chains that go on) has them.
    if "extract_traceback" in inspect.signature(graph_ops._create_c_op).parameters:
        graph_ops._create_c_op = functools.partial(graph_ops._create_c_op, extract_traceback=False)
    keras.config.disable_traceback_filtering()
    tf.debugging.disable_traceback_filtering()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    # Freeing thousands of graphs takes minutes, a few gigabytes do no harm.
    gc.disable()


def pytest_sessionfinish():
    # At the end pytest and the interpreter collect whether enabled or not.
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed():
    import keras

    keras.utils.set_random_seed(1)


@pytest.fixture
def with_grappler():
    """For what is to be equal, bit for bit, to another process."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@pytest.fixture
def without_xla(monkeypatch):
    """For tests of something else than the arithmetic of the update: compiling it takes a second.

    The update stays a function of its own, that is traced and kept in the same way.
    """
    from keras_sgmcmc import compilation

    monkeypatch.setattr(compilation, "compiled", compilation.traced)


@pytest.fixture(scope="session")
def mirrored():
    """A strategy of two replicas: one, since two would give their reductions the same names."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
