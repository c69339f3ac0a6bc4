"""Execute the collectives of ranks that are threads, and detect wrong use.

The members of a group have to call the same collectives in the same order. RunError, with ranks and
lines, where they call different ones, wait for each other for ever, or never wait for a collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partc.errors import RunError


@dataclass(frozen=True)
class Group:
    """The ranks of one process group, in group order, and which mesh axis they lie on."""

    ranks: tuple[int, ...]
    axis: str = ""
    here: int = 0  # the global rank that holds this handle
    lane: str = ""  # sends between two ranks are counted apart from the group's collectives

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.here)

    def __str__(self) -> str:
        return f"{self.axis or 'ranks'} {list(self.ranks)}"


@dataclass
class Call:
    """One rank's call of a collective: its operand, a copy of that, and where the result goes."""

    kind: str
    detail: str
    sent: Tensor
    copy: Tensor
    result: Tensor
    line: str

    @property
    def agreed(self) -> tuple[str, str, tuple[int, ...], torch.dtype]:
        """Kind, detail, shape and dtype, which must be equal on all members."""
        return self.kind, self.detail, tuple(self.copy.shape), self.copy.dtype

    def __str__(self) -> str:
        dtype = str(self.copy.dtype).removeprefix("torch.")
        detail = f" {self.detail}" if self.detail else ""
        return f"{self.kind}{detail} of {dtype}{list(self.copy.shape)} at {self.line}"


@dataclass
class Meeting:
    """The n-th collective of a group; it is complete when every member has called."""

    group: Group
    number: int
    compute: Callable[[list[Tensor]], list[Tensor]]
    calls: dict[int, Call] = field(default_factory=dict)
    results: dict[int, Tensor] | None = None

    def __str__(self) -> str:
        missing = [rank for rank in self.group.ranks if rank not in self.calls]
        return f"collective {self.number} of {self.group}, missing {missing}"


class StopRank(Exception):
    """Ends a rank's thread after another rank has failed."""


