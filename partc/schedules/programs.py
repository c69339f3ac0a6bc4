"""Rank programs: a pipeline rank's events in a step (actions, starts and waits of transfers).

The events, in the notation of torch.distributed.pipelining:

    0F2           compute an action, see ``actions.py``
    1RECV_F2      post stage 1's receive of the output of 0F2
    1WAIT_RECV_F2 wait until that output has arrived
    0SEND_F2      start to send the output of 0F2;  0WAIT_SEND_F2 waits until it has left
    START(loss)   start a collective of the step;  WAIT(loss) waits for it

A *start* puts a transfer into its communicator's queue. The transfer begins after the computing
before the start is done and after all earlier transfers of the queue. Queues run beside the
computing. Both NCCL (a stream for each communicator) and gloo (threads) work this way.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from partc.errors import PlanError
from partc.schedules.actions import Action, Kind

COMPUTE, RECEIVE, RECEIVED, SEND, SENT, START, FINISHED = range(7)
FORWARD, BACKWARD = 0, 1  # which way a message goes: to the next stage or to the one before
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

# An event is a code and the number of an action (Wiring.number), of a message (Wiring.message) or
# of a collective. Plain integers, since thousands of microbatches make millions of events.
Event = tuple[int, int]

Sharing = Literal["channel", "pair", "both"]
_WORDS = {RECEIVE: "RECV", RECEIVED: "WAIT_RECV", SEND: "SEND", SENT: "WAIT_SEND"}
_TRANSFER = re.compile(r"(\d+)(WAIT_RECV|WAIT_SEND|RECV|SEND)_([FB])(\d+)")
_COLLECTIVE = re.compile(r"(START|WAIT)\((.+)\)")


class Communicator(NamedTuple):
    """A process group whose transfers run in one queue on every member, one after the other.

    A communicator of messages has two members.
    """

    name: str
    members: tuple[int, ...]


@dataclass(frozen=True)
class Collective:
    """A collective that the pipeline ranks in ``members`` run together once a step.

    A member starts the collective after its last forward (``after="F"``) or last backward of
    ``stages``; a member that runs none of ``stages`` starts it at the end of its step. A collective
    without ``stages`` closes the step: a rank runs all closing collectives one after the other, at
    the very end. Only ranks of this pipeline are members: the data-parallel replicas of a pipeline
    run the same program, so a reduction of a stage's gradients over ``dp`` has one member.
    Collectives of the same ``communicator`` start on every rank in the order of their declaration;
    None gives a collective a communicator of its own.
    """

    name: str
    stages: tuple[int, ...]
    members: tuple[int, ...]
    after: Literal["F", "B"] = "B"
    communicator: str | None = None


@dataclass(frozen=True)
class Wiring:
    """The rank of every stage, and the communicator of every message and collective.

    ``channels[message // microbatches]`` is the index of a message's communicator; -1 where the
    neighbouring stage is on the same rank or does not exist. ``collective_channels`` has the index
    of each collective's communicator. `lower` sets ``ahead``, the receives posted ahead of the last
    message taken, and ``bounds``, per communicator the sends that may be under way after a new one.
    """

    rank_of: tuple[int, ...]
    microbatches: int
    communicators: tuple[Communicator, ...]
    channels: tuple[int, ...]
    collectives: tuple[Collective, ...] = ()
    collective_channels: tuple[int, ...] = ()
    ahead: int = 0
    bounds: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def num_actions(self) -> int:
        return 4 * self.stages * self.microbatches

    @cached_property
    def num_messages(self) -> int:
        return 2 * self.stages * self.microbatches

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def number(self, action: Action) -> int:
        """The number of an action: ``(4 * stage + kind) * microbatches + microbatch``."""
        return (4 * action.stage + KINDS.index(action.kind)) * self.microbatches + action.microbatch

    def action(self, number: int) -> Action:
        row, microbatch = divmod(number, self.microbatches)
        return Action(row // 4, KINDS[row % 4], microbatch)

    def message(self, stage: int, way: int, microbatch: int) -> int:
        """The number of a stage's message to the next (FORWARD) or previous (BACKWARD) stage."""
        return (2 * stage + way) * self.microbatches + microbatch

    def channel(self, event: Event) -> int:
        """The index of the communicator of a transfer, given by its start or wait."""
        code, number = event
        if code in (START, FINISHED):
            return self.collective_channels[number]
        return self.channels[number // self.microbatches]

    def route(self, message: int) -> tuple[int, int]:
        """The ranks that send and receive a message."""
        stage, way = divmod(message // self.microbatches, 2)
        return self.rank_of[stage], self.rank_of[stage + (1 if way == FORWARD else -1)]

    def made(self, message: int) -> str:
        """A message as the action that makes the message, for example ``0F2``."""
        row, microbatch = divmod(message, self.microbatches)
        return f"{row // 2}{'FB'[row % 2]}{microbatch}"

    def text(self, event: Event) -> str:
        """An event as text, in the notation at the top of this file."""
        code, number = event
        if code == COMPUTE:
            return str(self.action(number))
        if code in (START, FINISHED):
            word = "START" if code == START else "WAIT"
            return f"{word}({self.collectives[number].name})"
        row, microbatch = divmod(number, self.microbatches)
        stage, way = divmod(row, 2)
        if code in (RECEIVE, RECEIVED):
            stage += 1 if way == FORWARD else -1
        return f"{stage}{_WORDS[code]}_{'FB'[way]}{microbatch}"

    def event(self, text: str) -> Event:
        """Read an event from text; PlanError if the text is no event, or if the event's stage,
        microbatch, collective or message does not exist."""
        if found := _COLLECTIVE.fullmatch(text):
            names = [collective.name for collective in self.collectives]
            if found[2] not in names:
                raise _unreadable(text, f"collectives are {names}")
            return (START if found[1] == "START" else FINISHED), names.index(found[2])
        if not (found := _TRANSFER.fullmatch(text)):
            action = Action.parse(text)
            self._check_inside(text, action.stage, action.microbatch)
            return COMPUTE, self.number(action)
        stage, microbatch, way = int(found[1]), int(found[4]), "FB".index(found[3])
        code = next(code for code, word in _WORDS.items() if word == found[2])
        if code in (RECEIVE, RECEIVED):
            stage -= 1 if way == FORWARD else -1
        self._check_inside(text, stage, microbatch)
        if self.channels[2 * stage + way] < 0:
            raise _unreadable(text, "the next stage is on the same rank, or there is none")
        return code, self.message(stage, way, microbatch)

    def _check_inside(self, text: str, stage: int, microbatch: int) -> None:
        if not (0 <= stage < self.stages and microbatch < self.microbatches):
            raise _unreadable(
                text, f"there are {self.stages} stages and {self.microbatches} microbatches"
            )


@dataclass(frozen=True)
class RankProgram:
    """The events of one pipeline rank in order; ``str`` is a line that ``parse_programs`` reads.

    ``lines`` has the generated source line of some events, by event index, for error messages.
    """

    rank: int
    events: tuple[Event, ...]
    wiring: Wiring = field(repr=False)
    lines: Mapping[int, str] = field(default_factory=dict, repr=False)

    @property
    def in_order(self) -> bool:
        """Whether the rank takes each communicator's messages in the order of their receives."""
        posted: dict[int, deque[int]] = defaultdict(deque)
        for event in self.events:
            if event[0] == RECEIVE:
                posted[self.wiring.channel(event)].append(event[1])
            elif event[0] == RECEIVED and posted[self.wiring.channel(event)].popleft() != event[1]:
                return False
        return True

    def texts(self) -> Iterator[str]:
        return map(self.wiring.text, self.events)

    def __str__(self) -> str:
        return " ".join(self.texts())

    def at(self, index: int) -> str:
        """Where an event stands, in words: ``event 3, 0SEND_F1``, with its source line if known."""
        return f"event {index}, {self.wiring.text(self.events[index])}{self.line(index)}"

    def line(self, index: int) -> str:
        """``, at 'put(y)'`` if the source line of the event is known, else ''."""
        return f", at {self.lines[index].strip()!r}" if index in self.lines else ""


def parse_programs(text: str, wiring: Wiring) -> tuple[RankProgram, ...]:
    """Read rank programs from text, one line per rank; PlanError names a word that is no event."""
    return tuple(
        RankProgram(rank, tuple(wiring.event(word) for word in line.split()), wiring)
        for rank, line in enumerate(text.splitlines())
    )


def wire(
    rank_of: Sequence[int],
    microbatches: int,
    *,
    communicators: Sharing = "channel",
    collectives: Sequence[Collective] = (),
) -> Wiring:
    """Give every message and collective its communicator.

    ``channel``: one for each stage boundary and direction. ``pair``: one for each ordered pair of
    ranks. ``both``: one for both directions between two ranks, which therefore block each other;
    `lower` never uses ``both``, which exists to examine programs that were written that way.
    """
    rank_of = tuple(rank_of)
    made = _Communicators()
    channels = []
    for stage, rank in enumerate(rank_of):
        for way in (FORWARD, BACKWARD):
            other = stage + 1 if way == FORWARD else stage - 1
            apart = 0 <= other < len(rank_of) and rank_of[other] != rank
            name = "FB"[way] + f" {stage}-{other}"
            channels.append(made.index(communicators, name, rank, rank_of[other]) if apart else -1)
    shared = [made.of_collective(collective) for collective in collectives]
    return Wiring(
        rank_of, microbatches, tuple(made.all), tuple(channels), tuple(collectives), tuple(shared)
    )


class _Communicators:
    def __init__(self) -> None:
        self.all: list[Communicator] = []

    def index(self, sharing: Sharing, channel: str, source: int, target: int) -> int:
        if sharing == "channel":
            return self._find(Communicator(channel, (source, target)))
        if sharing == "both":
            source, target = sorted((source, target))
        arrow = "-" if sharing == "both" else "->"
        return self._find(Communicator(f"rank {source}{arrow}{target}", (source, target)))

    def of_collective(self, collective: Collective) -> int:
        return self._find(
            Communicator(collective.communicator or collective.name, collective.members)
        )

    def _find(self, wanted: Communicator) -> int:
        if wanted not in self.all:
            self.all.append(wanted)
        return self.all.index(wanted)


def _unreadable(text: str, why: str) -> PlanError:
    return PlanError(
        where=f"rank program, event {text!r}",
        what="there is no such event",
        why=why,
        do="Write for example 0F2, 1RECV_F2, 1WAIT_RECV_F2, 0SEND_F2, 0WAIT_SEND_F2, START(loss).",
    )
