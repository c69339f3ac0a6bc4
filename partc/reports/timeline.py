"""The time line of a predicted step for a report: streams of bars, each with its line and origin.

Names and places are stored once and referred to by number, since a large model's step has ten
thousands of bars.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partc.cost.roofline import BLOCKS, COMPUTE
from partc.dryrun.program_trace import ProgramTrace, program_trace
from partc.graph.folds import list_member
from partc.machines.what_if import Change
from partc.program import Program
from partc.program.role import Role
from partc.reports.linked import Bar, LinkedStep, Point, linked_step
from partc.reports.other_machines import stage_step
from partc.reports.step_streams import waits_of

NS_PER_S = 1e9
TRANSFERS = "transfers"
RANKS = "ranks"  # of streams with the actions of a pipeline rank
MEASURED = "measured"  # of streams that a bench has timed
MOST_POINTS = 4000  # of a memory curve: more than a screen has columns
Json = dict[str, Any]


@dataclass(frozen=True)
class HeldLine:
    """Bytes that are live at the peak, with the program's line and the user's call of it."""

    line: int
    text: str
    module: str
    source: str
    num_bytes: int


@dataclass(frozen=True)
class Stream:
    """One row of the time line: of blocks, of computing, of transfers, or of a pipeline rank."""

    name: str
    kind: str
    file: str
    bars: tuple[Bar, ...]
    axis: str = ""  # of transfers


@dataclass(frozen=True)
class Timeline:
    """The streams of a rank, the memory it holds over time, and who holds it at the peak.

    ``kept_bytes``: parameters, optimizer states, buffers and inputs, which the curve counts too.
    ``calls_until_s``: until when calls are shown, where all would be too many for a page.
    """

    file: str
    streams: tuple[Stream, ...]
    curve: tuple[Point, ...]
    kept_bytes: int
    holders: tuple[HeldLine, ...]
    orders_agree: bool
    moved: Mapping[str, Sequence[int]]  # axis -> the bytes of each transfer
    memory_of: str = "every rank"
    calls_until_s: float | None = None

    @property
    def end_s(self) -> float:
        return max((bar.end_s for each in self.streams for bar in each.bars), default=0.0)

    def traffic(self, axis: str) -> Json:
        """How many transfers a rank starts over an axis in a step, and the bytes it puts in."""
        sizes = self.moved.get(axis, ())
        return {"transfers": len(sizes), "bytes": sum(sizes)}

    def as_json(self) -> Json:
        """Columns of numbers per stream: times in nanoseconds, others as indices of ``calls``."""
        calls = Numbers()
        streams = [columns(each, calls) for each in self.streams]
        return {
            "file": self.file, "end_s": self.end_s, "calls_until_s": self.calls_until_s,
            "orders_agree": self.orders_agree,
            "streams": streams, "calls": [list(call) for call in calls.known],
            "lines": list(_by_line(self.streams)), "memory": self._memory(),
        }  # fmt: skip

    def _memory(self) -> Json:
        points = thinned(self.curve, MOST_POINTS)
        return {
            "at_ns": _steps([point.at_s for point in points]),
            "bytes": [point.num_bytes + self.kept_bytes for point in points],
            "kept_bytes": self.kept_bytes,
            "of": self.memory_of,
            "peak_bytes": self.kept_bytes + max((p.num_bytes for p in points), default=0),
        }


@dataclass
class Numbers:
    """Gives equal entries one number each."""

    known: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def of(self, entry: tuple[str, str, str]) -> int:
        return self.known.setdefault(entry, len(self.known))


def timeline_of(program: Program, where: str) -> Timeline:
    """The time line of the predicted step of a program without pipeline stages."""
    step = stage_step(program, Change(), where)
    role, library = program.role(0), step.mesh.hardware.library
    trace = program_trace(role, library=library)
    linked = linked_step(step.boxes, waits_of(program.basis.tapes[0], step.mesh), trace)
    cost = program.cost.as_json()
    return Timeline(
        file=program.role_of(0),
        streams=tuple(_streams(linked, program.mesh.names, program.role_of(0))),
        curve=linked.curve,
        kept_bytes=cost["peak_bytes"] - cost["live_bytes"],
        holders=tuple(held_lines(trace, role, program.source(0))),
        orders_agree=linked.orders_agree,
        moved={
            axis: [each.num_bytes for each in step.boxes if each.stream == axis]
            for axis in program.mesh.names
        },
    )


def _streams(step: LinkedStep, axes: Sequence[str], file: str) -> Iterator[Stream]:
    for name in (BLOCKS, COMPUTE, *axes):
        bars = tuple(bar for bar in step.bars if bar.box.stream == name)
        if bars:
            kind = name if name in (BLOCKS, COMPUTE) else TRANSFERS
            axis = name if kind == TRANSFERS else ""
            yield Stream(f"over {name}" if axis else name, kind, file, bars, axis)


def held_lines(trace: ProgramTrace, role: Role, source: str) -> Iterator[HeldLine]:
    text = source.splitlines()
    for line, num_bytes in trace.holders:
        module, called = role.lines.of.get(line, ("", ""))
        code = text[line - 1].partition("  #")[0].strip() if 0 < line <= len(text) else ""
        yield HeldLine(line, code, module, called, num_bytes)


def columns(stream: Stream, calls: Numbers) -> Json:
    """A row of the time line as columns of numbers; ``calls`` numbers what bars do."""
    bars = sorted(stream.bars, key=lambda bar: bar.box.begin_s)
    return {
        "name": stream.name,
        "kind": stream.kind,
        "axis": stream.axis,
        "file": stream.file,
        "begin_ns": _steps([bar.box.begin_s for bar in bars]),
        "ns": [_ns(bar.box.seconds) for bar in bars],
        "waits_ns": [_ns(bar.waits_s) for bar in bars] if stream.kind in (TRANSFERS, RANKS) else [],
        "bytes": [bar.box.num_bytes for bar in bars] if stream.kind == TRANSFERS else [],
        "line": [bar.line for bar in bars] if stream.kind not in (BLOCKS, MEASURED) else [],
        "layer": [_layer(bar) for bar in bars],
        "call": [calls.of(_call(bar)) for bar in bars],
    }


def _call(bar: Bar) -> tuple[str, str, str]:
    """What a bar does, its module with ``*`` for the layer's number, and the user's line."""
    module = _module(bar)
    path, number = list_member(module)
    inside = module.removeprefix(f"{path}.{number}") if path else ""
    return bar.box.name, f"{path}.*{inside}" if path else module, bar.box.site.source


def _module(bar: Bar) -> str:
    """The module that a bar is of; of a pipeline's action the action."""
    return bar.box.block if bar.box.stream in (BLOCKS, RANKS) else bar.box.site.module


