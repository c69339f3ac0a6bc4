"""Predicted beside measured: step time and peak memory of many layouts of one model on gloo ranks.

Run ``python -m benchmarks.predicted`` on a quiet machine. For each number of ranks the machine is
calibrated, every layout compiled for what was found, and all of them take turns in the same
processes; what ``plan="auto"`` chooses for these ranks is among them. Nothing is fitted to the
measured steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from scipy.stats import spearmanr

import partc
from benchmarks import partc_side
from benchmarks.machine import machine
from benchmarks.measure import peak_bytes, sample
from benchmarks.workload import SIZES, Pipeline, Size, reference
from partc.machines.topology import Topology
from partc.measure.calibrate import calibrate
from partc.measure.resident import free_at_once
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.verification.processes import Processes

WARM_UP = 2  # steps before the first that counts
TIMEOUT_S = 900.0
GOAL_CORRELATION, GOAL_MEMORY, GOAL_AUTO = 0.9, 0.03, 0.03


@dataclass(frozen=True)
class Layout:
    """A mesh, a plan, and for a pipeline its cut; or so many ranks for partc to choose them."""

    mesh: str
    plan: str
    cut: Pipeline | None = None
    auto_ranks: int = 0

    @property
    def num_ranks(self) -> int:
        return self.auto_ranks or Mesh.of(self.mesh).num_ranks

    def on(self, topology: Topology) -> Mesh:
        """Its mesh on a machine; for auto the machine alone."""
        return Mesh(() if self.auto_ranks else Mesh.of(self.mesh).axes, topology)

    def name(self, program: Program) -> str:
        """Mesh, plan and schedule of what was compiled."""
        if self.auto_ranks:
            plan = Plan.parse(program.plan)
            turns = f" {plan.schedule} x{plan.microbatches}" if plan.microbatches > 1 else ""
            return f"auto: {program.mesh} {plan.preset}{turns}"
        turns = f" {self.cut.schedule} x{self.cut.microbatches}" if self.cut else ""
        return f"{self.mesh} {self.plan}{turns}"


LAYOUTS = (
    Layout("dp=1", "ddp"),
    Layout("dp=2", "ddp"),
    Layout("dp=2", "zero1"),
    Layout("dp=2", "zero2"),
    Layout("dp=2", "fsdp"),
    Layout("tp=2", "megatron"),
    Layout("tp=2", "megatron-sp"),
    Layout("pp=2", "ddp", Pipeline("gpipe", 2, 2, 4)),
    Layout("pp=2", "ddp", Pipeline("1f1b", 2, 2, 4)),
    Layout("pp=2", "ddp", Pipeline("1f1b", 2, 2, 8)),
    Layout("pp=2", "ddp", Pipeline("interleaved-1f1b", 2, 4, 4)),
    Layout("pp=2", "ddp", Pipeline("zb-v", 2, 4, 4)),
    Layout("dp=4", "ddp"),
    Layout("dp=4", "fsdp"),
    Layout("tp=4", "megatron"),
    Layout("dp=2,tp=2", "fsdp+megatron"),
    Layout("pp=2,dp=2", "ddp", Pipeline("1f1b", 2, 2, 4)),
    Layout("pp=4", "ddp", Pipeline("1f1b", 4, 4, 8)),
    *(Layout("", "auto", auto_ranks=ranks) for ranks in (1, 2, 4)),
)


@dataclass(frozen=True)
class Row:
    """One layout: seconds of each measured step, and bytes of the rank with most."""

    layout: str
    ranks: int
    predicted_s: float
    measured_s: list[float]
    predicted_bytes: int
    measured_bytes: int | None

    @property
    def time_error(self) -> float:
        return self.predicted_s / median(self.measured_s) - 1

    @property
    def memory_error(self) -> float:
        measured = self.measured_bytes
        return 0.0 if measured is None else self.predicted_bytes / measured - 1

    def __str__(self) -> str:
        low, middle, high = quantiles(self.measured_s, n=4, method="inclusive")
        memory = "-" if self.measured_bytes is None else f"{self.measured_bytes / 1e6:.0f}"
        cells = (
            self.layout, f"{self.predicted_s * 1e3:.0f}", f"{middle * 1e3:.0f}",
            f"{low * 1e3:.0f}-{high * 1e3:.0f}", f"{self.time_error:+.0%}",
            f"{self.predicted_bytes / 1e6:.0f}", memory, f"{self.memory_error:+.1%}",
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


def measure(layouts: list[Layout], size: Size, topology: Topology, num_rounds: int) -> list[Row]:
    """Compile layouts of equally many ranks for a topology, and run them in turns."""
    with tempfile.TemporaryDirectory() as root:
        folders = [str(Path(root, str(number))) for number in range(len(layouts))]
        for layout, folder in zip(layouts, folders, strict=True):
            partc_side.compile_to(folder, size, layout.on(topology), layout.plan, layout.cut)
        programs = [partc.load(folder) for folder in folders]
        num = layouts[0].num_ranks
        with Processes(num, timeout=TIMEOUT_S, quiet=True) as world:
            seconds = world.run(_time_rank, folders, size, num_rounds)
        with Processes(num, timeout=TIMEOUT_S, quiet=True) as world:
            peaks = world.run(_peak_rank, folders, size)
    timed, held = zip(*seconds, strict=True), zip(*peaks, strict=True)
    of_layouts = zip(layouts, programs, timed, held, strict=True)
    return [
        Row(
            layout=layout.name(program),
            ranks=num,
            predicted_s=predicted_seconds(program),
            measured_s=[max(turn) for turn in zip(*ranks, strict=True)],  # of the slowest rank
            predicted_bytes=predicted_bytes(program),
            measured_bytes=max((peak for peak in held if peak is not None), default=None),
        )
        for layout, program, ranks, held in of_layouts
    ]


def predicted_seconds(program: Program) -> float:
    """The predicted step with the optimizer's."""
    seconds: float = program.cost.as_json()["prediction"]["seconds"]
    return seconds


