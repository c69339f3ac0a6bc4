"""partc's programs for all variants, and the bytes that a rank is predicted to send in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import partc
from benchmarks.netlab.network import Link
from benchmarks.overlap import machines
from benchmarks.sync import workload
from benchmarks.sync.rank import Job
from benchmarks.sync.variants import ISLAND, Variant
from benchmarks.workload import loss_of
from partc.plan.mesh import Mesh
from partc.plan.wires import THRESHOLD
from partc.program import Program

BYTES = 4  # of a gradient


def compile_to(job: Job, num: int, link: Link) -> dict[str, float]:
    """Save each variant's program in the job's folder; predicted bytes of a mean step, by name."""
    return {each.name: _compiled(job, each, num, link) for each in job.variants}


def _compiled(job: Job, variant: Variant, num: int, link: Link) -> float:
    whole = whole_bytes(job, num)
    if variant.is_peer:
        return whole
    mesh = Mesh(Mesh.of(f"{variant.axis}={num}").axes, machines(num, link))
    batch = workload.rows(0, 0, job.rows_of_rank * (1 if variant.axis == ISLAND else num), job.size)
    with torch.device("meta"):
        model = workload.build_model(0, job.size)
    program = partc.compile(model, mesh, batch, loss=loss_of, plan=variant.plan)
    program.save(str(Path(job.folder, variant.name)))
    return _mean(job, variant, sent_bytes(program), whole)


def whole_bytes(job: Job, num: int) -> float:
    """Bytes of a ring all-reduce of all gradients."""
    with torch.device("meta"):
        model = workload.build_model(0, job.size)
    return 2 * (num - 1) / num * BYTES * sum(p.numel() for p in model.parameters())


def sent_bytes(program: Program) -> float:
    """What the program itself says that a rank sends in a mean step, but for sums whose size is not
    known before: of these the run logs it.
    """
    traffic: list[dict[str, Any]] = program.cost.as_json()["traffic"]
    return float(
        sum(each["sent_bytes"] for each in traffic if not each["kind"].endswith(THRESHOLD))
    )


def _mean(job: Job, variant: Variant, sent: float, whole: float) -> float:
    """With the exact steps at first, and those meetings of islands that these steps have."""
    if variant.is_served:  # the program tells of the busiest rank; all of them send a ring's bytes
        return whole * (1 + 0.5 / job.every)  # and for a look the parameters once more
    first = min(variant.entry("start_step", 0), job.steps)
    if not variant.meets:
        return (first * whole + (job.steps - first) * sent) / job.steps
    period, parts = variant.entry("period", 1), variant.entry("fragments", 1)
    meetings = (job.steps - first) // (period // parts) / parts + (first > 0)
    total = first * whole + meetings * sent * period
    if first and "partners" in variant.table:  # where they begin, all of them meet
        total += whole - sent * period
    return total / job.steps
