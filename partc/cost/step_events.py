"""The calls and transfers of a program in order, as plain data from which times are predicted.

A graph is recorded once. Its StepEvents are saved with the program, and give the time of a step on
any machines. Equal calls, transfers and runs are stored once and referred to by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from partc.cost.sites import NOWHERE, Site, Sites, block_of, member, moved

Code = Literal["c", "s", "l", "w"]
CALL: Code = "c"
START: Code = "s"  # of a transfer that has a WAIT
LAST: Code = "l"  # of a transfer that finishes gradients: nothing in the step reads them, no WAIT
WAIT: Code = "w"
PHASES = ("S", "F", "B", "W", "E")  # in the order of a stage; older files label runs by them


class Call(NamedTuple):
    """A call that computes, with what the roofline model needs: FLOPs, bytes moved, kind of work.

    ``work`` is as in ``Device.parts``. The sizes and bytes of the result are given for matrix
    products only. As text: ``aten.mm matmul f32 4096 768 1 16 16 1024``.
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
    """A collective: the bytes of one rank's operands, and those copied before and after it."""

    kind: str
    axis: str
    put_in_bytes: int
    packed_bytes: int
    unpacked_bytes: int


class Event(NamedTuple):
    """A call, a start or a wait (``code``) in a phase, as text ``Fc12`` or ``Bs3.0``.

    ``number`` is the index in ``StepEvents.calls`` or ``moves``. ``mark`` names the transfer of a
    start or a wait, as several equal ones may be under way.
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
    """The events of consecutive calls of one block or phase.

    ``gathers``: the starts of gathers of parameters, which a program may start before the run.
    ``closing``: the waits for its gradients where a microbatch adds these to those before it, and
    the additions. A program has them behind the backward of the next block.
    """

    gathers: tuple[Event, ...]
    events: tuple[Event, ...]
    is_backward: bool
    closing: tuple[Event, ...] = ()


class Place(NamedTuple):
    """A run in the program's order: the block or phase it stands in, its index, its repetitions."""

    label: str
    run: int
    times: int


class Execution(NamedTuple):
    """One execution of a run: the block as the model numbers it, and where each event comes from.

    ``sites`` has the gathers' entries first, then those of the run's events and of what closes it;
    empty where the program was saved without them.
    """

    label: str
    run: Run
    sites: tuple[Site, ...] = ()

    def gathers(self) -> Iterator[tuple[Event, Site]]:
        """The starts of gathers of parameters, each with its site."""
        return self._with_sites(self.run.gathers, 0)

    def events(self) -> Iterator[tuple[Event, Site]]:
        """The run's own events in order, each with its site."""
        return self._with_sites(self.run.events, len(self.run.gathers))

    def closing(self) -> Iterator[tuple[Event, Site]]:
        """The waits for the run's gradients and their additions, each with its site."""
        first = len(self.run.gathers) + len(self.run.events)
        return self._with_sites(self.run.closing, first)

    def _with_sites(self, events: tuple[Event, ...], first: int) -> Iterator[tuple[Event, Site]]:
        sites = self.sites[first : first + len(events)] or (NOWHERE,) * len(events)
        return zip(events, sites, strict=True)


@dataclass(frozen=True)
class StepEvents:
    """The events of one rank's step, or of one pipeline stage.

    ``prefetch``: of how many following blocks the parameters are gathered ahead between two loops
    over blocks. ``sites``: from which calls of the model the events come.
    """

    calls: tuple[Call, ...] = ()
    moves: tuple[Move, ...] = ()
    runs: tuple[Run, ...] = ()
    order: tuple[Place, ...] = ()
    prefetch: int = 1
    sites: Sites = field(default_factory=Sites)

    def unrolled(self) -> Iterator[Execution]:
        """Every execution in order; a repeated run comes once for each block it stands for.

        The graph has one of several equal blocks, the first. Forwards count on from its number,
        backwards come back to it. A phase of a pipeline stage is no block: its sites name one.
        """
        for at, (label, number, times) in enumerate(self.order):
            run, sites = self.runs[number], self.sites.of(at)
            block = block_of(sites) if label in PHASES and times > 1 else label
            for turn in range(times):
                here = member(block, times - 1 - turn if run.is_backward else turn)
                yield Execution(here if block == label else label, run, moved(sites, block, here))

    def as_json(self) -> dict[str, Any]:
        """The events as plain data, one string per call, transfer and run."""
        return {
            "calls": list(map(str, self.calls)),
            "moves": [" ".join(map(str, move)) for move in self.moves],
            "runs": [_run_texts(run) for run in self.runs],
            "order": [f"{run} {times} {label}" for label, run, times in self.order],
            "prefetch": self.prefetch,
            "sites": self.sites.as_json(),
        }

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> StepEvents:
        """StepEvents from the data of ``as_json``; KeyError, ValueError and alike if malformed."""
        moves = (text.split(" ") for text in data["moves"])
        order = (text.split(" ", 2) for text in data["order"])
        return cls(
            calls=tuple(map(Call.parse, data["calls"])),
            moves=tuple(Move(k, a, int(i), int(p), int(u)) for k, a, i, p, u in moves),
            runs=tuple(
                Run(_events(gathers), _events(events), bool(back), *map(_events, closing))
                for back, gathers, events, *closing in data["runs"]
            ),
            order=tuple(Place(label, int(run), int(times)) for run, times, label in order),
            prefetch=int(data["prefetch"]),
            sites=Sites.of_json(data.get("sites", {})),
        )


def _run_texts(run: Run) -> list[int | str]:
    closing = [_texts(run.closing)] if run.closing else []
    return [int(run.is_backward), _texts(run.gathers), _texts(run.events), *closing]


def _texts(events: tuple[Event, ...]) -> str:
    return " ".join(map(str, events))


def _events(text: str) -> tuple[Event, ...]:
    return tuple(map(Event.parse, text.split()))
