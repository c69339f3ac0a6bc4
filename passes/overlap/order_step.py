"""A step's local graph in; its transfers joined, and started and waited for, out.

What is best is tried: the passes run on copies, and the fastest copy is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import fx

from partc.cost.bytes import put_in_bytes
from partc.cost.collective_cost import collective_seconds
from partc.cost.record_events import record_step
from partc.cost.roofline import Spent, piece_seconds
from partc.cost.step_walk import step_seconds, step_times
from partc.cost.storage import replay
from partc.graph import Graph, collectives
from partc.graph.moves import kind_of
from partc.passes.overlap.bucket_collectives import leaves_in_parts
from partc.passes.overlap.overlap_collectives import Seconds
from partc.passes.overlap.take_turns import awaited_in_blocks, in_turns
from partc.passes.runner import State, run
from partc.plan.mesh import Mesh

PIECES = (2, 4)  # a piece more is a start more for every transfer
GAIN = 0.1  # of a step: a block in pieces has twice the lines


def order_step(state: State) -> Iterator[State]:
    """The scheduled step, and where its blocks are computed in pieces that nobody asked for, one
    without, should it need less memory; ``made["pieces"]`` says in how many.

    They are where the step is faster so on the machines under the mesh, and a block's gradients
    leave in parts where it is faster so.
    """
    run(state, "share_gathers", "hierarchical_all_reduce")
    mesh, awaited = state.mesh, awaited_in_blocks(state.graph)
    asked = state.plan.pieces if awaited else 1
    if asked:
        yield _in_parts(state.beside(pieces=asked))
        return
    more_s = start_seconds(state.graph, awaited, mesh)
    ways = {1: _in_parts(state.copied(pieces=1))}
    if most_gained(_spent(ways[1]), more_s) <= GAIN:
        yield ways[1]
        return

    def seconds(num: int) -> float:
        ways[num] = ways.get(num) or _in_parts(state.copied(pieces=num))
        return _step_s(ways[num])

    best = fastest(seconds)
    yield ways[best]
    if best > 1:
        yield ways[1]


def fastest(seconds: Callable[[int], float]) -> int:
    """The number of pieces that makes a step fastest, each doubling worth its lines."""
    best, enough_s = 1, (1 - GAIN) * seconds(1)
    for num in PIECES:
        num_s = seconds(num)
        if num_s >= enough_s:
            break
        best, enough_s = num, (1 - GAIN) * num_s
    return best


def _in_parts(state: State) -> State:
    """Scheduled with a block's gradients in as many parts as make the step fastest."""
    run(state, "take_turns")
    if not leaves_in_parts(state.graph, state.mesh):
        return _ordered(state)
    ways = [_ordered(state.copied(in_parts=in_parts)) for in_parts in (False, True)]
    return min(ways, key=_step_s)


def _ordered(state: State) -> State:
    return run(state, "bucket_collectives", "overlap_collectives")


def call_seconds(graph: Graph, mesh: Mesh) -> Seconds | None:
    """How long each call and transfer takes on the machines of a mesh, where blocks are computed in
    pieces: elsewhere all that can hide a transfer stands beside it.
    """
    if not in_turns(graph):
        return None
    ran, device = replay(graph), mesh.hardware.device

    def seconds(node: fx.Node) -> float:
        if node.target in collectives.COLLECTIVES:
            axis = str(node.kwargs["axis"])
            return collective_seconds(kind_of(node), put_in_bytes(node), mesh, axis)
        return piece_seconds(node, ran, device, 1)

    return seconds


def _step_s(state: State) -> float:
    graph = state.graph
    return step_seconds(record_step(graph, replay(graph)), state.mesh)


def start_seconds(graph: Graph, moves: Iterable[fx.Node], mesh: Mesh) -> dict[str, float]:
    """By axis, how long it takes to start each of some transfers once."""
    seconds: dict[str, float] = defaultdict(float)
    for node in moves:
        axis = str(node.kwargs["axis"])
        start_s = collective_seconds(kind_of(node), 0, mesh, axis)
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


def _spent(state: State) -> Iterable[Spent]:
    graph = state.graph
    return step_times(record_step(graph, replay(graph)), state.mesh).values()
