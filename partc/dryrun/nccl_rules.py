"""Ranks and queues of transfers under NCCL's rules, which go on until none of them can.

The rules are those that gloo does not have:

- a group's transfers run one after the other, in the order of their starts; there are no tags
- nothing is buffered: a send is over when it has been received
- the first transfer of a communicator, and of two ranks in a direction, holds up each rank until
  the others have come to theirs
- ranks find each other by a group's name, which torch makes from counts
- where the default group is bound to a device, making a group is a call of all ranks, and all
  messages of a group share its one communicator; elsewhere each pair of ranks has its own
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partc.dryrun.recording import Communicator, Event, MakeGroup, Start, Wait
from partc.errors import CheckError

Channel = tuple[Communicator, tuple[int, ...]]  # of a group, or of one pair of it: one queue
Gate = tuple[object, ...]  # what ranks pass together: a first use, or the making of a group
OPPOSITE = {"send": "receive", "receive": "send"}


class Rules(NamedTuple):
    """``bound``: the default group is bound to a device (``device_id=``).

    ``blocking``: a wait holds up the whole rank, as with one hardware queue or blocking waits; else
    only the computing that stands behind it.
    """

    bound: bool = False
    blocking: bool = False


@dataclass(frozen=True)
class Queued:
    """A started transfer in a queue; it begins after the first ``needs`` waits of its rank."""

    start: Start
    rank: int
    needs: int

    def parties(self) -> tuple[int, ...]:
        peer = self.start.peer
        return self.start.group.ranks if peer is None else (self.rank, peer)

    def is_met_by(self, other: Queued) -> bool:
        """Whether ``other`` is another rank's part of the same transfer, as far as that can be."""
        mine, theirs = self.start, other.start
        if mine.peer is None or theirs.peer is None:
            return mine.peer is theirs.peer
        return theirs.peer == self.rank and theirs.name == OPPOSITE[mine.name]


