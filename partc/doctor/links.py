"""Measure the links between ranks, and compare them with the machine that a program is for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch.distributed as dist

from partc.amounts import time_text
from partc.cost.collective_cost import collective_seconds
from partc.doctor.finding import NOTE, OK, WRONG, Finding
from partc.machines.topology import Topology
from partc.measure.calibrate_links import MIB, level_groups, measure_links
from partc.measure.measured import Measured
from partc.measure.stopwatch import Effort, Stopwatch
from partc.plan.mesh import Mesh

SLOW, FAST = 2.0, 0.5  # times the prediction: slower is wrong, faster is worth a note
EFFORT = Effort(samples=5, seconds=0.2, tries=2)
MOST_BYTES = 64 * MIB


def look_at_links(machine: Topology, backend: str, seconds: float) -> Iterator[Finding]:
    """Findings for each level of links and collective; all ranks take part, in about so long."""
    num, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    groups = level_groups(num, local)
    two = len(groups) > 1
    axes = (("between", num // local), ("inside", local)) if two else (("all", num),)
    mesh = Mesh(axes, machine)
    for (axis, _), level in zip(reversed(axes), groups, strict=True):
        watch = Stopwatch(backend, EFFORT)
        measured = measure_links(watch, level, seconds / len(groups), MOST_BYTES)
        for found in _largest(measured):
            yield _compared(found, axis, mesh)


def _largest(measured: list[Measured]) -> list[Measured]:
    """Of each collective the measurement of the most bytes."""
    return [*{each.work: each for each in sorted(measured, key=lambda m: m.amount)}.values()]


def _compared(found: Measured, axis: str, mesh: Mesh) -> Finding:
    predicted = float(collective_seconds(found.work, found.amount, mesh, axis))
    ratio = found.seconds / predicted
    where = {"inside": "inside of a node", "between": "between nodes", "all": "between ranks"}[axis]
    text = (
        f"{found.what} took {time_text(found.seconds)}, {ratio:.2f} of the predicted "
        f"{time_text(predicted)}"
    )
    what = f"{found.work} {where}"
    if ratio > SLOW:
        do = (
            "See by NCCL_DEBUG=INFO which links are used. If they are right, measure them: "
            "partc calibrate -o mesh.toml, and compile for that."
        )
        return Finding(WRONG, what, text, do)
    if ratio < FAST:
        return Finding(NOTE, what, text, "Predictions are too slow: partc calibrate measures.")
    return Finding(OK, what, text)
