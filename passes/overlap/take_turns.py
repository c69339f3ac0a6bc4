"""Compute a block in pieces that take turns: the all-reduce of one piece overlaps the next piece.

Under tensor parallelism the next call reads an all-reduce's result at once, so that no order of
whole calls hides the all-reduce. In a block of ``k`` pieces (of the batch, or of any dim that the
sharding rules allow) a piece's all-reduce runs beside the computing of the other ``k - 1`` pieces,
and the next calls begin with the pieces that have arrived. This is decomposition as in Wang et al.,
"Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models"
(ASPLOS 2023), with pieces as in Domino (Wang et al. 2024, arXiv 2409.15241).

    y = all_reduce(f(x)); z = g(y)   -->   y0 = all_reduce(f(x[:4])); y1 = all_reduce(f(x[4:]))
                                           z0 = g(y0); z1 = g(y1); z = cat([z0, z1])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import fx

from partc.graph import Graph, collectives, tensor_args, value
from partc.graph.blocks import outermost_block
from partc.graph.graph_edits import drop_dead
from partc.in_order import in_order
from partc.passes.overlap.cut_region import Found, Region
from partc.passes.overlap.write_pieces import Pieces

Place = tuple[str, str, int]  # block, phase and stage


def take_turns(graph: Graph, num: int) -> Graph:
    """Rewrite, in place, the blocks that wait for collectives of activations into ``num`` pieces.

    Runs before waits are placed. Other blocks read the pieces concatenated; the block's own
    backward reads the pieces that its forward saved. A block whose collectives cannot be computed
    in pieces stays as it is.
    """
    pieces, found = Pieces(graph, num), Found()
    for run in _runs(graph):
        region = Region(run, num, graph.mesh, pieces.at_hand(outermost_block(run[0])), found)
        for start in _awaited(run):
            region.grow_from(start)
        if region.ways:
            before, after = run[0].prev, run[-1].next
            pieces.write(region)
            _reorder(before, after)
    drop_dead(graph)
    graph.fx.lint()
    return graph


def awaited_in_blocks(graph: Graph) -> list[fx.Node]:
    """The collectives of activations and their gradients whose results a call of their own block
    reads.
    """
    return [node for run in _runs(graph) for node in _awaited(run)]


def in_turns(graph: Graph) -> bool:
    """Whether a block is computed in pieces."""
    return any(value(node).turn is not None for node in graph.calls())


def _runs(graph: Graph) -> Iterator[list[fx.Node]]:
    """The consecutive calls of each block, phase by phase."""
    calls = list(graph.calls())
    for (block, _, _), run in groupby(calls, key=_place):
        if block:
            yield list(run)


def _place(node: fx.Node) -> Place:
    return outermost_block(node), value(node).phase, value(node).stage


def _awaited(run: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The collectives in ``run`` of activations, or their gradients, that calls of ``run`` read."""
    inside = set(run)
    moves = (*collectives.COLLECTIVES, *collectives.LOCAL)
    for node in run:
        read = any(user in inside and user.target not in moves for user in node.users)
        starts = node.target in collectives.COLLECTIVES
        if read and starts and value(tensor_args(node)[0]).kind == "op":
            yield node


# order ----------------------------------------------------------------------------------------
def _reorder(before: fx.Node, after: fx.Node) -> None:
    """Sort the calls between two nodes: per level first piece 0, then piece 1, and so on.

    In a level the calls of piece 0 end with their collectives, which overlap with piece 1.
    """
    nodes: list[fx.Node] = []
    node = before.next
    while node is not after:
        nodes.append(node)
        node = node.next
    place = {node: i for i, node in enumerate(nodes)}
    levels = _levels(nodes)

    def key(node: fx.Node) -> tuple[int, bool, int, int]:
        turn = value(node).turn
        return levels[node], turn is None, turn or 0, place[node]

    needs = {node: [o for o in node.all_input_nodes if o in place] for node in nodes}
    anchor = before
    for node in in_order(needs, key):
        anchor.append(node)
        anchor = node


def _levels(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Per call the number of collectives that it waits for, one after the other.

    A call whose result only a later level reads is moved to that level.
    """
    levels: dict[fx.Node, int] = {}
    for node in nodes:
        levels[node] = max(
            (levels[o] + _is_turned_move(o) for o in node.all_input_nodes if o in levels), default=0
        )
    for node in reversed(nodes):
        readers = [levels[user] for user in node.users if user in levels]
        if readers and len(readers) == len(node.users) and not _is_turned_move(node):
            levels[node] = max(levels[node], min(readers))
    return levels


def _is_turned_move(node: fx.Node) -> bool:
    return node.target in collectives.COLLECTIVES and value(node).turn is not None
