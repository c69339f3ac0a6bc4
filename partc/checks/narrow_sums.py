"""Check sums that send fewer bytes: their scheme, and the buffers for what they have not sent.

Every such buffer belongs to one sum, which alone reads and writes it, and has the shape and the
layout that the scheme says: a row for each rank, a piece for each, or the same for all. Directions
are results of the step as they are: what adds them up, or averages them, has none.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from math import prod

from torch import fx

from partc.checks.calls import wrong
from partc.errors import CheckError
from partc.graph import Graph, collectives, fake_of, typed, value
from partc.graph.moves import cut_over, kind_of, moved, state_of, wire_of
from partc.plan.sharding import Sharding, cut
from partc.plan.wires import ALIKE, WIRES, Kept, is_residual


def check_narrow_sums(graph: Graph) -> None:
    """CheckError for an unknown format, or for a buffer of another size, layout or reader."""
    for node in graph.calls():
        if wire_of(node):
            _check_sum(node, graph)
    for name, node in graph.buffers.items():
        readers = [user for user in node.users if wire_of(user)]
        if is_residual(name) and (len(readers) != 1 or len(node.users) != 1):
            raise CheckError(
                where=name, what=f"{len(node.users)} calls read {typed(node)}",
                why="what a sum has left over is added to that sum in the next step, and to no "
                "other", do="Give every sum in narrow numbers buffers of its own.",
            )  # fmt: skip


def _check_sum(node: fx.Node, graph: Graph) -> None:
    if wire_of(node) not in WIRES:
        raise wrong(node, f"there is no scheme {wire_of(node)!r}", f"Take one of {[*WIRES]}.")
    if kind_of(node) == "reduce_scatter" and not WIRES[wire_of(node)].scatter:
        scattered = [name for name, wire in WIRES.items() if wire.scatter]
        raise wrong(node, f"{wire_of(node)} has no reduce-scatter", f"Take one of {scattered}.")
    if len({frozenset(dict(value(x).sharding.cuts())) for x in moved(node)}) > 1:
        why = "some of its gradients are cut over an axis, and others are not"
        raise wrong(node, why, "Sum them apart: what is not cut has to be rounded alike there.")
    state, wanted = state_of(node), [*_wanted(node).values()]
    if (state or WIRES[wire_of(node)].needs_rest) and len(state) != len(wanted):
        does = f"it has {len(state)} buffers for what is left over"
        raise wrong(node, does, f"Give it {len(wanted)}.")
    for buffer, kept in zip(state, wanted, strict=False):
        _check_buffer(node, buffer, kept, graph)
    if WIRES[wire_of(node)].is_direction:
        _check_direction(node)


def _check_direction(node: fx.Node) -> None:
    for reader in _readers(node):
        if reader.op != "output":
            why = f"{reader.name} reads its result, which is +1 or -1, and no sum"
            raise wrong(node, why, "Let this call be the last on the way of a gradient.")


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads the results of a sum, behind the wait for it."""
    for user in node.users:
        if user.target in (operator.getitem, collectives.wait):
            yield from _readers(user)
        else:
            yield user


def _check_buffer(node: fx.Node, buffer: fx.Node, kept: Kept, graph: Graph) -> None:
    known, own = value(buffer), layout_of(kept, node, graph)
    shape = kept.over(prod(graph.mesh.size(axis) for axis in cut_over(node)))
    if known.kind != "buffer" or known.shape != shape or known.sharding != own:
        why = f"{buffer.name} is to be {own.typed(shape, known.dtype)}, {kept.whose}"
        raise wrong(node, why, "Make it so; padding counts.")
    if known.name in graph.outputs.buffers:
        raise wrong(node, f"{buffer.name} is written by another call too", "Leave it to the sum.")


def layout_of(kept: Kept, node: fx.Node, graph: Graph) -> Sharding:
    """How a sum's buffer is cut: a row for each rank that sums, and over what cuts gradients."""
    axis, others = str(node.kwargs["axis"]), cut_over(node)
    cuts = {each: cut(0 if kept.whose == ALIKE else 1) for each in others}
    return Sharding.of(cuts if kept.whose == ALIKE else {axis: cut(0), **cuts}, graph.mesh)


def _wanted(node: fx.Node) -> dict[str, Kept]:
    """A sum's buffers; none where ranks keep pieces of it."""
    if kind_of(node) == "reduce_scatter":
        return {}
    num, size = int(str(node.kwargs["num"])), int(str(node.kwargs["size"]))
    shapes = [fake_of(x).shape for x in moved(node)]
    return WIRES[wire_of(node)].kept(shapes, num, size)
