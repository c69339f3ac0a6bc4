"""Programs beside each other, and one program on other numbers of devices and other machines.

A point of the comparison is a saved program, as predicted, or what the search estimates for a
program's plan elsewhere. Times are by sample, so that programs of several batch sizes compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partc.amounts import amount, time_text
from partc.cost.cost_parts import peak_memory
from partc.cost.prediction import Prediction
from partc.errors import PartcError, UsageError
from partc.machines.objective import Batch, per_million
from partc.machines.topology import Topology
from partc.passes.search.plans.alternatives import grown
from partc.passes.search.plans.search_plans import Ranked, Search, Taken
from partc.program import Program
from partc.reports.explanation import columns

SCHEMA = 1
PREDICTED, ESTIMATED = "predicted", "estimated"
HOURS = "device-hours"
S_PER_HOUR, MILLION = 3600.0, 1e6


@dataclass(frozen=True)
class Compared:
    """A program, or a plan elsewhere: what a step takes of time, devices, memory and money.

    ``dollars``: of a million samples or tokens; None where a device has no price.
    """

    name: str
    how: str
    plan: str
    machine: str
    devices: int
    step_s: float
    batch: Batch
    peak_bytes: int
    dollars: float | None

    @property
    def per_s(self) -> float:
        """Samples or tokens in a second, of all devices together."""
        return self.batch.size / self.step_s if self.step_s else 0.0

    @property
    def device_hours(self) -> float:
        """Hours of a device, of a million samples or tokens."""
        return self.devices / self.per_s / S_PER_HOUR * MILLION if self.per_s else 0.0


@dataclass(frozen=True)
class Comparison:
    """Several points; ``left_out`` says where no plan fits, and why."""

    points: tuple[Compared, ...]
    left_out: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        return self.points[0].batch.unit

    @property
    def base(self) -> Compared:
        """What speed-ups are relative to: of the fewest devices the fastest point."""
        return min(self.points, key=lambda each: (each.devices, -each.per_s))

    def speed_up(self, one: Compared) -> float:
        return one.per_s / self.base.per_s if self.base.per_s else 0.0

    @property
    def in_dollars(self) -> bool:
        return all(each.dollars is not None for each in self.points)

    def cost(self, one: Compared) -> float:
        """Dollars of a million samples or tokens; device-hours where a price is missing."""
        return one.dollars or 0.0 if self.in_dollars else one.device_hours

    @property
    def front(self) -> tuple[Compared, ...]:
        """The points than which no other is both faster and cheaper (Pareto), fastest first."""
        found: list[Compared] = []
        for each in sorted(self.points, key=lambda point: (-point.per_s, self.cost(point))):
            if not found or self.cost(each) < self.cost(found[-1]):
                found.append(each)
        return tuple(found)

    def __str__(self) -> str:
        cost = f"$ per M {self.unit}" if self.in_dollars else f"{HOURS} per M {self.unit}"
        head = ("", "", "devices", "step", f"{self.unit}/s", "speed-up", "efficiency", "peak", cost)
        rows = [head, *map(self._row, self.points)]
        told = columns(rows, right=range(2, len(head)))
        front = "* on the Pareto front: no other is both faster and cheaper"
        return "\n".join([*told, "", front, *self.left_out])

    def _row(self, one: Compared) -> tuple[str, ...]:
        faster = self.speed_up(one)
        ideal = one.devices / self.base.devices
        return (
            f"{'*' if one in self.front else ' '} {one.name}", one.how, str(one.devices),
            _time(one.step_s), f"{one.per_s:,.4g}", f"{faster:.2f}", f"{faster / ideal:.0%}",
            amount(one.peak_bytes, "B"), f"{self.cost(one):.3g}",
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """The numbers as plain data, in seconds and bytes."""
        return {
            "schema": SCHEMA, "unit": self.unit, "base": self.base.name,
            "cost": "dollars" if self.in_dollars else HOURS,
            "points": [
                {
                    **{name: entry for name, entry in vars(each).items() if name != "batch"},
                    "batch": each.batch.size, "per_s": each.per_s,
                    "speed_up": self.speed_up(each), "cost": self.cost(each),
                    "on_front": each in self.front,
                }
                for each in self.points
            ],
            "left_out": list(self.left_out),
        }  # fmt: skip


def comparison(
    programs: Mapping[str, Program], devices: Sequence[int] = (), machines: Sequence[str] = ()
) -> Comparison:
    """Compare programs by their names; with ``devices`` or ``machines`` estimate each elsewhere.

    Args:
        programs: by the name under which each is shown.
        devices: numbers of devices to estimate each program's plan for.
        machines: names of machines that come with partc, such as ``"dgx-h100"``.

    Raises:
        UsageError: a program has no prediction, or is to be estimated and the search cannot
            express its plan; nothing fits anywhere; batches count different things.
    """
    sweeps = bool(devices or machines)
    points: list[Compared] = []
    left_out: list[str] = []
    for name, program in programs.items():
        if not sweeps:
            points.append(_predicted(name, program))
            continue
        for found in _elsewhere(name, program, devices, machines):
            if isinstance(found, str):
                left_out.append(found)
            else:
                points.append(found)
    units = {each.batch.unit for each in points}
    if not points or len(units) > 1:
        raise UsageError(
            where=", ".join(programs), what="there is nothing to compare",
            why="; ".join(left_out) if not points else f"some count {' and some '.join(units)}",
            do="Name other programs, devices or machines.",
        )  # fmt: skip
    return Comparison(tuple(points), tuple(left_out))


def own_step(name: str, program: Program) -> Prediction:
    """The prediction that was saved with a program; UsageError without one."""
    cost = program.cost.as_json() or {}
    if not cost.get("prediction"):
        raise UsageError(
            where=name, what="it has no prediction of its step",
            why="it was not made by partc.compile", do="Compile the model again.",
        )  # fmt: skip
    return Prediction.of_json(cost["prediction"])


def _predicted(name: str, program: Program) -> Compared:
    step, topology = own_step(name, program), program.basis.topology()
    batch, cost = step.work.batch, program.cost.as_json()
    preset = str(program.mesh) or "one device"
    return Compared(
        name, PREDICTED, preset, topology.name, program.mesh.num_ranks, step.seconds, batch,
        peak_memory(cost)[0],
        per_million("dollars", step.seconds, program.mesh.num_ranks, topology, batch),
    )  # fmt: skip


def _elsewhere(
    name: str, program: Program, devices: Sequence[int], machines: Sequence[str]
) -> Iterator[Compared | str]:
    """A program's plan on each machine and number of devices; a sentence where nothing fits."""
    taken = program.basis.taken
    if taken is None:
        raise UsageError(
            where=name, what="nothing estimates it on other machines",
            why="the plan is none that the search knows",
            do="Compile for each of them, and compare the folders.",
        )  # fmt: skip
    own = taken.search.mesh.hardware
    for machine in machines or [""]:
        base = Topology.load(machine) if machine else own
        for number in devices or [program.mesh.num_ranks]:
            label = f"{name}, {machine or own.name} x {number}"
            yield _estimated(label, taken, base, number, own_step(name, program).work.batch)


def _estimated(
    label: str, taken: Taken, base: Topology, number: int, batch: Batch
) -> Compared | str:
    try:
        there = taken.search.on(base.resized(number))
        found = there.best() if taken.searched else grown(taken.candidate, there)
    except PartcError as error:
        return f"{label}: {error.what}"
    if found is None:
        return f"{label}: no plan fits there"
    return _of_estimate(label, there, found, batch)


def _of_estimate(label: str, there: Search, found: Ranked, batch: Batch) -> Compared:
    machine, estimate = there.mesh.hardware, found.estimate
    number = machine.num_devices
    return Compared(
        label, ESTIMATED, str(found.candidate), machine.name, number, estimate.step_s, batch,
        round(estimate.peak_bytes),
        per_million("dollars", estimate.step_s, number, machine, batch),
    )  # fmt: skip


def _time(seconds: float) -> str:
    return time_text(float(f"{seconds:.4g}"))
