import errno
import json
import pathlib
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import safetensors.numpy
from keras import layers

import keras_sgmcmc as sg
from keras_sgmcmc import storage

pytestmark = pytest.mark.usefixtures("without_xla")

ROWS, BATCH = 60, 6
TOOLS = pathlib.Path(__file__).resolve().parent.parent / "tools"


def data(**arguments):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 3)).astype("float32")
    y = (x @ np.ones((3, 1)) + 0.3 * rng.standard_normal((ROWS, 1))).astype("float32")
    return sg.minibatches(x, y, BATCH, **{"seed": 1, "steps": 10, **arguments})


def make(seed=1, rate=1e-3, units=4, optimizer=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(units), layers.BatchNormalization(), layers.Dense(1)]
    )
    optimizer = optimizer or sg.SGLD(rate, train_size=ROWS, prior=1.0, seed=seed)
    model.compile(optimizer, sg.GaussianNegativeLogLikelihood(0.5))
    return model


def fit(model, *callbacks, epochs=3, **arguments):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(`shuffle=True`|short for windows|tr\\(A)")
        return model.fit(data(), callbacks=list(callbacks), epochs=epochs, verbose=0, **arguments)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A directory of two chains of five draws, and the first of them in memory."""
    directory = tmp_path_factory.mktemp("draws")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keras_sgmcmc.compilation.compiled", lambda function: function)
        for seed in (10, 9):
            fit(make(seed), sg.callbacks.PosteriorSamples(5, thinning=5, directory=directory))
        memory = sg.callbacks.PosteriorSamples(5, thinning=5)
        fit(make(9), memory)
    return directory, memory.posterior


@pytest.fixture
def copied(stored, tmp_path):
    """The chain of seed 9 alone, to be spoilt."""
    import shutil

    shutil.copytree(stored[0] / "chain-9", tmp_path / "chain-9")
    return tmp_path / "chain-9"


def assert_same_draws(ours, theirs):
    for one, other in zip(ours.draws.values(), theirs.draws.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(ours.steps, theirs.steps)


def test_draws_on_disk_are_those_in_memory(stored):
    directory, memory = stored
    loaded = sg.Posterior.load(directory / "chain-9")
    assert_same_draws(loaded, memory)
    x = np.random.default_rng(1).standard_normal((7, 3)).astype("float32")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), memory.predict(x, verbose=0))
    assert all(isinstance(draw, storage.StoredDraw) for draw in loaded._draws)
    both = sg.Posterior.load(directory)
    np.testing.assert_array_equal(both.chain_ids, [0] * 5 + [1] * 5)
    assert_same_draws(both[:5], memory)
    np.testing.assert_array_equal(both[7].copy()[0], both.weights(7)[0])


def test_draws_are_read_without_this_library(stored):
    directory, memory = stored
    files = sorted((directory / "chain-9").glob("draw-*"))
    arrays = safetensors.numpy.load_file(files[1])
    assert set(arrays) == {
        entry["name"] for entry in storage.read_manifest(files[0].parent)["variables"]
    }
    manifest = json.loads((directory / "chain-9" / "manifest.json").read_text())
    assert [entry["step"] for entry in manifest["draws"]] == list(memory.steps)
    assert manifest["optimizer"]["class_name"] == "SGLD"
    assert {"keras", "keras_sgmcmc", "tensorflow"} <= set(manifest["versions"])
    for entry, expected in zip(manifest["variables"], memory.weights(1), strict=False):
        if entry["position"] == 0:
            np.testing.assert_array_equal(arrays[entry["name"]], expected)


def test_damaged_and_missing_draws_are_left_out(copied):
    files = sorted(copied.glob("draw-*"))
    files[0].write_bytes(files[0].read_bytes()[:-8])  # cut off
    files[1].unlink()
    spoilt = bytearray(files[2].read_bytes())
    spoilt[-5] ^= 1
    files[2].write_bytes(spoilt)
    with pytest.warns(UserWarning, match="the 3 others are read") as caught:
        loaded = sg.Posterior.load(copied)
    messages = [str(w.message) for w in caught]
    assert any("1 draws" in m and "damaged" in m and files[0].name in m for m in messages)
    assert any("missing" in m and files[1].name in m for m in messages)
    assert list(loaded.steps) == [20, 25, 30]
    with pytest.raises(storage.StorageError, match=r"step 20 is damaged.*verify=True"):
        loaded.predict(np.zeros((1, 3)), verbose=0)
    with pytest.warns(UserWarning, match="2 draws .* are damaged"):
        verified = sg.Posterior.load(copied, verify=True)
    assert list(verified.steps) == [25, 30]
    assert np.all(np.isfinite(verified.predict(np.zeros((1, 3)), verbose=0)))


def test_what_can_not_be_read_is_told(copied, tmp_path):
    with pytest.raises(OSError, match="There are no draws in"):
        sg.Posterior.load(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"of another model: they hold .*dense.*where `model` has"):
        sg.Posterior.load(copied, make(units=5))
    manifest = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(OSError, match=r"format 99.*Update"):
        sg.Posterior.load(copied)
    (copied / "manifest.json").write_text("{")
    with pytest.raises(OSError, match=r"manifest.json can't be read.*safetensors"):
        sg.Posterior.load(copied)


def test_save_and_load(stored, tmp_path):
    memory = stored[1]
    weighted = sg.Posterior(
        memory.model,
        memory.variables,
        list(memory._draws),
        memory.steps,
        weights=np.arange(1.0, 6.0),
        chain_ids=[0, 0, 1, 1, 1],
    )
    weighted.save(tmp_path / "saved")
    loaded = sg.Posterior.load(tmp_path / "saved", memory.model)
    assert_same_draws(loaded, weighted)
    np.testing.assert_array_equal(loaded.draw_weights, weighted.draw_weights)
    np.testing.assert_array_equal(loaded.chain_ids, weighted.chain_ids)
    with pytest.raises(OSError, match="holds draws already"):
        weighted.save(tmp_path / "saved")


def test_models_that_can_not_be_written_down_are_passed(tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    likelihood = sg.NegativeLogLikelihood(lambda f: None)
    model.compile(sg.SGLD(1e-3, train_size=ROWS, seed=1), likelihood)
    posterior = sg.Posterior(model, model.trainable_variables, [model.get_weights()], [1])
    with pytest.warns(UserWarning, match="will need it"):
        posterior.save(tmp_path / "draws")
    with pytest.raises(ValueError, match=r"pass it, `Posterior.load\(directory, model\)`"):
        sg.Posterior.load(tmp_path / "draws")
    assert_same_draws(sg.Posterior.load(tmp_path / "draws", model), posterior)


def test_a_full_disk_keeps_what_is_whole(tmp_path, monkeypatch):
    written = []
    save = safetensors.numpy.save_file

    def full(arrays, path, metadata):
        save(arrays, path, metadata=metadata)
        written.append(path)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    samples = sg.callbacks.PosteriorSamples(5, thinning=5, directory=tmp_path)
    with pytest.raises(OSError, match=r"No space left.*2 draws before it are whole"):
        fit(make(), samples)
    assert not list(tmp_path.glob("chain-1/*.part"))
    assert list(sg.Posterior.load(tmp_path).steps) == [10, 15]
    assert list(samples.posterior.steps) == [10, 15]


def test_directories_that_can_not_be_used_are_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    model = make()
    with pytest.raises(OSError, match="Draws can't be kept in"):
        fit(model, sg.callbacks.PosteriorSamples(5, directory=tmp_path / "file"))
    assert int(model.optimizer.iterations) == 0
    for cls in (sg.callbacks.PosteriorSamples, sg.callbacks.IterateAverages):
        with pytest.raises(ValueError, match="with a `directory` none are there"):
            cls(5, max_samples=3, directory=tmp_path)


def test_another_chain_of_the_same_seed_is_refused_and_the_same_made_again(tmp_path):
    samples = sg.callbacks.PosteriorSamples(5, thinning=5, directory=tmp_path)
    fit(make(), samples)
    before = list(sg.Posterior.load(tmp_path).draws.values())
    for other in (make(rate=2e-3), make(units=5)):
        with pytest.raises(OSError, match="another model or sampler with the same seed"):
            fit(other, sg.callbacks.PosteriorSamples(5, thinning=5, directory=tmp_path))
    # The same run from its beginning: its draws are moved aside and made again.
    again = sg.callbacks.PosteriorSamples(5, thinning=5, directory=tmp_path)
    fit(make(), again, epochs=2)
    assert list(sg.Posterior.load(tmp_path).steps) == [10, 15, 20]
    assert len(list(tmp_path.glob("chain-1/superseded/*"))) == 5
    for values, made in zip(sg.Posterior.load(tmp_path).draws.values(), before, strict=True):
        np.testing.assert_array_equal(values, made[:3])
    # And it goes on.
    model = again.model
    fit(model, again, epochs=3, initial_epoch=2)
    for values, made in zip(again.posterior.draws.values(), before, strict=True):
        np.testing.assert_array_equal(values, made)


def test_a_restored_chain_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 37:
                raise KeyboardInterrupt

    def network():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)])
        sampler = sg.SGFS(
            fisher="full", train_size=ROWS, batch_size=BATCH, prior=1.0, warmup_steps=5, seed=1
        )
        model.compile(sampler, sg.GaussianNegativeLogLikelihood(0.5))
        return model

    def callbacks(directory, backup=None):
        return [
            *([sg.callbacks.BackupAndRestore(backup)] if backup else []),
            sg.callbacks.GradientNoise(),
            sg.callbacks.PriorPrecisionEM(start=5, every=3, learn_noise_std=True),
            sg.callbacks.PosteriorSamples(5, thinning=4, directory=directory / "samples"),
            sg.callbacks.IterateAverages(3, window=12, directory=directory / "averages"),
        ]

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(network(), *callbacks(whole), epochs=6)
    with pytest.raises(KeyboardInterrupt):
        fit(network(), *callbacks(parts, tmp_path / "backup"), Stop(), epochs=6)
    fit(network(), *callbacks(parts, tmp_path / "backup"), epochs=6)
    for kind, steps in (("samples", range(9, 61, 4)), ("averages", range(15, 61, 12))):
        ours, theirs = (sg.Posterior.load(path / kind, verify=True) for path in (parts, whole))
        assert list(theirs.steps) == list(steps)
        assert_same_draws(ours, theirs)
    assert not (tmp_path / "backup").exists()


def test_a_checkpoint_that_is_not_finished_is_not_used(tmp_path, monkeypatch):
    model = make()
    backup = sg.callbacks.BackupAndRestore(tmp_path / "backup")
    save = keras.Model.save_weights

    def killed(self, path, **arguments):
        if int(self.optimizer.iterations) == 20:
            pathlib.Path(path).write_bytes(b"half")
            raise KeyboardInterrupt
        save(self, path, **arguments)

    monkeypatch.setattr(keras.Model, "save_weights", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(model, backup)
    monkeypatch.undo()
    fresh, steps = make(), []

    class First(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            steps.append(int(self.model.optimizer.iterations))

    fit(fresh, sg.callbacks.BackupAndRestore(tmp_path / "backup"), First())
    assert (steps[0], steps[-1]) == (10, 29)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(backup))
    assert again.get_config() == backup.get_config()


def test_draws_of_a_diverging_chain_are_moved_aside(tmp_path):
    samples = sg.callbacks.PosteriorSamples(0, thinning=1, directory=tmp_path)
    model = make(rate=30.0)
    with pytest.raises(sg.DivergenceError):
        fit(model, samples, epochs=50)
    kept = sg.Posterior.load(tmp_path)
    assert list(kept.steps) == list(samples.posterior.steps)


def test_killed_processes_leave_whole_draws_and_go_on_bit_for_bit():
    command = [sys.executable, str(TOOLS / "kill_chains.py"), "--kills", "1", "--epochs", "15"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    assert "1 kills" in done.stdout.splitlines()[-1]
    assert "all equal" in done.stdout.splitlines()[-1]