def predicted_bytes(program: Program) -> int:
    """The predicted peak of the rank that holds most."""
    cost = program.cost.as_json()
    return max(rank["peak_bytes"] for rank in cost.get("ranks", [cost]))


def _time_rank(folders: list[str], size: Size, num_rounds: int) -> list[list[float]]:
    """One rank's steps of every layout, in turns."""
    sides = [partc_side.load(folder, size) for folder in folders]
    for side in sides:
        for _ in range(WARM_UP):
            side.step()
    samples: list[list[float]] = [[] for _ in sides]
    for turn in range(num_rounds):
        first = turn % len(sides)  # nobody always runs after the same neighbour
        for number in [*range(first, len(sides)), *range(first)]:
            samples[number].append(sample(sides[number]).step_s)
    return samples


def _peak_rank(folders: list[str], size: Size) -> list[int | None]:
    """One rank's peak memory of every layout."""
    free_at_once()
    reference(size, 1)
    partc_side.load(folders[0], size).step()  # loads the libraries that every layout uses
    return [peak_bytes(partial(partc_side.load, folder, size), WARM_UP + 1) for folder in folders]


def summary(rows: list[Row]) -> str:
    """The table, and how good the predictions are over all of it."""
    heads = ("layout", "predicted ms", "measured ms", "middle half", "error", "predicted MB",
             "measured MB", "error")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *map(str, rows)]
    correlation = spearmanr(
        [row.predicted_s for row in rows], [median(row.measured_s) for row in rows]
    ).statistic
    times = [abs(row.time_error) for row in rows]
    memory = [abs(row.memory_error) for row in rows]
    good = correlation > GOAL_CORRELATION and max(memory) <= GOAL_MEMORY
    lines += [
        "",
        f"rank correlation (Spearman) {correlation:.3f}; time off by {median(times):.0%} in the "
        f"median, {max(times):.0%} at most; memory by {median(memory):.1%}, {max(memory):.1%}",
        f"goal, a correlation above {GOAL_CORRELATION} and memory within {GOAL_MEMORY:.0%}: "
        f"{'met' if good else 'NOT met'}",
    ]
    return "\n".join([*lines, *_auto_lines(rows)])


def _auto_lines(rows: list[Row]) -> Iterator[str]:
    """Per number of ranks, the plan that was chosen beside the fastest that was given."""
    for ranks in dict.fromkeys(row.ranks for row in rows):
        times = {row.layout: median(row.measured_s) for row in rows if row.ranks == ranks}
        chosen = next((name for name in times if name.startswith("auto")), None)
        given = {name: each for name, each in times.items() if name != chosen}
        if chosen and given:
            best = min(given, key=given.__getitem__)
            slower = times[chosen] / given[best] - 1
            met = "met" if slower <= GOAL_AUTO else "NOT met"
            yield (
                f"{ranks} ranks, {chosen}: {slower:+.1%} beside {best}; goal, at most "
                f"{GOAL_AUTO:.0%} slower: {met}"
            )


def main() -> int:
    """Measure what the command line asks for."""
    options = _options()
    torch.set_num_threads(1)
    print(machine(), end="\n\n")
    chosen = [one for one in LAYOUTS if one.num_ranks in options.ranks]
    rows: list[Row] = []
    for num in dict.fromkeys(one.num_ranks for one in chosen):
        topology = _calibrated(num, options)
        layouts = [one for one in chosen if one.num_ranks == num]
        rows += measure(layouts, SIZES[options.size], topology, options.rounds)
        print(summary(rows), end="\n\n", flush=True)
    if options.json:
        records = [dataclasses.asdict(row) for row in rows]
        told: dict[str, Any] = {"machine": machine(), "size": options.size, "rows": records}
        Path(options.json).write_text(json.dumps(told, indent=1))
    return 0


def _calibrated(num: int, options: argparse.Namespace) -> Topology:
    """The topology in the folder of calibrations if it is there, else a new one, kept there."""
    path = Path(options.calibrations or tempfile.gettempdir(), f"mesh{num}.toml")
    if not (options.calibrations and path.exists()):
        found = calibrate(
            num, keep_noisy=options.keep_noisy, tell=lambda line: print(line, file=sys.stderr)
        )
        if not options.calibrations:
            return found.topology
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(found))
    return Topology.read(path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], choices=[1, 2, 4])
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--keep-noisy", action="store_true", help="calibrate on a busy machine")
    parser.add_argument("--calibrations", help="folder with mesh1.toml ... to read, or to write")
    parser.add_argument("--json", help="also write every figure to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
