"""Choose over which axes gradients are summed hierarchically, and from how many bytes on.

Two plain all-reduces and a hierarchical one (``hierarchical_all_reduce.py``) each take a time that
is a line over the bytes of the gradients. So a pair of axes has one number of bytes from which on
the hierarchical one is faster, and the plan needs no more than this number.
"""

from __future__ import annotations

from itertools import permutations

from partc.cost.collective_cost import collective_seconds
from partc.graph import Graph
from partc.passes.overlap.bucket_collectives import BYTES_PER_MB
from partc.passes.overlap.hierarchical_all_reduce import KIND, axes_of, bytes_of, pairs
from partc.plan import Plan
from partc.plan.decided import rounded
from partc.plan.mesh import Mesh


def choose_hierarchical(graph: Graph, stages: list[Graph], plan: Plan, mesh: Mesh) -> Plan:
    """The plan with ``hierarchical`` set, if some gradient is summed over two axes.

    ``{ dp_shard = { dp_replicate = 0.25 } }``: a block's gradients of 0.25 MB or more are
    reduce-scattered over the inner axis, ``dp_shard``, and summed over the outer one.
    """
    largest: dict[frozenset[str], tuple[int, tuple[str, str]]] = {}
    for each in stages or [graph]:
        for chains in pairs(each).values():
            axes, num_bytes = axes_of(chains), bytes_of(chains)
            known = largest.get(frozenset(axes), (0, axes))
            largest[frozenset(axes)] = max(known, (num_bytes, known[1]))
    if not largest:
        return plan
    found: dict[str, dict[str, float]] = {}
    for most, axes in largest.values():
        inner, outer = min(
            permutations(axes), key=lambda way: in_levels_s(most, way[0], way[1], mesh)
        )
        if (least := _least_bytes(most, inner, outer, mesh)) is not None:
            found.setdefault(inner, {})[outer] = rounded(least / BYTES_PER_MB) if least > 1 else 0
    return plan.changed(hierarchical=found)


def _least_bytes(most: int, inner: str, outer: str, mesh: Mesh) -> int | None:
    """From how many bytes on, up to ``most``, the hierarchical way is faster; None if it is not."""

    def gains(num: int) -> bool:
        plain_s = sum(collective_seconds(KIND, num, mesh, axis) for axis in (outer, inner))
        return in_levels_s(num, inner, outer, mesh) < plain_s

    if not gains(most):
        return None
    low, high = 0, most  # it gains at high, and is not known to at low
    while high - low > max(high // 10_000, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high


def in_levels_s(num_bytes: float, inner: str, outer: str, mesh: Mesh) -> float:
    """Seconds of a hierarchical all-reduce."""
    piece_bytes = num_bytes / mesh.size(inner)
    return (
        collective_seconds("reduce_scatter", num_bytes, mesh, inner)
        + collective_seconds(KIND, piece_bytes, mesh, outer)
        + collective_seconds("all_gather", piece_bytes, mesh, inner)
    )
