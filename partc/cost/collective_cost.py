"""How long a collective takes over an axis of a mesh, by each algorithm and by the cheapest.

Every algorithm is a straight line over the bytes, a latency and seconds per byte (Hockney 1994), so
it takes numbers and expressions alike. ``partc/machines/collective_formulas.py`` has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from partc.errors import UsageError
from partc.machines.collective_formulas import FORMULAS, Group
from partc.machines.topology import Level
from partc.plan.mesh import Mesh

T = TypeVar("T")

# What a library does by itself; a hierarchical collective is several of them, one per level.
OF_LIBRARY: dict[str, dict[str, tuple[str, ...]]] = {
    "nccl": {
        "all_reduce": ("ring", "tree", "in_network"),
        "all_gather": ("ring",),
        "reduce_scatter": ("ring",),
        "all_to_all": ("pairwise",),
        "broadcast": ("ring",),
        "send": ("direct",),
    },
    "gloo": {
        "all_reduce": ("ring",),
        "all_gather": ("ring",),
        "reduce_scatter": ("pairwise",),  # as programs do it: its own is an all_reduce
        "all_to_all": ("pairwise",),
        "broadcast": ("tree",),
        "send": ("direct",),
    },
}


@dataclass(frozen=True)
class Estimate:
    """The time of a collective by one algorithm, over the bytes that one rank puts in."""

    algorithm: str
    latency_s: float
    s_per_byte: float

    def seconds(self, num_bytes: Any) -> Any:
        """Seconds for a number of bytes, or for an expression."""
        return self.latency_s + self.s_per_byte * num_bytes


def estimates(
    kind: str, mesh: Mesh, axis: str, algorithms: tuple[str, ...] | None = None
) -> tuple[Estimate, ...]:
    """A collective over an axis by each of these algorithms that can do it, by default those that
    the hardware's library has. Empty if none of them can.

    Where links have a protocol for small messages, an algorithm is there twice. UsageError for an
    unknown kind or algorithm.
    """
    known = _entry(FORMULAS, kind, "collective")
    for name in algorithms or ():
        _entry(known, name, f"algorithm of {kind}")
    hardware = mesh.hardware
    names = algorithms or OF_LIBRARY[hardware.library][kind]
    return _estimates(kind, hardware.levels, mesh.crosses(axis), hardware.start_s, names)


def cheapest(
    kind: str,
    num_bytes: float,
    mesh: Mesh,
    axis: str,
    algorithms: tuple[str, ...] | None = None,
) -> Estimate:
    """The fastest way for so many bytes; of two that are equal, the first.

    UsageError if none of ``algorithms`` can do it.
    """
    found = estimates(kind, mesh, axis, algorithms)
    if not found:
        raise UsageError(
            where=f"{kind} over {axis} by {', '.join(algorithms or ())}",
            what="none of these can do it",
            why=f"a group of {axis} crosses {mesh.crosses(axis)} units of the levels of "
            f"{mesh.hardware.name}",
            do="Name other algorithms, or none.",
        )
    return min(found, key=lambda estimate: float(estimate.seconds(num_bytes)))


def collective_seconds(kind: str, num_bytes: float, mesh: Mesh, axis: str) -> float:
    """The time of a collective into which every rank puts so many bytes."""
    return float(cheapest(kind, num_bytes, mesh, axis).seconds(num_bytes))


@lru_cache(maxsize=4096)
def _estimates(
    kind: str,
    levels: tuple[Level, ...],
    members: tuple[int, ...],
    start_s: float,
    names: tuple[str, ...],
) -> tuple[Estimate, ...]:
    group = Group.of(levels, members)
    if not group.hops:
        return (Estimate("nothing", 0.0, 0.0),)
    small = group.small()
    slower, thinner = group.hops[-1].level.factors.get(kind, (1.0, 1.0))
    found = []
    for name in names:
        for suffix, each in (("", group), ("_small", small)):
            line = FORMULAS[kind][name](each) if each else None
            if line is not None:
                latency_s = start_s * _num_starts(kind, name, len(group.hops)) + line[0]
                found.append(Estimate(name + suffix, slower * latency_s, thinner * line[1]))
    return tuple(found)


def _num_starts(kind: str, algorithm: str, num_levels: int) -> int:
    """How many collectives an algorithm is: inside and back out, where it is one per level."""
    if algorithm != "hierarchical":
        return 1
    return 2 * num_levels - 1 if kind == "all_reduce" else num_levels


def _entry(table: Mapping[str, T], name: str, what: str) -> T:
    if name not in table:
        raise UsageError(
            where=f"{what} {name!r}",
            what="there is none of this name",
            why="",
            do=f"Known are {', '.join(table)}.",
        )
    return table[name]
