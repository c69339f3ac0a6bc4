"""Check sums that send fewer bytes: their scheme, and the buffers for what they have not sent.

Every such buffer belongs to one sum, which alone reads and writes it, and has the shape and the
layout that the scheme says: a row for each rank, a piece for each, or the same for all.
"""

from __future__ import annotations

from torch import fx

from partc.checks.calls import wrong
from partc.errors import CheckError
from partc.graph import Graph, fake_of, typed, value
from partc.graph.moves import moved, state_of, wire_of
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
    state, wanted = state_of(node), [*_wanted(node).values()]
    if (state or WIRES[wire_of(node)].needs_rest) and len(state) != len(wanted):
        does = f"it has {len(state)} buffers for what is left over"
        raise wrong(node, does, f"Give it {len(wanted)}.")
    for buffer, kept in zip(state, wanted, strict=False):
        _check_buffer(node, buffer, kept, graph)


def _check_buffer(node: fx.Node, buffer: fx.Node, kept: Kept, graph: Graph) -> None:
    known, axis = value(buffer), str(node.kwargs["axis"])
    own = Sharding.of({} if kept.whose == ALIKE else {axis: cut(0)}, graph.mesh)
    if known.kind != "buffer" or known.shape != kept.shape or known.sharding != own:
        why = f"{buffer.name} is to be {own.typed(kept.shape, known.dtype)}, {kept.whose}"
        raise wrong(node, why, "Make it so; padding counts.")
    if known.name in graph.outputs.buffers:
        raise wrong(node, f"{buffer.name} is written by another call too", "Leave it to the sum.")


def _wanted(node: fx.Node) -> dict[str, Kept]:
    """A sum's buffers."""
    num, size = int(str(node.kwargs["num"])), int(str(node.kwargs["size"]))
    shapes = [fake_of(x).shape for x in moved(node)]
    return WIRES[wire_of(node)].kept(shapes, num, size)
