"""The predicted peaks of ranks in, an error out where one is beyond the plan's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partc.errors import MemoryLimitError

NAMED = 3  # holders that an error names
Holders = tuple[tuple[str, int], ...]  # who, and how many bytes


@dataclass(frozen=True)
class Peak:
    """What a rank holds when most is live: ``state`` through all steps, ``live`` of this one.

    ``live`` are the largest pieces alone, so the two sum up to ``num_bytes`` at most.
    """

    rank: str
    num_bytes: int
    state: Holders
    live: Holders


def check_memory(peaks: Sequence[Peak], limit_bytes: int) -> None:
    """MemoryLimitError for the rank with the highest peak if it is too high; 0 is no limit."""
    worst = max(peaks, key=lambda peak: peak.num_bytes)
    if not limit_bytes or worst.num_bytes <= limit_bytes:
        return
    holders = sorted((*worst.state, *worst.live), key=lambda holder: -holder[1])[:NAMED]
    raise MemoryLimitError(
        where=f"memory_bytes={limit_bytes}, {worst.rank}",
        what=f"the step needs {worst.num_bytes:,} bytes at its peak, {limit_bytes:,} are allowed",
        why="most is held by " + "; ".join(f"{who}, {size:,} bytes" for who, size in holders),
        do=_advice(worst),
    )


def _advice(peak: Peak) -> str:
    state = sum(size for _, size in peak.state)
    if 2 * state >= peak.num_bytes:
        return (
            "Cut what is held through all steps over more ranks (plan fsdp, more tp or pp ranks), "
            "or raise memory_bytes."
        )
    return (
        "Take more and smaller microbatches, more ranks, a schedule with fewer microbatches in "
        "flight, sequence parallelism (megatron-sp), or raise memory_bytes."
    )
