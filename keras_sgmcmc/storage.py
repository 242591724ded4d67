"""Draws on disk: one file a draw, whole or not there.

    directory/
      chain-7/                           one for each seed
        manifest.json                    what the draws are of
        common.safetensors               weights that do not change from draw to draw
        draw-000000001000.safetensors    the draw of step 1000
        superseded/                      draws that a resumed chain has gone back behind

A draw is an ordinary safetensors file: `safetensors.numpy.load_file(path)` gives a dict of arrays
by variable, in any language that has the format, and single arrays can be read alone. Its metadata
hold the step, the draw's weight, and a CRC-32 of the arrays in the manifest's order. Files are
written under another name and renamed, so a process that is killed leaves none in part. The files
themselves are the record; the manifest's list of them, renewed at the end of every epoch, tells
what is missing.
"""

import json
import os
import pathlib
import platform
import warnings
import zlib

import keras
import numpy as np

_MANIFEST, _COMMON, _SUPERSEDED = "manifest.json", "common.safetensors", "superseded"
_FORMAT = 1


class StorageError(OSError):
    """Draws could not be written or read; those that are whole stay readable."""


class StoredDraw:
    """A draw in a file, as a sequence of read-only arrays that is read when it is used.

    Args:
        path: The file.
        names: Names of the arrays, in the order of the variables.
        step, weight: As in its metadata.
    """

    def __init__(self, path, names, step, weight):
        self.path, self.names = pathlib.Path(path), names
        self.step, self.weight = step, weight

    @classmethod
    def open(cls, path, names):
        """The draw of a file that is whole, as far as its header and its size tell."""
        import safetensors

        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                metadata, found = file.metadata() or {}, set(file.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise StorageError(f"{path} is damaged: {error}") from error
        if found != set(names) or not {"step", "weight", "crc32"} <= metadata.keys():
            raise StorageError(f"{path} is no draw of the variables {names}")
        return cls(path, names, int(metadata["step"]), float(metadata["weight"]))

    def __len__(self):
        return len(self.names)

    def __iter__(self):
        """All arrays, checked against the sum in the file."""
        import safetensors

        try:
            with safetensors.safe_open(self.path, framework="numpy") as file:
                expected = file.metadata()["crc32"]
                ordered = [file.get_tensor(name) for name in self.names]
        except (OSError, safetensors.SafetensorError) as error:
            raise StorageError(
                f"The draw of step {self.step} can't be read from {self.path}: {error}. Leave it "
                "out: `Posterior.load(directory, verify=True)`."
            ) from error
        if _checksum(ordered) != expected:
            raise StorageError(
                f"The draw of step {self.step} is damaged: {self.path} does not have the sum that "
                "it was written with. Leave it out: `Posterior.load(directory, verify=True)`."
            )
        for array in ordered:
            array.setflags(write=False)
        return iter(ordered)

    def __getitem__(self, index):
        """One array, which is read alone and not checked."""
        import safetensors

        with safetensors.safe_open(self.path, framework="numpy") as file:
            return file.get_tensor(self.names[index])


class ChainStore:
    """The draws of one chain in a directory of its own.

    Args:
        directory: Directory of the chain.
        manifest: dict that says what the draws are of; see `manifest_of`.
        new: Whether there may be none yet.
    """

    def __init__(self, directory, manifest, new=False):
        self.directory = pathlib.Path(directory)
        self.manifest, self._new = manifest, new
        self.names = [entry["name"] for entry in manifest["variables"]]
        self.draws = []

    def open(self, step, common):
        """Make the directory, or find what is in it, for a chain that is at `step`.

        Draws of later steps, which the chain is going to make again, are moved aside.

        Args:
            step: The optimizer's step.
            common: dict of name to array: what does not change.

        Raises:
            StorageError: If the directory can't be written to, or holds draws of another chain.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            before = read_manifest(self.directory) if self._has_manifest() else None
            if before is not None and self._new:
                raise StorageError(
                    f"{self.directory} holds draws already. Choose another directory."
                )
            if before is not None:
                self._check_same(before, step)
            elif common:
                self._write(self.directory / _COMMON, common, {"of": "all draws"})
            found = find_draws(self.directory, before) if before else []
            self.draws = [draw for draw in found if draw.step <= step]
            for draw in found[len(self.draws) :]:
                self._set_aside(draw)
            self.write_manifest()
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"Draws can't be kept in {self.directory}: {error}. Choose a directory that can be "
                f"written to. Received: directory={str(self.directory.parent)!r}"
            ) from error

    def _has_manifest(self):
        return (self.directory / _MANIFEST).exists()

    def _check_same(self, before, step):
        def shapes(manifest):
            return [(v["shape"], v["dtype"]) for v in manifest["variables"]]

        differs = shapes(before) != shapes(self.manifest)
        # A chain that goes on may have another step size; one that begins has to be the same.
        if step == 0 and _options(before) != _options(self.manifest):
            differs = True
        if differs:
            raise StorageError(
                f"{self.directory} holds draws of another model or sampler with the same seed. "
                "Choose another `directory`, or another `seed`; `Posterior.load` reads what is "
                "there."
            )
        # The names of a model's layers may be numbered otherwise in another process.
        self.names = [entry["name"] for entry in before["variables"]]
        self.manifest = {**self.manifest, "variables": before["variables"]}

    def append(self, step, arrays, weight):
        """Write a draw, and return it as a `StoredDraw`."""
        path = self.directory / f"draw-{step:012d}.safetensors"
        metadata = {"step": str(step), "weight": repr(weight), "crc32": _checksum(arrays)}
        self._write(path, dict(zip(self.names, arrays, strict=True)), metadata)
        draw = StoredDraw(path, self.names, step, weight)
        self.draws.append(draw)
        return draw

    def take_back(self, step):
        """Set aside the draws after `step`."""
        for draw in [draw for draw in self.draws if draw.step > step]:
            self._set_aside(draw)
        self.draws = [draw for draw in self.draws if draw.step <= step]

    def _set_aside(self, draw):
        aside = self.directory / _SUPERSEDED
        aside.mkdir(exist_ok=True)
        os.replace(draw.path, aside / draw.path.name)

    def _write(self, path, arrays, metadata):
        from safetensors.numpy import save_file

        part = path.with_name(path.name + ".part")
        # safetensors writes what lies in memory, whatever the strides say.
        arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        try:
            save_file(arrays, part, metadata=metadata)
            os.replace(part, path)
        except Exception as error:
            part.unlink(missing_ok=True)
            raise StorageError(
                f"{path} could not be written: {error}. The {len(self.draws)} draws before it are "
                f"whole. Make room or choose another directory, and train on from a checkpoint."
            ) from error

    def write_manifest(self, seconds=None):
        """Renew the manifest, with the list of draws."""
        draws = [{"file": d.path.name, "step": d.step, "weight": d.weight} for d in self.draws]
        text = json.dumps({**self.manifest, "seconds": seconds, "draws": draws}, indent=1)
        part = self.directory / (_MANIFEST + ".part")
        part.write_text(text)
        os.replace(part, self.directory / _MANIFEST)


def named(variables):
    """dict of name to variable: paths, with a suffix for those that several share."""
    result = {}
    for v in variables:
        name, count = v.path, 0
        while name in result:
            count += 1
            name = f"{v.path}_{count}"
        result[name] = v
    return result


def as_directory(directory, max_samples):
    """What callbacks take for a directory of draws, as a string or None."""
    if directory is None:
        return None
    if max_samples is not None:
        raise ValueError(
            "`max_samples` bounds the draws in memory, and with a `directory` none are there: take "
            f"fewer draws instead. Received: max_samples={max_samples}"
        )
    return os.fspath(directory)


def open_chain(directory, model, optimizer, variables, common, sampling, step):
    """The `ChainStore` of an optimizer's chain, opened at `step`.

    Args:
        directory: The directory of all chains; seeds tell them apart.
        model, optimizer: What is trained.
        variables: The drawn variables.
        common: Pairs (variable, value) of the others.
        sampling: How the draws are taken, a dict.
        step: The optimizer's step.
    """
    others = named([variable for variable, _ in common])
    manifest = manifest_of(model, named(variables), others, sampling)
    path = pathlib.Path(directory) / f"chain-{getattr(optimizer, 'seed', 0)}"
    store = ChainStore(path, manifest)
    store.open(step, dict(zip(others, [value for _, value in common], strict=True)))
    return store


def manifest_of(model, variables, others, sampling):
    """What a chain's draws are of, as a dict that `json` can write.

    Args:
        model: The compiled model.
        variables: dict of name to the drawn variables.
        others: dict of name to the other variables of the model.
        sampling: How the draws are taken, a dict.
    """
    import tensorflow as tf

    import keras_sgmcmc

    try:
        described = keras.saving.serialize_keras_object(model)
        json.dumps(described)
    except Exception as error:  # whatever a user's `get_config` raises; loading takes a model then
        described = None
        warnings.warn(
            f"The model can't be written down ({error}), so that `Posterior.load` will need it: "
            "`Posterior.load(directory, model)`.",
            stacklevel=2,
        )
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)

    positions = {id(variable): position for position, variable in enumerate(model.variables)}

    def entry(name, variable):
        return {
            "name": name,
            "position": positions[id(variable)],
            "shape": list(variable.shape),
            "dtype": keras.backend.standardize_dtype(variable.dtype),
        }

    return {
        "format": _FORMAT,
        "versions": {
            "keras_sgmcmc": keras_sgmcmc.__version__,
            "keras": keras.__version__,
            "tensorflow": tf.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "model": described,
        "optimizer": optimizer and keras.saving.serialize_keras_object(optimizer),
        "sampling": sampling,
        "variables": [entry(name, v) for name, v in variables.items()],
        "common": [entry(name, v) for name, v in others.items()],
    }


def variables_of(model, manifest):
    """The variables of `model` that a manifest's draws hold, and the others, in its order.

    Raises:
        ValueError: If the model is another.
    """
    variables = list(model.variables)
    found = []
    for entries in (manifest["variables"], manifest["common"]):
        found.append([])
        for entry in entries:
            position = entry["position"]
            variable = variables[position] if position < len(variables) else None
            if variable is None or list(variable.shape) != entry["shape"]:
                there = None if variable is None else f"{variable.path} of {tuple(variable.shape)}"
                raise ValueError(
                    f"The draws are of another model: they hold {entry['name']} of shape "
                    f"{tuple(entry['shape'])}, where `model` has {there}. Build the model that was "
                    "sampled, or pass none and let the manifest describe it."
                )
            found[-1].append(variable)
    return found


def model_of(directory, manifest):
    """The model that a manifest describes, compiled if it was."""
    described = manifest["model"]
    if described is None:
        raise ValueError(
            f"The model of {str(directory)!r} could not be written down when it was sampled: pass "
            "it, `Posterior.load(directory, model)`."
        )
    try:
        model = keras.saving.deserialize_keras_object(described)
    except Exception as error:
        raise ValueError(
            f"The model of {str(directory)!r} can't be made anew ({error}). Import what registers "
            "its classes, or pass the model, `Posterior.load(directory, model)`."
        ) from error
    return model


def chain_directories(directory):
    """The directories of chains in a directory, by their number; or itself, if it is one.

    Raises:
        StorageError: If there is none.
    """
    directory = pathlib.Path(directory)
    if (directory / _MANIFEST).exists():
        return [directory]
    found = [path.parent for path in directory.glob(f"chain-*/{_MANIFEST}")]
    if not found:
        raise StorageError(
            f"There are no draws in {str(directory)!r}: no `chain-*/{_MANIFEST}`. Give the "
            "directory that `PosteriorSamples(directory=...)` or `Posterior.save` wrote to."
        )
    return sorted(found, key=lambda path: (len(path.name), path.name))


def read_manifest(directory):
    """The manifest of a chain.

    Raises:
        StorageError: If it is damaged, or of a later version.
    """
    path = pathlib.Path(directory) / _MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path} can't be read: {error}. The draws beside it are safetensors files, which "
            "`safetensors.numpy.load_file` reads without it."
        ) from error
    if manifest.get("format") != _FORMAT:
        raise StorageError(
            f"{path} is of format {manifest.get('format')}, and this version reads {_FORMAT}. "
            "Update keras_sgmcmc."
        )
    return manifest


def read_common(directory, manifest):
    """dict of name to array: the weights that all draws share."""
    from safetensors.numpy import load_file

    if not manifest["common"]:
        return {}

    path = pathlib.Path(directory) / _COMMON
    try:
        return load_file(path)
    except Exception as error:  # the library's own, and those of the file system
        raise StorageError(f"{path} can't be read: {error}") from error


def find_draws(directory, manifest, verify=False):
    """The whole draws of a chain, by step, with a warning for those that are damaged or missing.

    Args:
        directory: Directory of the chain.
        manifest: Its manifest.
        verify: Whether to read all arrays and compare their sums, rather than headers and sizes.
    """
    directory = pathlib.Path(directory)
    names = [entry["name"] for entry in manifest["variables"]]
    draws, broken = [], []
    for path in sorted(directory.glob("draw-*.safetensors")):
        try:
            draw = StoredDraw.open(path, names)
            if verify:
                iter(draw)
            draws.append(draw)
        except StorageError:
            broken.append(path.name)
    there = {draw.path.name for draw in draws} | set(broken)
    gone = [entry["file"] for entry in manifest["draws"] if entry["file"] not in there]
    for files, what in ((broken, "damaged"), (gone, "missing")):
        if files:
            warnings.warn(
                f"{len(files)} draws in {directory} are {what} ({', '.join(files[:3])}"
                f"{', ...' if len(files) > 3 else ''}); the {len(draws)} others are read.",
                stacklevel=3,
            )
    return draws


def _options(manifest):
    """What makes a sampler what it is; its name is numbered."""
    optimizer = manifest["optimizer"] or {"config": {}}
    config = {key: value for key, value in optimizer["config"].items() if key != "name"}
    return optimizer.get("class_name"), json.loads(json.dumps(config))


def _checksum(arrays):
    total = 0
    for array in arrays:
        total = zlib.crc32(np.asarray(array, order="C").reshape(-1).view("uint8"), total)
    return f"{total:08x}"
