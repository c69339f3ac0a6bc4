"""A schedule in, what every rank does out: receives, sends and collectives put around its actions.

Transfers between two stages are a *channel*: a one-way queue of messages of one shape. The receiver
keeps ``ahead`` receives posted beyond the last message that it took; the sender goes on once it has
started a send, and waits for its oldest only when more than ``bound`` are under way. Stages next to
each other on one rank hand their values over without a message.

Which transfers share a communicator, that is a queue:

``channel`` (default)
    Every channel has its own. No transfer ever stands behind one of another stage or way, so no
    order among channels has to be kept: a rank may take from them in any order, and each of them is
    a plain queue in the generated program, if both its stages run the microbatches in one order
    (``RankProgram.in_order``; all named schedules do). A rank has four for each of its stages.
``pair``
    One for each ordered pair of ranks, thus four on a rank however many stages it has, looped or V.
    NCCL keeps buffers for each communicator and a device has few hardware queues
    (CUDA_DEVICE_MAX_CONNECTIONS, 8 unless set), so this is for many stages on a rank. Receives are
    posted in the order in which the sender sends, which both sides know from the schedule. Where a
    rank needs a later message first, as in zb-v and dualpipe-v, it receives the ones before it as
    well and keeps them: it is not ``in_order``.

With one stage on a rank the two are the same. Every named schedule takes the same time with both
in simulation; ``pair`` then holds fewer posted receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from partc.schedules.actions import Schedule
from partc.schedules.programs import (
    BACKWARD,
    COMPUTE,
    FINISHED,
    FORWARD,
    KINDS,
    RECEIVE,
    RECEIVED,
    SEND,
    SENT,
    START,
    Collective,
    Event,
    RankProgram,
    Wiring,
    wire,
)
from partc.schedules.step_costs import StepCosts
from partc.schedules.timing import Costs
from partc.schedules.windows import NONE, Steps, Traffic, send_bounds


def lower(
    schedule: Schedule,
    *,
    communicators: Literal["channel", "pair"] = "channel",
    ahead: int = 1,
    bound: int | None = None,
    costs: Costs | None = None,
    collectives: Sequence[Collective] = (),
) -> tuple[RankProgram, ...]:
    """The program of every pipeline rank; the schedule has passed ``check_schedule``.

    Without ``bound`` a communicator gets the least that loses no time (``windows.py``) at the
    actions' ``costs``, all equal unless given. If the orders of the actions can be run at all, the
    programs finish: where ``bound`` is too small for that, a communicator gets more.
    """
    wiring = wire(
        schedule.rank_of, schedule.microbatches, communicators=communicators,
        collectives=collectives,
    )  # fmt: skip
    traffic = Traffic(wiring, [_steps(schedule, rank, wiring) for rank in range(schedule.ranks)])
    lengths = StepCosts.of(costs or Costs.even(schedule.stages)).of_actions()
    bounds = send_bounds(traffic, lengths, ahead=ahead, bound=bound)
    wiring = replace(wiring, ahead=ahead, bounds=tuple(bounds))
    return tuple(
        RankProgram(rank, tuple(_Rank(rank, traffic, wiring).events()), wiring)
        for rank in range(schedule.ranks)
    )


def _steps(schedule: Schedule, rank: int, wiring: Wiring) -> Steps:
    """Each action's number, the message it takes and the message it makes."""
    count, channels = schedule.microbatches, wiring.channels
    steps = []
    for stage, kind, microbatch in schedule.orders[rank]:
        takes = makes = NONE
        if kind == "F":
            if stage > 0 and channels[2 * (stage - 1) + FORWARD] >= 0:
                takes = wiring.message(stage - 1, FORWARD, microbatch)
            if channels[2 * stage + FORWARD] >= 0:
                makes = wiring.message(stage, FORWARD, microbatch)
        elif kind != "W":
            if stage + 1 < wiring.stages and channels[2 * (stage + 1) + BACKWARD] >= 0:
                takes = wiring.message(stage + 1, BACKWARD, microbatch)
            if channels[2 * stage + BACKWARD] >= 0:
                makes = wiring.message(stage, BACKWARD, microbatch)
        steps.append(((4 * stage + KINDS.index(kind)) * count + microbatch, takes, makes))
    return steps


