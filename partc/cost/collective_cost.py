"""How long a collective over a mesh axis takes, by each algorithm and by the cheapest one.

The time of an algorithm is ``latency + seconds per byte * bytes`` (Hockney 1994), so the number of
bytes may be a sympy expression too. ``partc/machines/collective_formulas.py`` has the formulas.
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

# The algorithms a library chooses among by itself. ``hierarchical`` is in none of the lists, as it
# is several collectives, one per level of the links, which the program has to call.
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
        "reduce_scatter": ("pairwise",),  # by programs: gloo's own is an all_reduce
        "all_to_all": ("pairwise",),
        "broadcast": ("tree",),
        "send": ("direct",),
    },
}


@dataclass(frozen=True)
class Estimate:
    """The time of a collective by one algorithm, as a line over the bytes of one rank's operand."""

    algorithm: str
    latency_s: float
    s_per_byte: float

    def seconds(self, num_bytes: Any) -> Any:
        """Seconds if one rank's operand has so many bytes; an expression gives an expression."""
        return self.latency_s + self.s_per_byte * num_bytes


def estimates(
    kind: str, mesh: Mesh, axis: str, algorithms: tuple[str, ...] | None = None
) -> tuple[Estimate, ...]:
    """One estimate per algorithm for a collective of a kind (``all_reduce``) over a mesh axis.

    Without ``algorithms``, those of the hardware's library. An algorithm that the links cannot do
    is left out; one whose links have a second protocol for small messages stands there twice, as
    ``ring`` and ``ring_small``. UsageError for an unknown kind or algorithm.
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
    """The estimate of the algorithm that is fastest for so many bytes per rank; of two, the first.

    UsageError if the links can do none of ``algorithms``.
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
    """Seconds of a collective, by its cheapest algorithm, if each operand has so many bytes.

    Two collectives one behind the other, ``all_to_all+all_gather``, have as many bytes together as
    an all-reduce of so many.
    """
    first, _, second = kind.partition("+")
    if second and first == second:
        return 2 * collective_seconds(first, num_bytes / 2, mesh, axis)
    if second:
        each = (first, num_bytes), (second, num_bytes / mesh.size(axis))
        return sum(collective_seconds(one, size, mesh, axis) for one, size in each)
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
    """How many collectives a program starts for one algorithm; several only for a hierarchical one.

    An all-reduce over 3 levels is 5: reduce-scatters inward, one all-reduce, all-gathers outward.
    """
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
