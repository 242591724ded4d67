"""Checkpoints of which a killed process always leaves a whole one."""

import json
import os
import pathlib

import keras


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Keras' `BackupAndRestore`, whose checkpoints are whole whenever the process is killed.

    At the end of every epoch the model, the optimizer and the number of the epoch are saved; the
    same `fit` in a new process begins with them. Keras writes two files in place: a process that is
    killed between them trains an epoch too much, and one that is killed within them cannot go on.
    Here weights go to a file of a new name, and one file that names it is then replaced at once.

    A chain that goes on in this way is, bit for bit, the one that was never killed: if its data are
    `minibatches`, its random state that of a sampler (initial weights and dropout are the model's),
    and its draws on disk (`PosteriorSamples(directory=...)`). The callbacks of this library keep
    their averages in the state of a sampler; put this one anywhere among them.

    Args:
        backup_dir: Directory for the checkpoints of this run alone.
        delete_checkpoint: Whether to delete them when training has come to its end. Defaults to
            True.

    Example:

    >>> callbacks = [
    ...     sg.callbacks.BackupAndRestore("run/backup"),
    ...     sg.callbacks.PosteriorSamples(10_000, thinning=100, directory="run/draws"),
    ... ]
    >>> model.fit(data, epochs=100, callbacks=callbacks)
    """

    def __init__(self, backup_dir, delete_checkpoint=True):
        super().__init__(os.fspath(backup_dir), delete_checkpoint=delete_checkpoint)

    def on_train_begin(self, logs=None):
        pointer = pathlib.Path(self._training_metadata_path)
        if pointer.exists():
            weights = json.loads(pointer.read_text())["weights"]
            self._weights_path = str(pointer.with_name(weights))
        self._load_model()

    def _save_model(self):
        pointer = pathlib.Path(self._training_metadata_path)
        pointer.parent.mkdir(parents=True, exist_ok=True)
        weights = pointer.with_name(f"epoch-{self._current_epoch}.weights.h5")
        self.model.save_weights(weights, overwrite=True)
        part = pointer.with_suffix(".part")
        part.write_text(json.dumps({"epoch": self._current_epoch, "weights": weights.name}))
        os.replace(part, pointer)
        for other in pointer.parent.glob("epoch-*.weights.h5"):
            if other != weights:
                other.unlink()

    def get_config(self):
        return {"backup_dir": self.backup_dir, "delete_checkpoint": self.delete_checkpoint}

    @classmethod
    def from_config(cls, config):
        return cls(**config)
