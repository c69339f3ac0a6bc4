"""Blocks inside of a block: their attributes, and what the block around them saves of them.

The class of the block around has an instance of each inner class, ``self.layer_1``, and calls its
methods. What an inner ``forward`` saves is a list of its own, ``layer_1_saved``, among the values
that the ``forward`` around it saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import fx

from partc.codegen.bodies.block_arguments import LEFT, passed
from partc.codegen.calls.scope import Scope
from partc.codegen.repeats.runs import Loop
from partc.codegen.repeats.slots import Interface
from partc.graph import Phase
from partc.graph.places import module_of
from partc.quoting import identifier

if TYPE_CHECKING:
    from partc.codegen.bodies.classes import BlockClass

SAVED_WITH_LISTS = "list"  # the type of saved values among which are lists


def give_attributes(cls: BlockClass, scope: Scope) -> dict[str, str]:
    """Name the instances of inner classes: ``layer_1`` for ``blocks.0.layer.1``.

    For each parameter and buffer of theirs its path in the block: ``layer_1.wi_weight``.
    """
    found: dict[str, str] = {}
    for inner in cls.inner:
        path = module_of(inner.run.layers[0]).removeprefix(f"{cls.run.module}.")
        inner.attribute = scope.fresh(identifier(path))
        for name in (*cls.graph.params, *cls.graph.buffers):
            own = inner.suffixes.get(inner.own(name))
            if own is not None:
                found[name] = f"{inner.attribute}.{own}"
    return found


def stored_within(cls: BlockClass, name: str, node: fx.Node) -> bool:
    """Whether an inner block makes a value and puts it away, as a gradient or buffer ``name``."""
    return any(
        inner.own(name) in inner.suffixes and any(node in side.group.nodes for side in inner.sides)
        for inner in cls.inner
    )


def read_around(loop: Loop, sides: Mapping[Loop, Interface]) -> set[fx.Node] | None:
    """The values that a method reads itself, or passes on to inner blocks.

    None for a block without inner ones. ``sides`` has what these read.
    """
    if not loop.run.inner:
        return None
    found: set[fx.Node] = set()
    for item in loop.items():
        if isinstance(item, Loop):
            found |= {slot.nodes[0] for slot in passed(sides[item])}
        else:
            found.update(item.all_input_nodes)
    return found


def lists_of(side: Interface, before: Phase) -> list[fx.Node]:
    """What is in the list that an earlier phase of an inner block leaves for this one."""
    return [side.own(slot) for slot in side.of("saved") if slot.made_in == before]


def leaves(cls: BlockClass, side: Interface) -> dict[str, list[fx.Node]]:
    """The names of the lists that a phase of an inner block returns, with what is in them."""
    found = {}
    for word in cls.left_by(side):
        then = cls.side(next(phase for (_, phase), w in LEFT.items() if w == word))
        nodes = lists_of(then, side.loop.phase) if then is not None else []
        found[f"{cls.attribute}_{word}"] = nodes
    return found


def lists_within(cls: BlockClass, before: Phase, then: Phase) -> dict[str, list[fx.Node]]:
    """The lists that inner blocks leave in one phase for a later one, with what is in them."""
    sides = ((inner, inner.side(then)) for inner in cls.inner)
    found = ((inner, lists_of(side, before)) for inner, side in sides if side is not None)
    word = LEFT[before, then]
    return {f"{inner.attribute}_{word}": nodes for inner, nodes in found if nodes}


def sides_within(cls: BlockClass) -> dict[Loop, Interface]:
    """What the methods of inner blocks read and return."""
    return {side.loop: side for inner in cls.inner for side in inner.sides}
