"""Turn measurements into a topology (mesh.toml), or refuse the ones that cannot be right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from partc.cost.collective_cost import OF_LIBRARY
from partc.errors import PlanError, RunError
from partc.machines.collective_formulas import FORMULAS, Group
from partc.machines.devices import WORK, Device, Points
from partc.machines.topology import COLLECTIVES, Level, Topology
from partc.machines.topology_text import shipped
from partc.measure.measured import Line, Measured, fit_line

SHEET = 10  # a rate above so many times the data sheet's is refused
FITS = 4.0  # times that differ by a larger factor from their line are refused
NUM_NAMED = 3
LEVELS = ("node", "between nodes")
WATTS = {"gloo": 15.0, "nccl": 500.0}  # assumed of a device
BYTES_OF = ("pointwise", "functions", "optimizer")
DIGITS = 4
LEAST_PART = 0.1  # of a small call's time that counts as work, not as overhead


@dataclass(frozen=True)
class Found:
    """Everything that was measured.

    ``sizes``: ranks (or units) per group of each level, innermost first. ``links``: the collectives
    of each level. ``beside``: the result of ``calibrate_links.measure_contention``.
    """

    name: str
    library: str
    device: str
    memory_bytes: int
    ranks: int
    sizes: tuple[int, ...]
    compute: tuple[Measured, ...]
    links: tuple[tuple[Measured, ...], ...] = ()
    beside: tuple[Measured, ...] = ()
    sharing: tuple[Measured, ...] = ()

    def of(self, work: str) -> list[Measured]:
        """The measurements of one kind of work, smallest amount first."""
        return sorted((m for m in self.compute if m.work == work), key=lambda m: m.amount)

    def everything(self) -> list[Measured]:
        links = (measured for level in self.links for measured in level)
        return [*self.compute, *links, *self.beside, *self.sharing]

    def lines(self, level: int) -> dict[str, Line]:
        """The fitted line (latency, bandwidth) of each collective over a level."""
        return _lines(self.links[level], LEVELS[level])


@dataclass(frozen=True)
class Fitted:
    """A topology, and its measurements as comments; ``str`` is a mesh.toml."""

    topology: Topology
    comments: tuple[str, ...]

    def __str__(self) -> str:
        return "".join(f"# {line}\n" for line in self.comments) + str(self.topology)


# refusing -----------------------------------------------------------------------------------------
def check_found(found: Found, keep_noisy: bool = False) -> None:
    """RunError for rates that no machine has, and without ``keep_noisy`` for noisy ones."""
    sheet = _sheet(found)
    most = _rates(sheet) if sheet else {}
    for each in found.everything():
        if each.work in most and each.rate > SHEET * most[each.work]:
            raise RunError(
                where=f"calibrate, {each.work} {each.what}",
                what=f"{each.rate:.3g}/s cannot be",
                why=f"the data sheet of {sheet.name if sheet else ''} has {most[each.work]:.3g}/s",
                do="Check the clock of this machine, and that its devices do what they are told.",
            )
    noisy = [each for each in found.everything() if each.is_noisy]
    off = [text for level in found.links for text in lines_off(level)]
    if (noisy or off) and not keep_noisy:
        told = [f"{each.work} {each.what} by {each.spread:.0%}" for each in noisy]
        raise RunError(
            where="calibrate",
            what=f"{len(noisy) + len(off)} of {len(found.everything())} measurements vary too much",
            why="; ".join((told + off)[:NUM_NAMED]),
            do="Measure while nothing else runs, or keep them, marked: --keep-noisy.",
        )


def lines_off(level: Sequence[Measured]) -> list[str]:
    """A text per collective of a level whose times fit no straight line over the bytes."""
    return [
        f"{kind} is up to {line.worst:.1f} times off a straight line"
        for kind, line in _lines(level, "links").items()
        if line.worst > FITS
    ]


def _lines(level: Sequence[Measured], name: str) -> dict[str, Line]:
    points = defaultdict(list)
    for each in level:
        points[each.work].append((each.amount, each.seconds))
    return {kind: fit_line(f"{kind}, {name}", points[kind]) for kind in COLLECTIVES}


def _sheet(found: Found) -> Topology | None:
    """The shipped topology with the measured devices; None if there is none."""
    if found.library == "gloo":
        return Topology.load("cpu")
    machines = (Topology.load(name) for name in shipped())
    words = found.device.split()
    return next((each for each in machines if each.device.name.split()[0] in words), None)


def _rates(sheet: Topology) -> dict[str, float]:
    """A machine's rate of each kind of work (FLOP/s, bytes/s), from its data sheet."""
    device, link = sheet.device, max(level.bytes_per_s for level in sheet.levels)
    return {
        "matmul f32": device.peak("f32"),
        **dict.fromkeys(BYTES_OF, device.memory_bytes_per_s),
        **dict.fromkeys(COLLECTIVES, link),
    }


