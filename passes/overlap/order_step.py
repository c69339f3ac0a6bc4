"""The local graph of a whole step in; its transfers joined, and started and waited for, out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import fx

from partc.cost.bytes import put_in_bytes
from partc.cost.collective_cost import collective_seconds
from partc.cost.record_tape import record_step
from partc.cost.roofline import Spent, piece_seconds
from partc.cost.step_walk import step_seconds, step_times
from partc.cost.storage import replay
from partc.graph import Graph, collectives
from partc.graph.graph_edits import copied
from partc.graph.moves import kind_of
from partc.passes.overlap.fill_waits import Seconds, fill_waits
from partc.passes.overlap.join_collectives import join_collectives, leaves_in_parts
from partc.passes.overlap.place_waits import place_waits
from partc.passes.overlap.share_gathers import share_gathers
from partc.passes.overlap.sum_in_levels import sum_in_levels
from partc.passes.overlap.take_turns import awaited_in_blocks, in_turns, take_turns
from partc.plan import Plan
from partc.plan.mesh import Mesh

PIECES = (2, 4)  # a piece more is a start more for every transfer
GAIN = 0.1  # of a step: a block in pieces has twice the lines

Way = tuple[int, Graph]  # in how many pieces blocks are computed


def order_step(local: Graph, plan: Plan, over: Mesh) -> Iterator[Way]:
    """The scheduled graph, and where its blocks are computed in pieces that nobody asked for, one
    without, should it need less memory.

    They are where the step is faster so on the machines under ``over``, and a block's gradients
    leave in parts where it is faster so.
    """
    sum_in_levels(share_gathers(local), over)
    awaited = awaited_in_blocks(local)
    asked = plan.pieces if awaited else 1
    if asked:
        yield asked, _in_parts(local, plan, over, asked)
        return
    more_s = start_seconds(local, awaited, over)
    ways = {1: _in_parts(copied(local), plan, over, 1)}
    if most_gained(_spent(ways[1], over), more_s) <= GAIN:
        yield 1, ways[1]
        return

    def seconds(num: int) -> float:
        ways[num] = ways.get(num) or _in_parts(copied(local), plan, over, num)
        return _step_s(ways[num], over)

    best = fastest(seconds)
    yield best, ways[best]
    if best > 1:
        yield 1, ways[1]


def fastest(seconds: Callable[[int], float]) -> int:
    """The number of pieces that makes a step fastest, each doubling worth its lines."""
    best, enough_s = 1, (1 - GAIN) * seconds(1)
    for num in PIECES:
        num_s = seconds(num)
        if num_s >= enough_s:
            break
        best, enough_s = num, (1 - GAIN) * num_s
    return best


def _in_parts(local: Graph, plan: Plan, over: Mesh, pieces: int) -> Graph:
    """Scheduled with a block's gradients in as many parts as make the step fastest."""
    if pieces > 1:
        take_turns(local, pieces)
    if not leaves_in_parts(local, over):
        return _ordered(local, plan, over)
    ways = [_ordered(copied(local), plan, over, in_parts) for in_parts in (False, True)]
    return min(ways, key=lambda way: _step_s(way, over))


def _ordered(local: Graph, plan: Plan, over: Mesh, in_parts: bool = False) -> Graph:
    graph = place_waits(join_collectives(local, plan.join_mb, over, in_parts))
    return fill_waits(graph, call_seconds(graph, over))


def call_seconds(graph: Graph, over: Mesh) -> Seconds | None:
    """How long each call and transfer takes on the machines of a mesh, where blocks are computed in
    pieces: elsewhere all that can hide a transfer stands beside it.
    """
    if not in_turns(graph):
        return None
    ran, device = replay(graph), over.hardware.device

    def seconds(node: fx.Node) -> float:
        if node.target in collectives.COLLECTIVES:
            axis = str(node.kwargs["axis"])
            return collective_seconds(kind_of(node), put_in_bytes(node), over, axis)
        return piece_seconds(node, ran, device, 1)

    return seconds


def _step_s(graph: Graph, over: Mesh) -> float:
    return step_seconds(record_step(graph, replay(graph)), over)


def start_seconds(graph: Graph, moves: Iterable[fx.Node], over: Mesh) -> dict[str, float]:
    """By axis, how long it takes to start each of some transfers once."""
    seconds: dict[str, float] = defaultdict(float)
    for node in moves:
        axis = str(node.kwargs["axis"])
        start_s = collective_seconds(kind_of(node), 0, over, axis)
        seconds[axis] += graph.times(node) * start_s
    return seconds


def most_gained(parts: Iterable[Spent], more_s: Mapping[str, float]) -> float:
    """The share of what is spent that pieces could save which take the axes ``more_s`` longer: no
    more than waits for these axes, and neither computing nor the transfers of one axis, one after
    the other, take less than they take.
    """
    whole, least_s = Spent(), dict(more_s)
    for part in parts:
        whole.add(part)
    for by_axis in (whole.exposed, whole.hidden):
        for axis, seconds in by_axis.items():
            least_s[axis] = least_s.get(axis, 0.0) + seconds
    waited_s = sum(whole.exposed.get(axis, 0.0) for axis in more_s)
    least = max(sum(whole.computing.values()), whole.seconds - waited_s, *least_s.values())
    return 1 - least / whole.seconds if whole.seconds else 0.0


def _spent(graph: Graph, over: Mesh) -> Iterable[Spent]:
    return step_times(record_step(graph, replay(graph)), over).values()
