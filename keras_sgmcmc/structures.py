"""How the covariance of gradients is stored: a diagonal, a matrix for each layer, or one matrix."""

import math

STRUCTURES = ("diagonal", "block", "full")
# Temporary arrays of the general way; matrices may take as much again.
MEMORY_BUDGET = 2**30


def blocks_of(variables, structure):
    """The blocks of a structure: lists of positions of variables, None for the diagonal."""
    if structure == "diagonal":
        return None
    if structure == "full":
        return [list(range(len(variables)))]
    blocks = {}
    for index, variable in enumerate(variables):
        blocks.setdefault(layer_path(variable), []).append(index)
    return list(blocks.values())


def check_memory(variables, structure, memory_budget, offered=STRUCTURES, option="structure"):
    """Raise a ValueError if the matrices of a structure don't fit the budget, before any is made.

    Three copies are counted: the sum over a batch, the estimate, and the running average.

    Args:
        variables: The variables.
        structure: One of `STRUCTURES`.
        memory_budget: Bytes.
        offered: The structures that can be had instead.
        option: The argument that chooses one.
    """
    blocks = blocks_of(variables, structure)
    if blocks is None:
        return
    sizes = [sum(length(variables[i]) for i in block) for block in blocks]
    needed = 3 * 4 * sum(rows**2 for rows in sizes)
    if needed > memory_budget:
        smaller = [s for s in offered if STRUCTURES.index(s) < STRUCTURES.index(structure)]
        others = " or ".join(f'`"{other}"`' for other in smaller)
        raise ValueError(
            f"The {structure} covariance of the gradients of {sum(map(length, variables))} "
            f"parameters needs {needed / 2**30:.3g} GiB (matrices of {sizes} rows, three copies), "
            f"over the budget of {memory_budget / 2**30:.3g} GiB. Use the {option} {others}, or "
            "raise `memory_budget`."
        )


def length(variable):
    """Number of elements of a variable."""
    return math.prod(variable.shape)


def layer_path(variable):
    """Path of the layer that holds a variable."""
    return variable.path.rsplit("/", 1)[0]