# fitting ------------------------------------------------------------------------------------------
def fitted_topology(found: Found) -> Fitted:
    """The topology that fits the measurements; RunError if its numbers would be impossible."""
    levels = [found.lines(number) for number in range(len(found.links))]
    try:
        return Fitted(_topology(found, levels), tuple(_comments(found, levels)))
    except PlanError as error:  # what a mesh.toml may not say
        raise RunError(
            where=f"calibrate, {error.where}",
            what=f"what was measured would need a machine that cannot be: {error.what}",
            why=error.why,
            do="Measure again while nothing else runs on these machines.",
        ) from error


def _topology(found: Found, levels: Sequence[dict[str, Line]]) -> Topology:
    start_s = _start_s(levels[0], found) if levels else 0.0
    return Topology(
        name=found.name,
        groups=((_device(found), found.ranks),),
        levels=tuple(
            _level(LEVELS[number], size, lines, start_s, found.library)
            for number, (size, lines) in enumerate(zip(found.sizes, levels, strict=True))
        )
        or (_alone(found),),
        start_s=start_s,
        contention=_share(found.beside[:3]),
        skew=_share(found.beside[3:]),
        sharing=_sharing(found.sharing),
        library=found.library,
    )


def _device(found: Found) -> Device:
    peaks = {
        work.split()[1]: max(each.rate for each in found.of(work))
        for work in dict.fromkeys(each.work for each in found.compute)
        if work.startswith("matmul")
    }
    bandwidth = max(each.rate for work in BYTES_OF for each in found.of(work))
    on_host = found.library == "gloo"  # where the processor that computes makes the calls
    launch_s = found.of("launch")[0].seconds
    call_s = launch_s if on_host else 0.0
    measured = {"matmul": found.of("matmul f32")} | {work: found.of(work) for work in WORK[1:]}
    return Device(
        name=found.device,
        memory_bytes=found.memory_bytes,
        memory_bytes_per_s=_short(bandwidth),
        flops_per_s={dtype: _short(peak) for dtype, peak in peaks.items()},
        launch_s=0.0 if on_host else _short(launch_s),
        call_s=_short(call_s),
        watts=WATTS[found.library],
        efficiency={
            work: _points(each, _short(bandwidth if work in BYTES_OF else peaks["f32"]), call_s)
            for work, each in measured.items()
        },
    )


def _points(measured: Sequence[Measured], peak: float, call_s: float) -> Points:
    """The fraction of the peak that each amount of work reaches, without the call's overhead.

    Times are raised where needed, so that more work never takes less time.
    """
    taken = [max(each.seconds - call_s, LEAST_PART * each.seconds) for each in measured]
    seconds = taken[:1]
    for (less, _), (each, own) in pairwise(zip(measured, taken, strict=True)):
        least = seconds[-1] * (1 + 10**-DIGITS)
        seconds.append(max(own, least if each.amount > less.amount else 0.0))
    return tuple(
        (float(each.amount), min(1.0, each.amount / s / peak))
        for each, s in zip(measured, seconds, strict=True)
    )


