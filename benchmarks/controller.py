"""How well a controller follows links whose bandwidth changes while it runs.

``python -m benchmarks.controller`` trains the small language model of ``benchmarks.sync`` on four
hosts (``benchmarks.netlab``, which needs root). Each run has three phases: in the second one all
links have a tenth of the bandwidth. First every variant runs by itself, then the controller, again
and again; in each phase its steps, those behind the switch, are compared with the variant that was
fastest there. The last run's log is replayed: its parameters have to be the same, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import partc
from benchmarks.machine import machine
from benchmarks.netlab.network import Link, Network, ended_like_interrupt
from benchmarks.overlap import machines
from benchmarks.sync import workload
from benchmarks.workload import loss_of
from partc.errors import PartcError
from partc.plan.mesh import Mesh

RANKS, LATENCY_MS, TENTH = 4, 0.5, 0.1
TIMEOUT_S = 7200.0
ASKED, DONE = "asked", "done"  # files in which rank 0 asks for a bandwidth, and is told
COMPRESSED = 'preset = "ddp"\nallow = ["compress"]\n[compress]\nwire = "{}"\n{}'
PLANS = {"exact": "ddp", "bf16": COMPRESSED.format("bf16", "error_feedback = false\n")}


@dataclass(frozen=True)
class Job:
    """``steps`` of each of three phases, ``runs`` times, at ``mbit`` and a tenth of it."""

    folder: str
    mbit: float
    steps: int
    runs: int
    settle: int  # steps behind a change that are the controller's window


def compile_to(job: Job) -> None:
    """Save the program and its variants: int8 sums, which keep most, are the first of them."""
    mesh = Mesh(Mesh.of(f"dp={RANKS}").axes, machines(RANKS, Link(job.mbit, LATENCY_MS)))
    model = workload.build_model(0)
    batch = workload.rows(0, 0, RANKS)
    plan = COMPRESSED.format("int8", "")
    program = partc.compile(model, mesh, batch, loss=loss_of, plan=plan)
    partc.with_variants(program, **PLANS).save(str(Path(job.folder, "program")))


class Rank:
    """What one host does."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.program = partc.load(str(Path(job.folder, "program")))
        self.stage = self.program.module()
        self.phases = [(job.mbit, job.steps), (job.mbit * TENTH, job.steps), (job.mbit, job.steps)]

    def run(self, **told: Any) -> tuple[list[list[float]], list[Any]]:
        """Seconds of every step of each phase, and the controller's log."""
        self._begin()
        controller = partc.Controller(self.stage, **told)
        optimizer = torch.optim.AdamW(self.stage.parameters(), lr=2e-3)
        found, number = [], 0
        for mbit, steps in self.phases:
            self._set_links(mbit)
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                self.stage.step(*workload.rows(0, number, RANKS))
                optimizer.step()
                optimizer.zero_grad()
                times.append(time.perf_counter() - start)
                number += 1
            found.append(times)
        controller.close()
        return found, list(controller.log)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.full_tensor().flatten() for p in self.stage.parameters()])  # type: ignore[attr-defined]

    def _begin(self) -> None:
        """The weights, and what sums have kept, as at first."""
        self.stage.load_full(workload.build_model(0))
        self.stage.seed(0)
        self.stage.zero_grad()

    def _set_links(self, mbit: float) -> None:
        """Ask the process that has the network for a bandwidth, and wait until it is there."""
        if dist.get_rank() == 0:
            done = Path(self.job.folder, DONE)
            done.unlink(missing_ok=True)
            _write(Path(self.job.folder, ASKED), str(mbit))
            while not done.exists():
                time.sleep(0.01)
        dist.barrier()


def rank(told: Path) -> None:
    """Everything that one host runs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job(**json.loads(told.read_text()))
    here = Rank(job)
    names = ["compiled", *PLANS]
    result: dict[str, Any] = {"static": {name: [] for name in names}, "controlled": []}
    for _ in range(3):
        for name in names:
            result["static"][name].append(here.run(start=name, replay=[])[0])
    for number in range(job.runs):
        times, log = here.run()
        result["controlled"].append({"times": times, "log": log})
        if dist.get_rank() == 0:
            switches = [(row["step"], row["to"]) for row in log]
            print(f"run {number + 1} of {job.runs}: {switches}", file=sys.stderr, flush=True)
    weights = here.weights()
    here.run(replay=log)
    result["replayed"] = bool(torch.equal(weights, here.weights()))
    if dist.get_rank() == 0:
        _write(Path(job.folder, "result.json"), json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure(job: Job) -> dict[str, Any]:
    """Run the job on a network whose links change when rank 0 asks."""
    told = Path(job.folder, "job.json")
    told.write_text(json.dumps(asdict(job)))
    compile_to(job)
    asked, done = Path(job.folder, ASKED), Path(job.folder, DONE)
    with Network(RANKS, Link(job.mbit, LATENCY_MS)) as network:

        def meanwhile() -> None:
            if asked.exists():
                network.change(Link(float(asked.read_text()), LATENCY_MS))
                asked.unlink()
                _write(done, "")

        command = [sys.executable, "-m", "benchmarks.controller", "--rank", str(told)]
        network.run(command, TIMEOUT_S, meanwhile)
    found: dict[str, Any] = json.loads(Path(job.folder, "result.json").read_text())
    return found


def report(job: Job, found: dict[str, Any]) -> str:
    """Medians by phase, and how far the controller's are from those of the best variant."""
    lines = [machine(), "", "| | 1: fast | 2: a tenth | 3: fast |", "|---|---|---|---|"]
    static = {
        name: [median(t for run in runs for t in run[phase][job.settle :]) for phase in range(3)]
        for name, runs in found["static"].items()
    }
    for name, medians in static.items():
        lines.append(_row(f"{name}, ms", [f"{s * 1e3:.0f}" for s in medians]))
    best = [min(each) for each in zip(*static.values(), strict=True)]
    runs = [
        [median(run["times"][phase][job.settle :]) / best[phase] for phase in range(3)]
        for run in found["controlled"]
    ]
    by_phase = [sorted(each) for each in zip(*runs, strict=True)]
    lines.append(_row("controller / best, median", [f"{median(x):.2f}" for x in by_phase]))
    worst = [f"{x[0]:.2f} to {x[-1]:.2f}" for x in by_phase]
    lines.append(_row(f"of {len(runs)} runs", worst))
    within = [f"{sum(r <= 1.15 for r in x)} of {len(x)}" for x in by_phase]
    lines.append(_row("within 15 %", within))
    number = [len(run["log"]) for run in found["controlled"]]
    lines += ["", f"{min(number)} to {max(number)} switches in a run; the last run's log replayed: "
              f"{'the same parameters' if found['replayed'] else 'OTHER PARAMETERS'}"]  # fmt: skip
    return "\n".join(lines)


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _write(path: Path, text: str) -> None:
    """Let a file appear whole."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller", description=__doc__)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--steps", type=int, default=60, help="of each phase")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--settle", type=int, default=25, help="steps that a phase does not count")
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank)
        return 0
    try:
        with ended_like_interrupt(), tempfile.TemporaryDirectory() as folder:
            job = Job(folder, options.mbit, options.steps, options.runs, options.settle)
            found = measure(job)
    except PartcError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(report(job, found))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    return 0 if found["replayed"] else 1


if __name__ == "__main__":
    sys.exit(main())
