"""Which parameters and buffers belong to a block, and what they are called as seen from the block.

A block has what its module has: ``up.weight`` of ``blocks.3.up.weight``. Where a model keeps the
weights of one turn of its loop in several lists (``zip(self.norms, self.blocks)``), a block also
has the members of the other lists with its own number: ``norms.#.weight`` of ``norms.3.weight``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from partc.graph.folds import layer_path
from partc.graph.places import is_one_call, module_of

NUMBER = "#"  # stands for the block's number in a name of another list


def own_name(layer: str, name: str) -> str:
    """The name of a parameter as seen from a block that may have it; "" of what it cannot have.

    >>> own_name("blocks.3", "blocks.3.up.weight"), own_name("blocks.3", "norms.3.weight")
    ('up.weight', 'norms.#.weight')
    >>> own_name("blocks.3", "norms.4.weight")
    ''
    >>> own_name("cell.@3", "cell.x.weight")  # all calls of a module have what it has
    'x.weight'
    """
    module = module_of(layer)
    if name.startswith(f"{module}."):
        return name.removeprefix(f"{module}.")
    if is_one_call(layer):
        return ""
    depth = sum(part.isdigit() for part in layer.split("."))
    member = layer_path(name, depth) if depth else ""
    path, _, number = member.rpartition(".")
    parent, _, mine = layer.rpartition(".")
    if not path or number != mine or (path == parent and member != name):
        return ""
    return f"{path}.{NUMBER}{name.removeprefix(member)}"


def name_in(layer: str, own: str) -> str:
    """The name in the model of what a block has; the other way around than ``own_name``.

    >>> name_in("blocks.3", "up.weight"), name_in("blocks.3", "norms.#.weight")
    ('blocks.3.up.weight', 'norms.3.weight')
    """
    if is_elsewhere(own):
        number = layer.rpartition(".")[2]
        return ".".join(number if part == NUMBER else part for part in own.split("."))
    return f"{module_of(layer)}.{own}"


def that_all_have(
    names: Collection[str], layers: Sequence[str], known: Collection[str]
) -> set[str]:
    """Of the names in the first block those that all blocks have; ``known``: all names there are.

    Blocks without any name that is known, which stand for others, do not count.
    """
    here = [at for at in layers if any(has(at, name, ()) for name in known)]
    mine = {name: own_name(layers[0], name) for name in names if has(layers[0], name, ())}
    return {name for name, own in mine.items() if all(name_in(at, own) in known for at in here)}


def is_elsewhere(own: str) -> bool:
    """Whether a block's parameter stands in another list than the block."""
    return NUMBER in own.split(".")


def has(layer: str, name: str, others: Collection[str]) -> bool:
    """Whether a block has a parameter; ``others``: names from other lists that blocks have."""
    mine = name.startswith(f"{module_of(layer)}.")
    return mine or (name in others and own_name(layer, name) != "")
