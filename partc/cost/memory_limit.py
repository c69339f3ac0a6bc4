"""Compare the predicted memory peak of each rank with what the plan and the device allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partc.errors import MemoryLimitError
from partc.plan.mesh import Mesh

NAMED = 3  # holders that an error names
SPARE = 0.92  # of a device's memory: the rest is for the allocator, the library's buffers, kernels
TOLERANCE = 0.02  # by how much a program's peak may differ from what was counted before printing
Holders = tuple[tuple[str, int], ...]  # who, and how many bytes


@dataclass(frozen=True)
class Peak:
    """The memory of a rank when most bytes are live: ``num_bytes``, and who holds them.

    ``state`` lives through all steps, ``live`` within one. ``live`` has only the largest pieces of
    memory, so both together are ``num_bytes`` or less.
    """

    rank: str
    num_bytes: int
    state: Holders
    live: Holders


def memory_limits(mesh: Mesh, memory_bytes: int) -> list[int] | None:
    """The bytes that the ranks of each pipeline place may use; None if there is no limit.

    The limit is the plan's ``memory_bytes`` (0: none). Where pipeline places have different
    devices, a place's limit is also at most what its own device can give.
    """
    if not mesh.hardware.is_mixed:
        return [memory_bytes] * mesh.pipeline_ranks if memory_bytes else None
    own = (usable(mesh.at_place(at).hardware.memory_bytes) for at in range(mesh.pipeline_ranks))
    return [min(memory_bytes, each) if memory_bytes else each for each in own]


def usable(memory_bytes: int) -> int:
    """The bytes of a device's memory that a program may use: ``SPARE`` of all."""
    return round(SPARE * memory_bytes)


def fits(peaks: Sequence[Peak], limits: Sequence[int] | None) -> bool:
    """Whether no rank is above its limit."""
    if limits is None:
        return True
    return all(peak.num_bytes <= limit for peak, limit in zip(peaks, limits, strict=True))


def check_memory(
    peaks: Sequence[Peak], limits: Sequence[int] | None, accounted: Sequence[Peak] | None = None,
    *, margin: float = 0.0,
) -> None:  # fmt: skip
    """Raise MemoryLimitError for the rank that is most above its limit, by more than a margin.

    ``peaks`` and ``limits`` have one entry per pipeline place; without limits nothing is checked.
    ``accounted``: what was counted before the program was printed. The error says so if the program
    has turned out to need more than that.
    """
    if limits is None:
        return
    places = range(len(limits))
    at = max(places, key=lambda place: peaks[place].num_bytes - limits[place])
    worst, limit_bytes = peaks[at], limits[at]
    if worst.num_bytes <= limit_bytes * (1 + margin):
        return
    holders = sorted((*worst.state, *worst.live), key=lambda holder: -holder[1])[:NAMED]
    why = "most is held by " + "; ".join(f"{who}, {size:,} bytes" for who, size in holders)
    if accounted and worst.num_bytes > (1 + TOLERANCE) * accounted[at].num_bytes:
        why += f"; {accounted[at].num_bytes:,} bytes were expected before the program was printed"
    raise MemoryLimitError(
        where=f"memory_bytes={limit_bytes}, {worst.rank}",
        what=f"the step needs {worst.num_bytes:,} bytes at its peak, {limit_bytes:,} are allowed",
        why=why,
        do=_advice(worst, exact=not margin),
    )


def _advice(peak: Peak, *, exact: bool) -> str:
    """What to change; ``exact``: a limit of so many bytes is enough."""
    more = f"raise memory_bytes to {peak.num_bytes}" if exact else "raise memory_bytes"
    state = sum(size for _, size in peak.state)
    if 2 * state >= peak.num_bytes:
        return (
            "Cut what is held through all steps over more ranks (plan fsdp, more tp or pp ranks), "
            f"or {more}."
        )
    return (
        "Take more and smaller microbatches, more ranks, a schedule with fewer microbatches in "
        f"flight, sequence parallelism (megatron-sp), or {more}."
    )
