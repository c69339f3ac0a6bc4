"""Lower a schedule to rank programs: add receives, sends and collectives around the actions.

The messages from one stage to a neighbouring stage form a *channel*: a one-way queue of messages of
one shape. The receiver keeps ``ahead`` receives posted beyond the last message that it took. The
sender starts a send and goes on; it waits for its oldest send only when more than ``bound`` sends
are under way. Neighbouring stages on the same rank hand their values over without a message.

A communicator is a queue of transfers. There are two ways to share communicators:

``channel`` (default)
    Every channel has a communicator of its own. A transfer never waits behind a transfer of another
    channel, so a rank may take messages from its channels in any order. In the generated program a
    channel is a plain queue if both its stages run the microbatches in the same order
    (``RankProgram.in_order``; all named schedules do). A rank has up to four communicators for each
    of its stages.
``pair``
    Each ordered pair of ranks has one communicator, so a rank has four, however many stages it has
    (looped or V). NCCL keeps buffers for each communicator, and a device has few hardware queues
    (CUDA_DEVICE_MAX_CONNECTIONS, 8 unless set), so ``pair`` is for many stages per rank. Receives
    are posted in the order of the sends, which both ranks know from the schedule. In zb-v and
    dualpipe-v a rank needs a later message first: then the rank also receives the earlier messages
    and keeps them, and its program is not ``in_order``.

With one stage per rank both ways are the same. In simulation every named schedule takes the same
time with both; ``pair`` holds fewer posted receives.
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
from partc.schedules.sends import Sends, bounds_of
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
    sends: Sends | None = None,
) -> tuple[RankProgram, ...]:
    """The program of every pipeline rank, for a schedule that has passed ``check_schedule``.

    ``ahead`` and ``bound`` are explained at the top of this file. Without ``bound``, every
    communicator gets the least bound that loses no time at the actions' ``costs`` (`windows.py`);
    without ``costs``, all actions take the same time. Where ``bound`` is so small that a schedule
    which can run would deadlock, a communicator gets a larger bound. ``sends`` has a bound for
    every link (`sends.py`), and stands above ``bound`` and ``costs``.
    """
    wiring = wire(
        schedule.rank_of, schedule.microbatches, communicators=communicators,
        collectives=collectives,
    )  # fmt: skip
    traffic = Traffic(wiring, [_steps(schedule, rank, wiring) for rank in range(schedule.ranks)])
    lengths = StepCosts.of(costs or Costs.even(schedule.stages)).of_actions()
    given = bound if sends is None else bounds_of(sends, wiring)
    bounds = send_bounds(traffic, lengths, ahead=ahead, bound=given)
    wiring = replace(wiring, ahead=ahead, bounds=tuple(bounds))
    return tuple(
        RankProgram(rank, tuple(_Rank(rank, traffic, wiring).events()), wiring)
        for rank in range(schedule.ranks)
    )


def _steps(schedule: Schedule, rank: int, wiring: Wiring) -> Steps:
    """Per action of the rank: its number, the message that it reads, the message that it makes."""
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
    """Writes the events of one rank."""

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
        # All ranks have to start the closing collectives in one order: they come last, one by one,
        # behind those that were started beside the actions or at the end of the step.
        closing = [number for number in mine if not self.wiring.collectives[number].stages]
        others = [number for number in mine if number not in closing]
        late = [number for number in starts.get(last, ()) if number not in closing]
        self.written.extend((START, number) for number in late)
        self.written.extend((FINISHED, number) for number in others)
        for number in closing:
            self.written.extend(((START, number), (FINISHED, number)))
        return self.written

    def _take(self, message: int) -> None:
        """Wait for a message, then post the next receive, which overlaps the coming action."""
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
        """The numbers of the collectives to start, by the index of the action before them."""
        wiring = self.wiring
        starts: dict[int, list[int]] = {}
        # Per communicator, the index of its latest collective: all members have to start the
        # collectives of a communicator in the order of declaration, so later ones go no earlier.
        latest: dict[int, int] = {}
        for number, collective in enumerate(wiring.collectives):
            if self.rank in collective.members:
                channel = wiring.collective_channels[number]
                index = max(self._last(collective), latest.get(channel, 0))
                latest[channel] = index
                starts.setdefault(index, []).append(number)
        return dict(sorted(starts.items()))

    def _last(self, collective: Collective) -> int:
        """Index of this rank's last action that the collective waits for; the number of actions
        if there is none."""
        steps, kinds = self.traffic.steps[self.rank], "F" if collective.after == "F" else "BIW"
        for index in reversed(range(len(steps))):
            action = self.wiring.action(steps[index][0])
            if action.stage in collective.stages and action.kind in kinds:
                return index
        return len(steps)
