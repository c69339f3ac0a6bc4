"""Check that the recorded transfers of all ranks meet: same transfers, same order, no deadlock.

The transfers of a lane (a group's collectives; the messages from one rank to another) meet one
after the other. A collective ends when all members have started it, a message when both ends have.
A rank stops at a wait until the transfer has ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from partc.audit.recording import Record, Transfer
from partc.errors import CheckError

Meeting = tuple[tuple[Any, ...], int]  # a lane, and the number of the transfer in it


def check_order(records: Sequence[Record]) -> None:
    """CheckError if the ranks' transfers do not meet. ``records``: of every rank of the mesh."""
    run = _Run(records)
    run.to_the_end()
    for meeting, calls in run.open.items():
        raise _alone(meeting, calls, [record.rank for record in records])


def check_alike(one: Record, other: Record) -> None:
    """CheckError if two ranks that differ in their coordinates alone start other transfers.

    Their groups differ, so kinds, shapes, dtypes and the order are compared.
    """
    for a, b in zip(one.transfers, other.transfers, strict=False):
        if _form(a) != _form(b):
            raise _unlike(one.rank, a, other.rank, b)
    if one.events != other.events:
        raise CheckError(
            where=(one.transfers or other.transfers)[-1].place,
            what=f"ranks {one.rank} and {other.rank} start or wait for transfers in other orders",
            why=f"they have {len(one.transfers)} and {len(other.transfers)} transfers",
            do="Let all ranks of a group do the same, in one order.",
        )


def within(records: Sequence[Record]) -> list[Record]:
    """The records without the transfers in which other ranks take part."""
    ranks = {record.rank for record in records}
    found = []
    for record in records:
        kept = [{*transfer.members} <= ranks for transfer in record.transfers]
        events = [(what, number) for what, number in record.events if kept[number]]
        found.append(Record(record.rank, record.transfers, events))
    return found


def _form(transfer: Transfer) -> tuple[Any, ...]:
    size = len(transfer.members)
    return transfer.kind, size, transfer.lane[2:], *map(str, transfer.moved[-2:])


@dataclass
class _Run:
    """Lets all ranks run until each is at its end or waits."""

    records: Sequence[Record]
    done: dict[int, int] = field(default_factory=dict)  # events, by rank
    counts: Counter[Any] = field(default_factory=Counter)  # starts, by rank and lane
    open: dict[Meeting, dict[int, Transfer]] = field(default_factory=dict)
    meetings: dict[tuple[int, int], Meeting] = field(default_factory=dict)
    waiting: dict[Meeting, list[int]] = field(default_factory=lambda: defaultdict(list))

    def to_the_end(self) -> None:
        ready = [record.rank for record in self.records]
        by_rank = {record.rank: record for record in self.records}
        while ready:
            ready += self._advance(by_rank[ready.pop()])
        stuck = [r for r in self.records if self.done.get(r.rank, 0) < len(r.events)]
        if stuck:
            raise self._deadlock(stuck)

    def _advance(self, record: Record) -> list[int]:
        """Run a rank until it waits; the ranks that may go on after that."""
        woken: list[int] = []
        for at in range(self.done.get(record.rank, 0), len(record.events)):
            what, number = record.events[at]
            self.done[record.rank] = at
            if what == "start":
                woken += self._start(record, number)
            elif self.meetings[record.rank, number] in self.open:
                self.waiting[self.meetings[record.rank, number]].append(record.rank)
                return woken
        self.done[record.rank] = len(record.events)
        return woken

    def _start(self, record: Record, number: int) -> list[int]:
        """Start a transfer; the ranks that waited for it, if it ends thereby."""
        if (record.rank, number) in self.meetings:
            return []
        transfer = record.transfers[number]
        at = self.counts[record.rank, transfer.lane]
        self.counts[record.rank, transfer.lane] += 1
        meeting = self.meetings[record.rank, number] = (transfer.lane, at)
        calls = self.open.setdefault(meeting, {})
        for rank, other in calls.items():
            if other.moved != transfer.moved:
                raise _unlike(rank, other, record.rank, transfer)
        calls[record.rank] = transfer
        if len(calls) < len({*transfer.members}):
            return []
        del self.open[meeting]
        return self.waiting.pop(meeting, [])

    def _deadlock(self, stuck: Sequence[Record]) -> CheckError:
        lines = []
        for record in stuck:
            _, number = record.events[self.done[record.rank]]
            calls = self.open[self.meetings[record.rank, number]]
            transfer = record.transfers[number]
            missing = sorted({*transfer.members} - {*calls})
            lines.append(f"  rank {record.rank} waits for {transfer}, which ranks {missing} lack")
        first = stuck[0]
        return CheckError(
            where=first.transfers[first.events[self.done[first.rank]][1]].place,
            what="ranks wait for each other for ever",
            why=f"{len(stuck)} ranks cannot go on",
            do="All members must start the same transfers in the same order:\n"
            + "\n".join(lines[:8]),
        )


def _unlike(rank: int, one: Transfer, other_rank: int, other: Transfer) -> CheckError:
    return CheckError(
        where=other.place,
        what=f"rank {other_rank} starts {other} where rank {rank} starts {one}",
        why="transfers of one group meet in the order in which each rank starts them",
        do="Let all members start the same, with one shape and dtype.",
    )


def _alone(meeting: Meeting, calls: dict[int, Transfer], ranks: Sequence[int]) -> CheckError:
    transfer = next(iter(calls.values()))
    missing = sorted({*transfer.members} - {*calls})
    return CheckError(
        where=transfer.place,
        what=f"{transfer.kind} is started by ranks {sorted(calls)} and not by ranks {missing}",
        why="it never ends",
        do="Start it on all members, or on none.",
    )
