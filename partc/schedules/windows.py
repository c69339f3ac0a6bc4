"""The number of sends that may be under way on each communicator, so that limits cost no time.

A sender at its limit waits for its oldest send, and so for the receiver's post of that receive; the
receiver posts only a few receives ahead. This wait can cost time: in ``looped-bfs`` rank 0 takes
the messages of the last rank only after all its forwards of a stage. So one run with unlimited
queues finds the limits that cost no time.

A limit can also deadlock a sound schedule: rank 0 waits for its fourth send to be received, while
rank 1 waits for a message of another stage, which rank 0 would make next. So the schedule is run
with the limited queues; whenever no rank can go on and some rank waits for a send, the smallest of
these queues grows by one (Parks, Bounded Scheduling of Process Networks, 1995). A schedule that
runs with unlimited queues therefore runs with the final limits.
"""

from __future__ import annotations

from collections.abc import Sequence

from partc.schedules.programs import Wiring

NONE = -1
Steps = list[tuple[int, int, int]]  # action, message it takes, message it makes (or NONE)


class Traffic:
    """The steps of all ranks, and each communicator's messages in the order of their sends."""

    def __init__(self, wiring: Wiring, steps: Sequence[Steps]) -> None:
        self.wiring, self.steps = wiring, steps
        self.order: list[list[int]] = [[] for _ in wiring.communicators]
        self.place = [NONE] * wiring.num_messages
        self.ends: list[tuple[int, int]] = [(NONE, NONE)] * len(self.order)  # sender, receiver
        for own in steps:
            for _, _, message in own:
                if message != NONE:
                    self._add(message)

    def channel(self, message: int) -> int:
        return self.wiring.channels[message // self.wiring.microbatches]

    def _add(self, message: int) -> None:
        channel = self.channel(message)
        if not self.order[channel]:
            self.ends[channel] = self.wiring.route(message)
        self.place[message] = len(self.order[channel])
        self.order[channel].append(message)


def send_bounds(
    traffic: Traffic,
    lengths: Sequence[float],
    *,
    ahead: int,
    bound: int | Sequence[int] | None,
) -> list[int]:
    """Per communicator, the number of sends that may still be under way after a new send.

    ``bound`` is the least such number for every communicator, or for each of them. Without
    ``bound``, a communicator gets the least number, at least 1, that loses no time if actions take
    ``lengths``, by ``4 * stage + kind``. If the orders of actions deadlock anyway, the bounds are
    those at the deadlock.
    """
    channels = range(len(traffic.order))
    if bound is None:
        free = _Run(traffic, lengths, ahead, [len(order) for order in traffic.order])
        free.finish()
        bounds = [max(1, _under_way(free.sent[c], free.posted[c])) for c in channels]
    else:
        bounds = [bound for _ in channels] if isinstance(bound, int) else list(bound)
    run = _Run(traffic, lengths, ahead, bounds)
    run.finish()
    while run.widen():
        run.finish()
    return run.bounds


def _under_way(sent: Sequence[float], posted: Sequence[float]) -> int:
    """The least number of sends under way with which no sender waits for a receive to be posted.

    ``sent`` and ``posted`` are the times of sends and receives by their places in the queue.
    """
    bound = 0
    for place, now in enumerate(sent):
        while place >= bound and (place - bound >= len(posted) or posted[place - bound] > now):
            bound += 1
    return bound


class _Run:
    """A run of the actions with limited queues as `lower` uses them; messages take no time."""

    def __init__(
        self, traffic: Traffic, lengths: Sequence[float], ahead: int, bounds: list[int]
    ) -> None:
        ranks, channels = len(traffic.steps), len(traffic.order)
        self.traffic, self.lengths, self.ahead, self.bounds = traffic, lengths, ahead, bounds
        self.sent: list[list[float]] = [[] for _ in range(channels)]  # when, by place
        self.posted = [[0.0] * ahead for _ in range(channels)]  # when, by place and beyond
        self.done = [0] * ranks  # whole steps
        self.now = [0.0] * ranks
        self.full = [NONE] * ranks  # the communicator whose send a rank waits for
        self.empty = [NONE] * ranks  # the one it waits for a message from
        self.ready = list(range(ranks))

    def finish(self) -> None:
        """Run until no rank can go on."""
        while self.ready:
            self._advance(self.ready.pop())

    def widen(self) -> bool:
        """Raise the least bound of all queues that a sender waits for; False if no sender waits."""
        waiting = [(self.bounds[c], c, rank) for rank, c in enumerate(self.full) if c != NONE]
        if waiting:
            _, channel, rank = min(waiting)
            self.bounds[channel] += 1
            self.ready.append(rank)
        return bool(waiting)

    def _advance(self, rank: int) -> None:
        """Run a rank's steps up to a message that is missing or a queue that is full."""
        steps, count = self.traffic.steps[rank], self.traffic.wiring.microbatches
        for index in range(self.done[rank], len(steps)):
            action, takes, makes = steps[index]
            if self.full[rank] == NONE:
                if takes != NONE and not self._take(rank, takes):
                    return
                self.now[rank] += self.lengths[action // count]
                if makes != NONE:
                    self._send(rank, makes)
            if makes != NONE and not self._put(rank, makes):
                return
            self.done[rank] = index + 1

    def _take(self, rank: int, message: int) -> bool:
        """Wait for a message; False if the message has not been sent yet."""
        channel, place = self.traffic.channel(message), self.traffic.place[message]
        sent = self.sent[channel]
        self._post(channel, place + 1, self.now[rank])
        self.empty[rank] = channel if len(sent) <= place else NONE
        if len(sent) <= place:
            return False
        self.now[rank] = max(self.now[rank], sent[place])
        self._post(channel, place + 1 + self.ahead, self.now[rank])
        return True

    def _post(self, channel: int, until: int, now: float) -> None:
        posted = self.posted[channel]
        if len(posted) < until:
            posted += [now] * (until - len(posted))
            sender = self.traffic.ends[channel][0]
            if self.full[sender] == channel:
                self.ready.append(sender)

    def _send(self, rank: int, message: int) -> None:
        channel = self.traffic.channel(message)
        self.sent[channel].append(self.now[rank])
        receiver = self.traffic.ends[channel][1]
        if self.empty[receiver] == channel:
            self.ready.append(receiver)

    def _put(self, rank: int, message: int) -> bool:
        """Wait until the sends under way keep the bound; False if a receive is still missing."""
        channel = self.traffic.channel(message)
        oldest = len(self.sent[channel]) - self.bounds[channel]  # so many have to be received first
        if len(self.posted[channel]) < oldest:
            self.full[rank] = channel
            return False
        self.full[rank] = NONE
        if oldest > 0:
            self.now[rank] = max(self.now[rank], self.posted[channel][oldest - 1])
        return True
