"""The names of values that a collective has moved: they keep the name that they had."""

from __future__ import annotations

from torch import fx

from partc.graph import fake_of, is_tensor, ops, value
from partc.graph.moves import carried
from partc.passes.overlap.write_pieces import taken_from
from partc.plan.sharding import DTYPE_NAMES


def of_turn(node: fx.Node, wish: str) -> str:
    """The name of a value in an overlap piece of a block: ``x_0`` for ``x`` in piece 0."""
    turn = value(node).turn
    return wish if turn is None else f"{wish}_{turn}"


def known_as(node: fx.Node) -> str:
    """The name by which ``Value.forward`` of a backward call refers to this forward call."""
    return value(node).name or node.name


def before_move(node: fx.Node) -> fx.Node | None:
    """The value that a node holds in another layout, or a piece of; None for other calls."""
    return carried(node) or taken_from(node)


def moved_from(node: fx.Node) -> list[fx.Node]:
    """A value, and the values of calls that it was before collectives moved it, latest first."""
    chain = [node]
    while (before := carried(chain[-1])) is not None:
        chain.append(before)
    return [n for n in chain if n.op == "call_function"]


def follow_operands(forward: list[fx.Node], named: dict[fx.Node, str]) -> None:
    """Name values after their operands: a moved value keeps the name, a cast adds its dtype.

    ``x -> x_bfloat16`` for a cast of ``x``.
    """
    for node in forward:
        if (before := before_move(node)) is not None:
            named[node] = named[before]
        elif named[node] == "cast" and is_tensor(node):
            dtype = DTYPE_NAMES.get(fake_of(node).dtype, "cast")
            named[node] = f"{named[node.all_input_nodes[0]]}_{dtype}"
        elif node.target is ops.window and (ids := node.all_input_nodes[0]) in named:
            named[node] = f"{named[ids]}_in_shard"
