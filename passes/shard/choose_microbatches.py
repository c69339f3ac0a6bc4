"""Divide the microbatches of a step among islands by the speeds of their machines."""

from __future__ import annotations

from dataclasses import replace

from partc.cost.island_speeds import island_speeds
from partc.cost.prediction import Work
from partc.graph import Graph
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.uneven import shares


def choose_microbatches(graph: Graph, plan: Plan, mesh: Mesh) -> Plan:
    """The plan with the number of each island, where it has that of all islands; any other plan
    stays as it is.

    ``mesh`` has the machines under it. UsageError for fewer microbatches than islands.
    """
    assert plan.uneven is not None
    if not isinstance(plan.uneven.microbatches, int):
        return plan
    speeds = island_speeds(mesh, Work.of(graph).dtype)
    found = shares(speeds, plan.uneven.microbatches)
    return plan.changed(uneven=replace(plan.uneven, microbatches=tuple(found)))
