"""A sampler's state in Keras' weight files: by name, with a description of what it belongs to.

Keras stores optimizer variables by position, which swaps two scalars silently when a version of the
optimizer declares them in another order, and skips with a warning when their number differs.
"""

import json
import warnings

import numpy as np

_DESCRIPTION = "keras_sgmcmc"
_KEPT = "kept."


def save(store, layout, variables, kept, *, built):
    """Write `variables` (dict of name to variable) and what they are into `store`.

    `kept` (dict of name to array) goes with them, but is no part of the layout.
    """
    description = json.dumps({**layout, "kept": sorted(kept), "built": bool(built)}).encode()
    store[_DESCRIPTION] = np.frombuffer(description, dtype="uint8").copy()
    for name, variable in variables.items():
        store[name] = variable.numpy()
    for name, array in kept.items():
        store[_KEPT + name] = array


def load(store, layout, variables):
    """Assign what `store` holds to `variables`, if it is of the same layout.

    Returns:
        What was kept with them, as a dict of name to array.

    The state of another optimizer is left alone, with a warning; so is that of an optimizer that
    had not been built, which is none.

    Raises:
        ValueError: If the state is that of a sampler of another class or layout.
    """
    sampler = layout["class"]
    if _DESCRIPTION not in store:
        warnings.warn(
            "The saved optimizer state is not a sampler's (weights trained with another "
            f"optimizer?): the weights were loaded, and {sampler} starts afresh.",
            stacklevel=2,
        )
        return {}
    saved = json.loads(bytes(np.asarray(store[_DESCRIPTION], dtype="uint8")).decode())
    if not saved["built"]:
        return {}
    differences = [
        f"{key}: saved {saved[key]!r}, here {layout[key]!r}"
        for key in layout
        if saved[key] != layout[key]
    ]
    differences += [
        f"shape of {name}: saved {tuple(store[name].shape)}, here {tuple(variable.shape)}"
        for name, variable in variables.items()
        if name in saved["state"] and tuple(store[name].shape) != tuple(variable.shape)
    ]
    if differences:
        raise ValueError(
            f"The saved state does not fit this {sampler}. Make the optimizer with the class and "
            "options it was saved with, or load the weights alone. " + "; ".join(differences)
        )
    for name, variable in variables.items():
        variable.assign(store[name])
    return {name: np.array(store[_KEPT + name]) for name in saved.get("kept", ())}