def _layer(bar: Bar) -> int:
    """The number of the layer that a bar belongs to, -1 outside of layers."""
    path, number = list_member(_module(bar))
    return number if path else -1


def _by_line(streams: Sequence[Stream]) -> Iterator[Json]:
    """Per line of the program its transfers: how many, over which axis, how long and exposed."""
    found: dict[tuple[str, int], list[Bar]] = {}
    for stream in streams:
        for bar in stream.bars if stream.kind == TRANSFERS else ():
            found.setdefault((stream.file, bar.line), []).append(bar)
    for (file, line), bars in sorted(found.items()):
        yield {
            "file": file, "line": line, "axis": bars[0].box.stream, "kind": bars[0].box.name,
            "transfers": len(bars), "seconds": sum(bar.box.seconds for bar in bars),
            "waits_s": sum(bar.waits_s for bar in bars),
            "bytes": sum(bar.box.num_bytes for bar in bars),
        }  # fmt: skip


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def _steps(times: Sequence[float]) -> list[int]:
    """Times as whole nanoseconds, each as its difference from the one before."""
    whole = [_ns(each) for each in times]
    return [now - before for now, before in zip(whole, [0, *whole], strict=False)]


def thinned(curve: Sequence[Point], most: int) -> list[Point]:
    """A curve with few points, of which each has the most bytes of those it stands for."""
    each = -(-len(curve) // most) if curve else 1
    parts = (curve[i : i + each] for i in range(0, len(curve), each))
    return [Point(part[-1].at_s, max(point.num_bytes for point in part)) for part in parts]