class Run:
    """How far all ranks and their queues have come."""

    def __init__(self, recorded: Mapping[int, Sequence[Event]], rules: Rules) -> None:
        self.recorded, self.rules = recorded, rules
        self.at = dict.fromkeys(recorded, 0)
        self.todo: deque[tuple[int, Channel | None]] = deque((rank, None) for rank in recorded)
        self.arrived: dict[Gate, dict[int, MakeGroup | Start]] = defaultdict(dict)
        self.groups_made = dict.fromkeys(recorded, 0)
        self.queues: dict[int, dict[Channel, deque[Queued]]] = {
            rank: defaultdict(deque) for rank in recorded
        }
        self.started: dict[tuple[int, int], tuple[Channel, Queued]] = {}
        self.ended: set[tuple[int, int]] = set()  # rank and number of a transfer
        self.waits: dict[int, list[int]] = {rank: [] for rank in recorded}
        self.waited = dict.fromkeys(recorded, 0)  # waits of the rank that are over

    def is_over(self) -> bool:
        return (
            all(at == len(self.recorded[rank]) for rank, at in self.at.items())
            and all(self.waited[rank] == len(waits) for rank, waits in self.waits.items())
            and not any(queue for queues in self.queues.values() for queue in queues.values())
        )

    def event(self, rank: int) -> Event | None:
        """What a rank asks next; None at its end."""
        events, at = self.recorded[rank], self.at[rank]
        return events[at] if at < len(events) else None

    # ranks -----------------------------------------------------------------------------------
    def go_on(self, rank: int) -> None:
        """Let a rank ask for its next event, if nothing holds it up."""
        event = self.event(rank)
        if event is None or self.holds_up(rank, event):
            return
        if isinstance(event, MakeGroup):
            self.groups_made[rank] += 1
        elif isinstance(event, Start):
            channel = self.channel(rank, event)
            queued = Queued(event, rank, len(self.waits[rank]))
            self.started[rank, event.number] = channel, queued
            self.queues[rank][channel].append(queued)
            self.todo.append((rank, channel))
        else:
            self.waits[rank].append(event.number)
            self._end_waits(rank)
        self.at[rank] += 1
        self.todo.append((rank, None))

    def holds_up(self, rank: int, event: Event) -> bool:
        """Whether a rank cannot go on yet; it arrives at the first gate that is shut."""
        if isinstance(event, Wait):
            return self.rules.blocking and (rank, event.number) not in self.ended
        return any(not self._pass(rank, event, gate) for gate in self.gates(rank, event))

    def gates(self, rank: int, event: MakeGroup | Start) -> Iterator[tuple[Gate, tuple[int, ...]]]:
        """What the event has to pass, and the ranks that pass it together, one after the other."""
        if isinstance(event, MakeGroup):
            if self.rules.bound:
                yield ("making group", self.groups_made[rank]), tuple(self.recorded)
            return
        channel = self.channel(rank, event)
        if not self.rules.bound:
            yield ("first use", *channel), channel[1]
        if event.peer is not None:
            way = (rank, event.peer) if event.name == "send" else (event.peer, rank)
            yield ("connecting", *channel, *way), way

    def _pass(
        self, rank: int, event: MakeGroup | Start, gate: tuple[Gate, tuple[int, ...]]
    ) -> bool:
        key, members = gate
        arrived = self.arrived[key]
        if rank not in arrived:
            arrived[rank] = event
            self._check_same_group(rank, arrived)
            if self.is_open(key, members):
                self.todo.extend((other, None) for other in arrived if other != rank)
        return self.is_open(key, members)

    def is_open(self, gate: Gate, members: Sequence[int]) -> bool:
        return all(m in self.arrived[gate] for m in members if m in self.recorded)

    def channel(self, rank: int, event: Start) -> Channel:
        """The queue of a transfer: of its group, or of its pair of ranks where pairs have one."""
        if event.peer is None or self.rules.bound:
            return event.group, event.group.ranks
        low, high = sorted((rank, event.peer))
        return Communicator(f"{event.group.name}, {low} and {high}", event.group.ranks), (low, high)

    # queues ----------------------------------------------------------------------------------
    def transfer(self, rank: int, channel: Channel) -> None:
        """Let the first transfer of a queue run, if all its ranks are ready for it."""
        queue = self.queues[rank][channel]
        if not queue:
            return
        parts = [self.first(party, channel) for party in self.parties(queue[0])]
        if not all(part is not None and self.is_ready(queue[0], part) for part in parts):
            return
        for part in parts:
            assert part is not None
            self.queues[part.rank][channel].popleft()
            self.ended.add((part.rank, part.start.number))
            self._end_waits(part.rank)
            self.todo.extend([(part.rank, channel), (part.rank, None)])

    def parties(self, queued: Queued) -> list[int]:
        return [rank for rank in queued.parties() if rank in self.recorded]

    def first(self, rank: int, channel: Channel) -> Queued | None:
        queue = self.queues[rank][channel]
        return queue[0] if queue else None

    def is_ready(self, first: Queued, part: Queued) -> bool:
        """Whether ``part`` is its rank's part of ``first``, and may begin."""
        if part is not first and not first.is_met_by(part):
            return False
        _check_same_call(first, part)
        return self.waited[part.rank] >= part.needs

    def _end_waits(self, rank: int) -> None:
        waits, before = self.waits[rank], self.waited[rank]
        while self.waited[rank] < len(waits) and (rank, waits[self.waited[rank]]) in self.ended:
            self.waited[rank] += 1
        if self.waited[rank] > before:
            self.todo.extend((rank, channel) for channel, q in self.queues[rank].items() if q)

    def _check_same_group(self, rank: int, arrived: Mapping[int, MakeGroup | Start]) -> None:
        (first, theirs), mine = next(iter(arrived.items())), arrived[rank]
        if isinstance(mine, MakeGroup) and mine.group.ranks != theirs.group.ranks:
            raise CheckError(
                where=f"rank {rank}, {mine.place}",
                what=f"rank {rank} {mine}",
                why=f"at its place in the order of groups rank {first} {theirs} ({theirs.place})",
                do="Make all groups on all ranks, in one order.",
            )


def _check_same_call(first: Queued, part: Queued) -> None:
    mine, theirs = first.start, part.start
    names = {mine.name, theirs.name}
    if mine.size != theirs.size or (len(names) > 1 and names != set(OPPOSITE)):
        raise CheckError(
            where=f"{mine.group}",
            what=f"rank {first.rank} runs {mine.name} of {mine.size} ({mine.place})",
            why=f"rank {part.rank} runs {theirs.name} of {theirs.size} ({theirs.place})",
            do="Start the same transfers in one order on all ranks of a group.",
        )