class World:
    """The state that all rank threads share: the open collectives, and who waits for which.

    Only one rank computes at a time, until it waits. Threads that compute at once would spend most
    of their time on handing Python's global lock to each other, once per torch call.
    """

    def __init__(self, num: int, timeout: float) -> None:
        self.num, self.timeout = num, timeout
        self.changed = threading.Condition()
        self.turn = threading.Lock()  # of the rank that computes
        self.here = threading.local()
        self.meetings: dict[tuple[tuple[int, ...], str, int], Meeting] = {}
        self.counts: dict[tuple[tuple[int, ...], str, int], int] = {}  # calls so far, by rank
        self.groups: list[tuple[tuple[int, ...], str]] = []  # members, and where the first made it
        self.made = dict.fromkeys(range(num), 0)  # groups that each rank has made
        self.waiting: dict[int, Meeting] = {}
        self.open: dict[int, list[Call]] = {rank: [] for rank in range(num)}
        self.finished: set[int] = set()
        self.failure: BaseException | None = None

    def make_group(self, members: tuple[int, ...], line: str) -> int:
        """Note that this rank makes its next group; return the group's number.

        StopRank, after a RunError is noted, if an earlier rank's group of that number has other
        members: torch names groups by their number.
        """
        rank = self.here.rank
        with self.changed:
            self._stop_if_failed()
            number = self.made[rank]
            self.made[rank] += 1
            if number == len(self.groups):
                self.groups.append((members, line))
            if self.groups[number][0] != members:
                self.fail(_other_group(rank, number, (members, line), self.groups[number]))
                self._stop_if_failed()
            return number

    def start(
        self, group: Group, call: Call, compute: Callable[[list[Tensor]], list[Tensor]]
    ) -> Done:
        """Start this rank's next collective of a group; the last member's call computes it."""
        rank = self.here.rank
        with self.changed:
            self._stop_if_failed()
            number = self.counts.get((group.ranks, group.lane, rank), 0)
            self.counts[group.ranks, group.lane, rank] = number + 1
            key = (group.ranks, group.lane, number)
            meeting = self.meetings.setdefault(key, Meeting(group, number, compute))
            meeting.calls[rank] = call
            self.open[rank].append(call)
            if len(meeting.calls) == len(group.ranks):
                self._complete(meeting)
                del self.meetings[key]
            return Done(self, meeting, call, rank)

    def wait(self, meeting: Meeting, rank: int) -> Tensor:
        """Let other ranks compute until a collective is complete; return this rank's result.

        StopRank, after a RunError is noted, if the collective can never be complete.
        """
        self.turn.release()
        try:
            return self._awaited(meeting, rank)
        finally:
            self.turn.acquire()

    def _awaited(self, meeting: Meeting, rank: int) -> Tensor:
        with self.changed:
            self.waiting[rank] = meeting
            self._fail_if_stuck()
            done = self.changed.wait_for(lambda: meeting.results or self.failure, self.timeout)
            del self.waiting[rank]
            if not done:
                self.fail(self._hang(f"nothing happened for {self.timeout:g} s"))
            self._stop_if_failed()
            assert meeting.results is not None
            return meeting.results[rank]

    def finish(self, rank: int) -> None:
        """Note that a rank's function returned; a failure if one of its collectives has no wait."""
        with self.changed:
            if self.open[rank]:
                self.fail(_unwaited(rank, self.open[rank]))
            self.finished.add(rank)
            self._fail_if_stuck()

    def fail(self, error: BaseException) -> None:
        """Keep the first failure, and wake all waiting ranks, which then stop."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def _complete(self, meeting: Meeting) -> None:
        ranks = meeting.group.ranks
        calls = [meeting.calls[rank] for rank in ranks]
        if len({call.agreed for call in calls}) > 1:
            self.fail(_disagreement(meeting))
        else:
            results = meeting.compute([call.copy for call in calls])
            meeting.results = dict(zip(ranks, results, strict=True))
        self.changed.notify_all()
        self._stop_if_failed()

    def _stop_if_failed(self) -> None:
        if self.failure is not None:
            raise StopRank

    def _fail_if_stuck(self) -> None:
        """Fail if every rank waits or has finished, and no collective waited for is complete."""
        idle = self.finished | set(self.waiting)
        stuck = not any(meeting.results for meeting in self.waiting.values())
        if self.waiting and len(idle) == self.num and stuck:
            self.fail(self._hang("every rank waits or has finished"))

    def _hang(self, why: str) -> RunError:
        lines = [
            f"  rank {rank} waits at {meeting.calls[rank].line} in {meeting}"
            for rank, meeting in sorted(self.waiting.items())
        ]
        ended = f"\n  finished: {sorted(self.finished)}" if self.finished else ""
        return RunError(
            where="ranks in threads",
            what="the ranks wait for each other",
            why=why,
            do="The members of a group must call the same collectives:\n"
            + "\n".join(lines)
            + ended,
        )


@dataclass
class Done:
    """The handle of a started collective, in place of ``dist.Work``."""

    world: World
    meeting: Meeting
    call: Call
    rank: int

    def wait(self, timeout: Any = None) -> bool:
        """Wait, and copy the result into the program's tensor; a second wait does nothing."""
        opened = self.world.open[self.rank]
        if not any(call is self.call for call in opened):
            return True
        result = self.world.wait(self.meeting, self.rank)
        opened[:] = [call for call in opened if call is not self.call]
        if self.call.sent is not self.call.result:
            self._check_sent()
        self.call.result.copy_(result.view(self.call.result.shape))
        return True

    def is_completed(self) -> bool:
        return self.meeting.results is not None

    def _check_sent(self) -> None:
        """RunError if the operand was changed before the wait: a network may read it until then."""
        if not torch.equal(_as_bytes(self.call.sent), _as_bytes(self.call.copy)):
            raise RunError(
                where=f"rank {self.rank}, {self.call.line}",
                what="the tensor being sent was written to before the wait",
                why=f"it is in flight: {self.call}",
                do="Wait first, or write to a copy.",
            )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _other_group(
    rank: int, number: int, mine: tuple[tuple[int, ...], str], first: tuple[tuple[int, ...], str]
) -> RunError:
    (members, line), (expected, there) = mine, first
    return RunError(
        where=f"rank {rank}, {line}",
        what=f"it makes a group of ranks {[*members]}",
        why=f"the first rank to make group {number} gave it ranks {[*expected]} at {there}, and "
        "torch tells groups apart by their number",
        do="Make all groups on all ranks, in one order.",
    )


def _disagreement(meeting: Meeting) -> RunError:
    lines = [f"  rank {rank}: {call}" for rank, call in sorted(meeting.calls.items())]
    return RunError(
        where=f"collective {meeting.number} of {meeting.group}",
        what="its members do not call the same collective",
        why="each rank runs its own order",
        do="Compare these lines:\n" + "\n".join(lines),
    )


def _unwaited(rank: int, calls: list[Call]) -> RunError:
    return RunError(
        where=f"rank {rank}",
        what=f"{len(calls)} started collectives are never waited for",
        why="their results are not there when the step ends",
        do="Wait for:\n" + "\n".join(f"  {call}" for call in calls),
    )
