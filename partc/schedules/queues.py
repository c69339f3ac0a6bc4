"""The simulator's communicators: queues of started transfers, each run as soon as it can."""

from __future__ import annotations

from partc.schedules.programs import (
    FINISHED,
    RECEIVE,
    RECEIVED,
    SEND,
    SENT,
    START,
    Wiring,
)
from partc.schedules.step_costs import StepCosts

NOT_YET = -1.0
NOTHING = -1

# An operation is one end of a transfer, as a number: 3 * (message or collective) + one of these.
SENDING, RECEIVING, TOGETHER = range(3)
_ROLES = {
    SEND: SENDING, SENT: SENDING, RECEIVE: RECEIVING, RECEIVED: RECEIVING,
    START: TOGETHER, FINISHED: TOGETHER,
}  # fmt: skip


def operation(code: int, number: int) -> int:
    """The operation (one end of a transfer) that an event starts or waits for."""
    return 3 * number + _ROLES[code]


class Queue:
    """One rank's queue of the operations of one communicator."""

    __slots__ = ("channel", "free", "head", "rank", "ready", "started")

    def __init__(self, channel: int, rank: int) -> None:
        self.channel, self.rank = channel, rank
        self.started: list[int] = []  # operations in order; those before head are over
        self.ready: list[float] = []  # when the computing before each start was done
        self.head = 0
        self.free = 0.0  # when the last operation was over

    @property
    def first(self) -> int:
        """The first operation that is not over yet; NOTHING if all are over."""
        return self.started[self.head] if self.head < len(self.started) else NOTHING


class Queues:
    """The queues of all ranks and communicators; ``begin[op]`` and ``end[op]`` are times."""

    def __init__(self, wiring: Wiring, num_ranks: int, costs: StepCosts) -> None:
        self.wiring, self.count = wiring, wiring.microbatches
        self.of = [
            {member: Queue(channel, member) for member in communicator.members}
            for channel, communicator in enumerate(wiring.communicators)
        ]
        self.ends = [self._ends(row) for row in range(2 * wiring.stages)]
        self.lengths = costs.of_messages(wiring, costs.transfer)
        self.collective_lengths = [costs.collectives.get(c.name, 0.0) for c in wiring.collectives]
        num = 3 * max(wiring.num_messages, len(wiring.collectives))
        self.begin, self.end = [NOT_YET] * num, [NOT_YET] * num
        self.awaited = [NOTHING] * num_ranks  # the operation that a rank's computing waits for
        self.woken: list[int] = []  # ranks whose operation has ended since

    def _ends(self, row: int) -> tuple[Queue, ...]:
        """The sender's and the receiver's queue of a row (``2 * stage + way``) of messages."""
        channel = self.wiring.channels[row]
        if channel < 0:
            return ()
        source, target = self.wiring.route(row * self.count)
        return self.of[channel][source], self.of[channel][target]

    def everyone(self) -> list[Queue]:
        return [queue for members in self.of for queue in members.values()]

    def start(self, rank: int, operation: int, now: float) -> None:
        """Put a rank's operation into its queue; the operation may begin from ``now`` on."""
        number, role = divmod(operation, 3)
        if role == TOGETHER:
            queue = self.of[self.wiring.collective_channels[number]][rank]
        else:
            queue = self.ends[number // self.count][role]
        queue.started.append(operation)
        queue.ready.append(now)
        if queue.head == len(queue.started) - 1:  # its turn; else it waits for one before it
            parties = self.parties(operation)
            if all(q is queue or self.answers(operation, q.first) for q in parties):
                self._run(operation, parties)

    def parties(self, operation: int) -> tuple[Queue, ...]:
        """The queues whose ranks take part in an operation: both ends, or all members."""
        number, role = divmod(operation, 3)
        if role == TOGETHER:
            return tuple(self.of[self.wiring.collective_channels[number]].values())
        return self.ends[number // self.count]

    def answers(self, operation: int, other: int) -> bool:
        """Whether ``other``, first in another member's queue, is the other end of an operation.

        NCCL and gloo match sends and receives by their places in the queues alone, since they do
        not know which microbatch a message belongs to. The simulator does the same.
        """
        if operation % 3 == TOGETHER:
            return other == operation
        return other != NOTHING and other % 3 == 1 - operation % 3

    def _run(self, operation: int, parties: tuple[Queue, ...]) -> None:
        number, role = divmod(operation, 3)
        begin = max(max(q.free, q.ready[q.head]) for q in parties)
        together = role == TOGETHER
        length = self.collective_lengths[number] if together else self.lengths[number // self.count]
        for queue in parties:
            own = queue.started[queue.head]
            self.begin[own], self.end[own] = begin, begin + length
            queue.head += 1
            queue.free = begin + length
            if self.awaited[queue.rank] == own:
                self.woken.append(queue.rank)

    def unfinished(self) -> bool:
        """Whether some started transfer has not run."""
        return any(queue.first != NOTHING for queue in self.everyone())
