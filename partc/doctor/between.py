"""What ranks need to have alike, and how far their hosts' clocks are apart."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from partc.doctor.finding import NOTE, OK, WRONG, Finding, named_ranks

TURNS = 8  # of a question to a clock; the fastest answer counts
MOST_S = 1.0  # that clocks may differ
DIFFERENT = {  # by name what a difference means; what is not here is wrong
    "driver": (NOTE, "Ranks wait for the slowest: install the same driver everywhere."),
    "GPU": (NOTE, "Ranks wait for the slowest, unless the machine file names these kinds."),
}


def compare(versions: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """A finding for each thing that ranks have: one value, or who has another than most."""
    for name in versions[0]:
        values = [each.get(name, "none") for each in versions]
        (usual, _), *others = Counter(values).most_common()
        if not others:
            if usual != "none":
                yield Finding(OK, f"{name} of all ranks", usual)
            continue
        told = "; ".join(
            f"{named_ranks(r for r, value in enumerate(values) if value == other)} has {other}"
            for other, _ in others
        )
        state, do = DIFFERENT.get(name, (WRONG, "Start all ranks from the same image or folder."))
        yield Finding(state, f"{name} of all ranks", f"most have {usual}; {told}", do)


def compare_clocks(hosts: Sequence[str]) -> list[Finding]:
    """How far the clock of each host is from rank 0's; all ranks take part, and
    rank 0 has the result.
    """
    asked = [hosts.index(host) for host in dict.fromkeys(hosts) if host != hosts[0]]
    apart = {rank: _apart(rank) for rank in asked}
    if dist.get_rank() or not asked:
        return []
    late = {r: (off, known) for r, (off, known) in apart.items() if abs(off) - known > MOST_S}
    if late:
        told = ", ".join(f"{hosts[r]} by {off:+.2f} s" for r, (off, _) in late.items())
        do = "Start a time service on all hosts (chrony): logs and ages of checkpoints differ."
        return [Finding(WRONG, "clocks", f"differ from {hosts[0]}'s: {told}", do)]
    most = max(abs(off) for off, _ in apart.values())
    return [Finding(OK, "clocks", f"{len({*hosts})} hosts, {most * 1e3:.1f} ms apart at most")]


def _apart(rank: int) -> tuple[float, float]:
    """Seconds by which a rank's clock is ahead of rank 0's, and how exactly that is known.

    The answer is taken to come from the middle between question and answer, as NTP does. Only rank
    0 knows the result.
    """
    here, best = dist.get_rank(), (0.0, float("inf"))
    clock = torch.zeros(1, dtype=torch.float64)
    for _ in range(TURNS):
        if here == 0:
            before = time.time()
            dist.send(clock, rank)
            dist.recv(clock, rank)
            after = time.time()
            found = (clock.item() - (before + after) / 2, (after - before) / 2)
            best = min(best, found, key=lambda each: each[1])
        elif here == rank:
            dist.recv(clock, 0)
            clock[0] = time.time()
            dist.send(clock, 0)
    return best
