"""Choose which tensors are too large for a bucket, and in how many parts gradients leave.

A tensor in a bucket is copied, which takes longer the larger it is; a transfer of its own takes the
time of a start. So there is a number of copied bytes from which on a tensor had better go alone.

A block's gradients can leave in ``m`` parts. In one bucket, no computing is left to overlap with
the last block's reduction of ``t`` seconds. In ``m`` parts only the last part is exposed, for
``t / m``, but every block starts ``m - 1`` more transfers of ``s`` seconds each. The sum
``t / m + (m - 1) * blocks * s`` is least for the largest m with ``m (m - 1) <= t / (blocks * s)``.
Where transfers take longer than computing, parts gain nothing (``order_step.py`` compares).
"""

from __future__ import annotations

from math import sqrt

from torch import fx

from partc.cost.collective_cost import collective_seconds
from partc.graph import Graph
from partc.graph.moves import kind_of
from partc.passes.overlap.bucket_collectives import (
    BYTES_PER_MB,
    Groups,
    copied_bytes,
    groups_of,
    largest_forms,
    leading,
    worth_copying,
)
from partc.plan import Plan
from partc.plan.decided import rounded
from partc.plan.mesh import Mesh

MOST_BYTES = 2**50  # more than any copy


def choose_bucket_copies(graph: Graph, stages: list[Graph], plan: Plan, mesh: Mesh) -> Plan:
    """The plan with ``bucket_copy_mb`` set, if buckets of the step copy anything.

    ``{ dp = { all_gather = 0.27 } }``: weights of which more than 0.27 MB would be copied are
    gathered alone, since to copy them takes longer than to start a transfer over ``dp``.
    """
    found: dict[str, dict[str, float]] = {}
    for each in stages or [graph]:
        nodes = [node for groups in groups_of(each, plan) for nodes in groups for node in nodes]
        for node in map(leading, nodes):
            axis, kind = str(node.kwargs["axis"]), kind_of(node)
            if copied_bytes(node) and kind not in found.get(axis, {}):
                most_mb = rounded(_most_copied(node, mesh) / BYTES_PER_MB)
                found.setdefault(axis, {})[kind] = most_mb
    return plan.changed(bucket_copy_mb=found) if found else plan


def _most_copied(node: fx.Node, mesh: Mesh) -> float:
    """The most bytes that are read and written in the time in which a transfer starts."""
    start_s = _start_seconds(node, mesh)
    low, high = 0.0, 1.0
    while _copy_seconds(high, mesh) < start_s and high < MOST_BYTES:
        low, high = high, 2 * high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if _copy_seconds(middle, mesh) < start_s else (low, middle)
    return low


def _copy_seconds(num_bytes: float, mesh: Mesh) -> float:
    return mesh.hardware.device.memory_seconds(2 * num_bytes)  # read and written


def _start_seconds(node: fx.Node, mesh: Mesh) -> float:
    """The seconds of a transfer of no bytes."""
    return collective_seconds(kind_of(node), 0, mesh, str(node.kwargs["axis"]))


def best_parts(graph: Graph, plan: Plan, mesh: Mesh) -> dict[str, int]:
    """By axis, in how many parts a block's gradients end soonest, by the formula above.

    Only of axes where they could leave in several.
    """
    groups: Groups = worth_copying(groups_of(graph, plan)[1], plan)
    forms = largest_forms(graph, groups)
    return {
        axis: _num_parts(size, blocks, nodes, mesh) for axis, (size, blocks, nodes) in forms.items()
    }


def _num_parts(size: int, blocks: int, nodes: list[fx.Node], mesh: Mesh) -> int:
    first = leading(nodes[0])
    start_s = _start_seconds(first, mesh)
    moved_s = collective_seconds(kind_of(first), size, mesh, str(first.kwargs["axis"])) - start_s
    each_s = blocks * start_s  # what one part more of every block costs
    if each_s <= 0:
        return len(nodes) if moved_s > 0 else 1
    return min(int((1 + sqrt(1 + 4 * moved_s / each_s)) / 2), len(nodes))
