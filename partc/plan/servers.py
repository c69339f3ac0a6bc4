"""The table ``[servers]`` of a plan: some processes own parameters and their optimizer, for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from partc.plan.entries import Entries, is_whole, of_flag
from partc.plan.mesh import Mesh

SERVERS = "servers"  # the name of the table
MOST_SERVERS, MOST_LATE = 10_000, 64


@dataclass(frozen=True)
class Servers:
    """Who owns parameters, and who computes: the plan's table ``[servers]``.

    The last ``count`` islands are servers. Each owns some of the model's parameters, whole ones,
    and is the only one to have their gradients: the mean of those that computing islands send it.
    Its optimizer steps, and before the next step it sends the parameters to the islands that
    compute. With ``compute`` servers compute too: where all islands serve, they are peers.

    With ``max_steps_late`` the server is a process beside the program, whose mesh has no islands:
    programs join and leave as they like. An update is the mean of the gradients that all of them
    push for it. Each may be of parameters that are so many updates older: theta[t+1] = theta[t] -
    Opt(mean over w of g_w(theta[r_w])), t - r_w <= max_steps_late. ``replicas``: how many other
    processes have all that is acknowledged, one of which takes over when the server dies.
    """

    count: int
    compute: bool = False
    max_steps_late: int | None = None
    replicas: int = 0

    keeps: ClassVar[tuple[str, ...]] = ()  # nothing, from one step to the next

    @property
    def is_beside(self) -> bool:
        """Whether the server is no part of the program, but a process beside it."""
        return self.max_steps_late is not None

    def serving(self, mesh: Mesh) -> tuple[int, ...]:
        """The islands that own parameters."""
        return tuple(range(mesh.islands - self.count, mesh.islands))

    def workers(self, mesh: Mesh) -> tuple[int, ...]:
        """The islands that compute."""
        return tuple(range(mesh.islands if self.compute else mesh.islands - self.count))

    def lines(self) -> dict[str, str]:
        """The entries of the table as TOML, by name: those that say something."""
        found = {"count": str(self.count)} | ({"compute": "true"} if self.compute else {})
        found |= {"max_steps_late": str(self.max_steps_late)} if self.is_beside else {}
        return found | ({"replicas": str(self.replicas)} if self.replicas else {})


def batch_of(how: Servers | None, mesh: Mesh, island: int) -> int:
    """The island whose rows an island reads: its own, or, of one that computes none, another's."""
    if how is None or how.is_beside:
        return island
    return island % len(how.workers(mesh))


def computing(how: Servers | None, mesh: Mesh) -> int:
    """How many islands have a batch of their own."""
    return mesh.islands if how is None or how.is_beside else len(how.workers(mesh))


def shared_out(sizes: Iterable[int], num: int) -> list[int]:
    """The bytes that each of ``num`` servers owns: the largest tensor first, each goes to the one
    that has least so far.

    >>> shared_out([10, 2, 3, 4], 2)
    [10, 9]
    """
    found = [0] * num
    for size in sorted(sizes, reverse=True):
        found[found.index(min(found))] += size
    return found


def read_servers(table: Mapping[str, Any], where: str) -> Servers:
    """The table of a plan.toml as Servers; PlanError for an unknown or wrong entry."""
    made: Servers = _ENTRIES.read(table, where)
    return made


def _is_count(given: Any) -> str:
    fits = is_whole(given) and 1 <= given <= MOST_SERVERS
    return "" if fits else "it says how many islands own parameters, from 1"


def _is_late(given: Any) -> str:
    fits = is_whole(given) and 0 <= given <= MOST_LATE
    return "" if fits else f"it says how many updates late a gradient may be, 0 to {MOST_LATE}"


def _is_replicas(given: Any) -> str:
    return "" if is_whole(given) and 0 <= given <= 1 else "it is 0, or 1"


_ENTRIES = Entries(
    SERVERS, Servers,
    {"count": _is_count, "compute": of_flag, "max_steps_late": _is_late, "replicas": _is_replicas},
    "count = 1", "it does not say how many islands own parameters",
    told=dict.fromkeys(
        ("number", "num_servers", "servers", "num"),
        "Write count = 1, how many islands are servers.",
    ) | dict.fromkeys(
        ("staleness", "delay", "steps", "bound"),
        "Write max_steps_late = 1, how late a worker's gradients may be.",
    ),
)  # fmt: skip