class _Rank:
    """Writes one rank's events."""

    def __init__(self, rank: int, traffic: Traffic, wiring: Wiring) -> None:
        self.rank, self.traffic, self.wiring = rank, traffic, wiring
        self.ahead, self.bounds = wiring.ahead, wiring.bounds
        self.posted = [0] * len(self.bounds)
        self.sent = [0] * len(self.bounds)
        self.written: list[Event] = []

    def events(self) -> list[Event]:
        inbound = [c for c, (_, target) in enumerate(self.traffic.ends) if target == self.rank]
        for channel in inbound:
            self._post(channel, self.ahead)
        starts = self._starts()
        for index, (action, takes, makes) in enumerate(self.traffic.steps[self.rank]):
            if takes != NONE:
                self._take(takes)
            self.written.append((COMPUTE, action))
            if makes != NONE:
                self._put(makes)
            self.written.extend((START, number) for number in starts.get(index, ()))
        self._wait_for_sends()
        mine = [number for numbers in starts.values() for number in numbers]
        last = len(self.traffic.steps[self.rank])
        closing = [number for number in mine if not self.wiring.collectives[number].stages]
        others = [number for number in mine if number not in closing]
        late = [number for number in starts.get(last, ()) if number not in closing]
        self.written.extend((START, number) for number in late)
        self.written.extend((FINISHED, number) for number in others)
        for number in closing:
            self.written.extend(((START, number), (FINISHED, number)))
        return self.written

    def _take(self, message: int) -> None:
        """Wait for a message, then post the next receive, so that it runs beside the computing."""
        channel, place = self.traffic.channel(message), self.traffic.place[message]
        self._post(channel, place + 1)
        self.written.append((RECEIVED, message))
        self._post(channel, place + 1 + self.ahead)

    def _post(self, channel: int, until: int) -> None:
        order = self.traffic.order[channel]
        for place in range(self.posted[channel], min(until, len(order))):
            self.written.append((RECEIVE, order[place]))
            self.posted[channel] = place + 1

    def _put(self, message: int) -> None:
        channel = self.traffic.channel(message)
        self.written.append((SEND, message))
        self.sent[channel] += 1
        oldest = self.sent[channel] - 1 - self.bounds[channel]
        if oldest >= 0:
            self.written.append((SENT, self.traffic.order[channel][oldest]))

    def _wait_for_sends(self) -> None:
        for channel, sent in enumerate(self.sent):
            first = max(0, sent - self.bounds[channel])
            self.written.extend((SENT, m) for m in self.traffic.order[channel][first:sent])

    def _starts(self) -> dict[int, list[int]]:
        """After which of its actions the rank starts which collectives."""
        wiring = self.wiring
        starts: dict[int, list[int]] = {}
        latest: dict[int, int] = {}  # of a communicator: a later collective may not go before
        for number, collective in enumerate(wiring.collectives):
            if self.rank in collective.members:
                channel = wiring.collective_channels[number]
                index = max(self._last(collective), latest.get(channel, 0))
                latest[channel] = index
                starts.setdefault(index, []).append(number)
        return dict(sorted(starts.items()))

    def _last(self, collective: Collective) -> int:
        """The rank's last action that a collective follows, one beyond all if it has none."""
        steps, kinds = self.traffic.steps[self.rank], "F" if collective.after == "F" else "BIW"
        for index in reversed(range(len(steps))):
            action = self.wiring.action(steps[index][0])
            if action.stage in collective.stages and action.kind in kinds:
                return index
        return len(steps)
