import threading

import keras
import numpy as np
import pytest
from keras import layers

import keras_sgmcmc as sg

pytestmark = pytest.mark.usefixtures("without_xla")

ROWS = 60


def data():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 3)).astype("float32")
    y = (x @ np.ones((3, 1)) + 0.5 * rng.standard_normal((ROWS, 1))).astype("float32")
    return sg.minibatches(x, y, 20, seed=1, steps=500)


def build_model():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    sampler = sg.SGLD(5e-3, train_size=ROWS, prior=1.0, seed=5)
    model.compile(sampler, sg.GaussianNegativeLogLikelihood(0.5), steps_per_execution=100)
    return model


def test_chains_differ_and_agree(capsys):
    posterior = sg.sample_chains(
        build_model, data(), chains=2, burn_in=500, thinning=20, epochs=8, seed=3, verbose=2
    )
    np.testing.assert_array_equal(posterior.chain_ids, [0] * 175 + [1] * 175)
    kernel, bias = posterior.draws.values()
    one, other = kernel[:175], kernel[175:]
    # Neither starts, nor noise, nor batches are shared.
    assert abs(np.corrcoef(one[:, 0, 0], other[:, 0, 0])[0, 1]) < 0.3
    assert not np.any(np.all(one == other, axis=(1, 2)))
    assert np.all(np.abs(one.mean(0) - other.mean(0)) < 0.05)
    report = capsys.readouterr().out.splitlines()[-1]
    assert report.startswith("2 chains, 350 draws: R-hat at most 1.0")
    assert bias.shape == (350, 1)


def test_what_was_sampled_is_not_sampled_again(tmp_path):
    arguments = {"burn_in": 100, "thinning": 50, "seed": 3, "verbose": 0, "directory": tmp_path}
    first = sg.sample_chains(build_model, data(), chains=1, **arguments)
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.glob("chain-3/draw-*"))
    steps = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(int(self.model.optimizer.iterations))

    both = sg.sample_chains(
        build_model, data(), chains=2, callbacks=lambda k: [Count()], **arguments
    )
    assert steps == list(range(100, 501, 100))
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.glob("chain-3/draw-*")) == before
    assert len(both) == 16
    for ours, theirs in zip(both[:8].draws.values(), first.draws.values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_chains_at_a_time_are_those_that_run_one_by_one(tmp_path, capsys):
    arguments = {"chains": 3, "burn_in": 100, "thinning": 50, "seed": 3, "epochs": 2}
    alone = sg.sample_chains(build_model, data(), verbose=0, **arguments)
    devices = ["CPU:0", "CPU:0"]
    running, most = set(), []

    class Running(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            running.add(threading.get_ident())
            most.append(len(running))

        def on_train_end(self, logs=None):
            running.discard(threading.get_ident())

    together = sg.sample_chains(
        build_model, data(), devices=devices, callbacks=lambda k: [Running()], **arguments
    )
    assert max(most) == 2
    np.testing.assert_array_equal(together.chain_ids, alone.chain_ids)
    for ours, theirs in zip(together.draws.values(), alone.draws.values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    printed = capsys.readouterr().out
    assert "6/6" in printed
    assert "3 chains, 54 draws: R-hat at most" in printed


def test_an_error_in_one_chain_stops_all_and_leaves_what_was_drawn(tmp_path):
    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("no more")

    arguments = {"burn_in": 0, "thinning": 100, "seed": 3, "verbose": 0, "directory": tmp_path}
    with pytest.raises(RuntimeError, match="no more"):
        sg.sample_chains(
            build_model,
            data(),
            chains=3,
            epochs=10_000,
            devices=["CPU:0"] * 2,
            callbacks=lambda k: [Fail()] if k == 1 else [],
            **arguments,
        )
    assert len(sg.Posterior.load(tmp_path / "chain-4", build_model())) == 5


def test_refusals():
    model = build_model()
    arguments = {"burn_in": 10, "verbose": 0, "chains": 2}
    with pytest.raises(ValueError, match="should return a new model each time"):
        sg.sample_chains(lambda: model, data(), **arguments)
    with pytest.raises(ValueError, match=r"`devices` should be.*CPU:0.*Received: \['GPU:7'\]"):
        sg.sample_chains(build_model, data(), devices=["GPU:7"], **arguments)

    def unbuilt():
        model = keras.Sequential([layers.Dense(1)])
        model.compile(sg.SGLD(5e-3, train_size=ROWS), sg.GaussianNegativeLogLikelihood(0.5))
        return model

    with pytest.raises(ValueError, match="should return a built model"):
        sg.sample_chains(unbuilt, data(), devices=["CPU:0"] * 2, **arguments)
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    plain.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"compiled with a sampler.*Received: optimizer=.*SGD"):
        sg.sample_chains(lambda: plain, data(), **arguments)
