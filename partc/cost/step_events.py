"""The calls and transfers of a program as plain data, in order: what predictions walk.

A graph is read once; its tape is walked for any machines, and saved with the program. Equal calls,
transfers and runs of them are written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Code = Literal["c", "s", "l", "w"]
CALL: Code = "c"
START: Code = "s"  # of a transfer that is waited for by a wait of its own
LAST: Code = "l"  # the start of one that finishes gradients, which nothing reads within the step
WAIT: Code = "w"


class Call(NamedTuple):
    """A call that computes: what a roofline asks of it. ``work`` is as in ``Device.parts``; of
    matrix products the sizes of the result, and its bytes.
    """

    name: str
    work: str
    dtype: str
    flops: int
    num_bytes: int
    batch: int = 0
    rows: int = 0
    columns: int = 0
    written_bytes: int = 0

    def __str__(self) -> str:
        return " ".join(map(str, self if self.rows else self[:5]))

    @classmethod
    def parse(cls, text: str) -> Call:
        name, work, dtype, *numbers = text.split(" ")
        if len(numbers) not in (2, 6):
            raise ValueError(text)
        return cls(name, work, dtype, *map(int, numbers))


class Move(NamedTuple):
    """A collective: bytes that a rank puts in, and those that are copied before and after it."""

    kind: str
    axis: str
    put_in_bytes: int
    packed_bytes: int
    unpacked_bytes: int


class Event(NamedTuple):
    """Phase, what happens (``Code``), the number of its call or transfer, and for a start or a wait
    which transfer on its way is meant.
    """

    phase: str
    code: Code
    number: int
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.phase}{self.code}{self.number}" + (f".{self.mark}" if self.mark else "")

    @classmethod
    def parse(cls, text: str) -> Event:
        number, _, mark = text[2:].partition(".")
        code: dict[str, Code] = {each: each for each in (CALL, START, LAST, WAIT)}
        return cls(text[0], code[text[1]], int(number), mark)


@dataclass(frozen=True)
class Run:
    """Events in a row; gathers of parameters, which may begin earlier, stand apart."""

    gathers: tuple[Event, ...]
    events: tuple[Event, ...]
    is_backward: bool


class Place(NamedTuple):
    """A run in the program: in which block, or phase, it stands, and how often."""

    label: str
    run: int
    times: int


@dataclass(frozen=True)
class StepEvents:
    """One rank's step, or what it does with one stage; between two blocks' runs it starts the
    gathers of ``prefetch`` of the next.
    """

    calls: tuple[Call, ...] = ()
    moves: tuple[Move, ...] = ()
    runs: tuple[Run, ...] = ()
    order: tuple[Place, ...] = ()
    prefetch: int = 1

    def unrolled(self) -> Iterator[tuple[str, Run]]:
        """The runs in the order in which they are executed, each with its label."""
        for label, number, times in self.order:
            for _ in range(times):
                yield label, self.runs[number]

    def as_json(self) -> dict[str, Any]:
        """Plain data, a line of text for each entry."""
        return {
            "calls": list(map(str, self.calls)),
            "moves": [" ".join(map(str, move)) for move in self.moves],
            "runs": [[int(r.is_backward), _texts(r.gathers), _texts(r.events)] for r in self.runs],
            "order": [f"{run} {times} {label}" for label, run, times in self.order],
            "prefetch": self.prefetch,
        }

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> StepEvents:
        """From what ``as_json`` gave; KeyError, ValueError and their like if it is malformed."""
        moves = (text.split(" ") for text in data["moves"])
        order = (text.split(" ", 2) for text in data["order"])
        return cls(
            calls=tuple(map(Call.parse, data["calls"])),
            moves=tuple(Move(k, a, int(i), int(p), int(u)) for k, a, i, p, u in moves),
            runs=tuple(Run(_events(g), _events(e), bool(back)) for back, g, e in data["runs"]),
            order=tuple(Place(label, int(run), int(times)) for run, times, label in order),
            prefetch=int(data["prefetch"]),
        )


def _texts(events: tuple[Event, ...]) -> str:
    return " ".join(map(str, events))


def _events(text: str) -> tuple[Event, ...]:
    return tuple(map(Event.parse, text.split()))
