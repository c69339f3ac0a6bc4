"""Schedule the collectives of a step without pipeline stages: buckets, order, waits.

Choices are made by trial: the passes run on copies of the graph, and the copy with the least
predicted step time is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import fx

from partc.cost.collective_cost import collective_seconds
from partc.cost.record_events import record_step
from partc.cost.roofline import Spent
from partc.cost.step_walk import step_seconds, step_times
from partc.cost.storage import replay
from partc.graph import Graph
from partc.graph.moves import kind_of
from partc.passes.overlap.choose_buckets import best_parts
from partc.passes.overlap.take_turns import awaited_in_blocks
from partc.passes.runner import State, run
from partc.plan.mesh import Mesh

PIECES = (2, 4)  # numbers to try; each more piece costs one more start of every transfer
GAIN = 0.1  # least share of the step's time to win: a block in pieces prints twice the lines


def order_step(state: State) -> Iterator[State]:
    """Yield the fastest scheduled step, whose plan has the number of pieces of a block.

    If partc chose pieces, not the plan, then the step without pieces follows, as a fallback that
    may need less memory. A block's gradients are reduced in parts where this is faster.
    """
    run(state, "share_gathers", "hierarchical_all_reduce")
    mesh, awaited = state.mesh, awaited_in_blocks(state.graph)
    if state.plan.overlap_pieces or not awaited:
        yield _in_parts(state.beside())
        return
    # An upper bound on the gain spares the trials of steps that pieces cannot make much faster.
    more_s = start_seconds(state.graph, awaited, mesh)
    ways = {1: _in_parts(_of_pieces(state, 1))}
    if most_gained(_spent(ways[1]), more_s) <= GAIN:
        yield ways[1]
        return

    def seconds(num: int) -> float:
        ways[num] = ways.get(num) or _in_parts(_of_pieces(state, num))
        return _step_s(ways[num])

    best = fastest(seconds)
    yield ways[best]
    if best > 1:
        yield ways[1]


def _of_pieces(state: State, num: int) -> State:
    """A copy of the state, for a step whose blocks are computed in so many pieces."""
    copy = state.copied()
    copy.plan = state.plan.changed(overlap_pieces=num)
    return copy


def fastest(seconds: Callable[[int], float]) -> int:
    """The number of pieces: doubled as long as each doubling takes at least GAIN off the time."""
    best, enough_s = 1, (1 - GAIN) * seconds(1)
    for num in PIECES:
        num_s = seconds(num)
        if num_s >= enough_s:
            break
        best, enough_s = num, (1 - GAIN) * num_s
    return best


def _in_parts(state: State) -> State:
    """Schedule a step; a block's gradients leave in one bucket or in parts, whichever is faster."""
    run(state, "take_turns", "choose_bucket_copies")
    parts = best_parts(state.graph, state.plan, state.mesh)
    if state.plan.grad_parts is not None or not parts:
        return _ordered(state)
    whole = dict.fromkeys(parts, 1)
    return min((_ordered(_of_parts(state, each)) for each in _distinct(whole, parts)), key=_step_s)


def _distinct(whole: dict[str, int], parts: dict[str, int]) -> list[dict[str, int]]:
    return [whole] if parts == whole else [whole, parts]


def _of_parts(state: State, parts: dict[str, int]) -> State:
    """A copy of the state, for a step in which gradients leave in so many parts by axis."""
    copy = state.copied()
    copy.plan = state.plan.changed(grad_parts=parts)
    return copy


def _ordered(state: State) -> State:
    return run(state, "bucket_collectives", "overlap_collectives")


def _step_s(state: State) -> float:
    graph = state.graph
    return step_seconds(record_step(graph, replay(graph)), state.mesh)


def start_seconds(graph: Graph, moves: Iterable[fx.Node], mesh: Mesh) -> dict[str, float]:
    """By axis, the seconds that the starts (a transfer of 0 bytes) of some transfers take."""
    seconds: dict[str, float] = defaultdict(float)
    for node in moves:
        axis = str(node.kwargs["axis"])
        start_s = collective_seconds(kind_of(node), 0, mesh, axis)
        seconds[axis] += graph.times(node) * start_s
    return seconds


def most_gained(parts: Iterable[Spent], more_s: Mapping[str, float]) -> float:
    """An upper bound on the share of the time that computing blocks in pieces can save.

    The step cannot be shorter than its computing, than its time without the waits for the axes in
    ``more_s``, or than all transfers of one axis one after the other. ``more_s`` is by axis the
    time that the pieces' additional starts take.
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
