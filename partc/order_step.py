"""The local graph of a whole step in; its transfers joined, and started and waited for, out."""

from __future__ import annotations

from partc.graph import Graph, copied
from partc.mesh import Mesh
from partc.passes.fill_waits import fill_waits
from partc.passes.join_collectives import join_collectives, leaves_in_parts
from partc.passes.place_waits import place_waits
from partc.passes.share_gathers import share_gathers
from partc.passes.storage import replay
from partc.plan import Plan
from partc.record_tape import record_step
from partc.step_walk import step_seconds


def order_step(local: Graph, plan: Plan, over: Mesh) -> Graph:
    """The scheduled graph; a block's gradients leave in parts where the step is faster so on the
    machines under ``over``.
    """
    share_gathers(local)
    if not leaves_in_parts(local, over):
        return _ordered(local, plan, None)
    ways = [_ordered(copied(local), plan, machines) for machines in (None, over)]
    return min(ways, key=lambda way: _step_s(way, over))


def _ordered(local: Graph, plan: Plan, over: Mesh | None) -> Graph:
    return fill_waits(place_waits(join_collectives(local, plan.join_mb, over)))


def _step_s(graph: Graph, over: Mesh) -> float:
    return step_seconds(record_step(graph, replay(graph)), over)