def _steps(kind: str, size: int, library: str) -> tuple[float, float]:
    """The number of link latencies in a collective, and how often its bytes cross a link.

    For the library's first algorithm over a level of ``size`` units.
    """
    group = Group.of((Level("unit", size, 1.0, 1.0),), (size,))
    line = FORMULAS[kind][OF_LIBRARY[library][kind][0]](group)
    assert line is not None  # the first of a library can always be done
    return line


def _start_s(lines: dict[str, Line], found: Found) -> float:
    """Seconds to start a collective: the latency left at 0 steps, by a line over the step counts.

    0 if latencies do not grow with the number of steps.
    """
    points = [
        (_steps(kind, found.sizes[0], found.library)[0], line.latency_s)
        for kind, line in lines.items()
    ]
    try:
        return _short(fit_line("latencies", points).latency_s)
    except RunError:
        return 0.0


def _level(name: str, size: int, lines: dict[str, Line], start_s: float, library: str) -> Level:
    """A level with the bandwidth of its fastest collective; the others differ by ``factors``."""
    steps = {kind: _steps(kind, size, library) for kind in lines}
    step_s = [(line.latency_s - start_s) / steps[kind][0] for kind, line in lines.items()]
    least = min(line.latency_s / steps[kind][0] for kind, line in lines.items())
    latency_s = _short(max(median(step_s), 0.1 * least))
    bytes_per_s = _short(max(steps[kind][1] / line.s_per_byte for kind, line in lines.items()))
    return Level(
        name=name,
        size=size,
        bytes_per_s=bytes_per_s,
        latency_s=latency_s,
        factors={
            kind: (
                _short(line.latency_s / (start_s + steps[kind][0] * latency_s)),
                _short(line.s_per_byte * bytes_per_s / steps[kind][1]),
            )
            for kind, line in lines.items()
        },
    )


def _alone(found: Found) -> Level:
    """The level of a single rank, which has no links; no prediction depends on its numbers."""
    launch = found.of("launch")[0].seconds
    return Level(LEVELS[0], 1, _short(max(m.rate for m in found.of("pointwise"))), _short(launch))


def _share(measured: Sequence[Measured]) -> float:
    """Contention or skew, between 0 and 1, from three measurements; 0 without any.

    Contention, the part of a transfer's time that computing beside it loses: (both - computing) /
    transfer. Skew, the wait of ranks that meet often: (meeting - meeting at the end) / computing.
    """
    if not measured:
        return 0.0
    turns = zip(*(each.samples for each in measured), strict=True)
    lost = median((longer - shorter) / base for base, shorter, longer in turns)
    return _short(min(1.0, max(0.0, lost)))


def _sharing(measured: Sequence[Measured]) -> float:
    """How many times faster a rank computes while the others wait; 1 if within the spread."""
    if not measured:
        return 1.0
    together, alone = measured
    faster = together.seconds / alone.seconds
    return _short(faster) if faster > 1 + together.spread + alone.spread else 1.0


def _comments(found: Found, levels: Sequence[dict[str, Line]]) -> Iterable[str]:
    yield f"Measured by `partc calibrate`: {found.ranks} ranks, all at once, {found.library}, torch"
    yield f"{torch.__version__}. Medians; the spread is that of the middle half of the samples."
    yield "The watts are assumed."
    for each in found.everything():
        yield f"{each}{', NOISY' if each.is_noisy else ''}"
    for number, lines in enumerate(levels):
        for kind, line in lines.items():
            took = f"{1e6 * line.latency_s:.4g} us + n / ({1e-6 / line.s_per_byte:.4g} MB/s)"
            yield f"{kind}, {LEVELS[number]}: {took}, off by {line.worst - 1:.0%} at most"


def _short(number: float) -> float:
    """A number rounded to the ``DIGITS`` that a measurement is good for."""
    return float(f"{number:.{DIGITS}g}")
