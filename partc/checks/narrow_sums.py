"""Check sums that ranks send in narrow numbers: their format, and the buffers for what that loses.

Every such buffer belongs to one sum, which alone reads and writes it, and has room for all that the
sum's ranks lose: a row for each rank of its own numbers, or its piece of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from partc.checks.calls import wrong
from partc.errors import CheckError
from partc.graph import Graph, fake_of, typed, value
from partc.graph.moves import moved, state_of, wire_of
from partc.plan.sharding import Sharding, cut
from partc.plan.wires import WIRES, Compress, is_residual


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
        raise wrong(node, f"there is no format {wire_of(node)!r}", f"Take one of {[*WIRES]}.")
    state, wanted = state_of(node), [*_wanted(node)]
    if state and len(state) != len(wanted):
        raise wrong(node, f"it has {len(state)} buffers for what is left over", "Give it two.")
    axis = str(node.kwargs["axis"])
    own = Sharding.of({axis: cut(0)}, graph.mesh)
    for kept, shape in zip(state, wanted, strict=False):
        known = value(kept)
        if known.kind != "buffer" or known.shape != shape or known.sharding != own:
            why = f"{kept.name} is to be {own.typed(shape, known.dtype)}: each rank has its own"
            raise wrong(node, why, "Make it so; padding counts.")
        if known.name in graph.outputs.buffers:
            raise wrong(node, f"{kept.name} is written by another call too", "Leave it to the sum.")


def _wanted(node: fx.Node) -> Iterator[tuple[int, ...]]:
    """The whole shapes of a sum's buffers."""
    num, block = int(str(node.kwargs["num"])), int(str(node.kwargs["block"]))
    size = sum(fake_of(x).numel() for x in moved(node))
    padded = Compress(wire_of(node), block=block).padded(size, num)
    yield num, padded
    yield (padded,)
