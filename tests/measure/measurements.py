"""Measurements of a machine whose figures are known, and how little is enough to measure one."""

from __future__ import annotations

from dataclasses import replace

from partc.machines.topology import COLLECTIVES
from partc.measure.calibrate import Scale
from partc.measure.calibrate_links import MIB, SIZES
from partc.measure.calibrated import Found
from partc.measure.measured import Measured
from partc.measure.stopwatch import Effort

TINY = Scale(Effort(samples=3, seconds=0.01, tries=1), times=1, links_s=4.0, most_bytes=4 * MIB)
TRUE = {  # seconds and seconds per byte put in, per collective of 4 ranks
    "all_reduce": (6e-4, 3e-9), "all_gather": (4e-4, 5e-9), "reduce_scatter": (7e-4, 4e-9),
    "all_to_all": (2e-4, 2e-9), "broadcast": (3e-4, 2e-9), "send": (1e-4, 1e-9),
}  # fmt: skip


def samples(seconds: float, spread: float = 0.02) -> tuple[float, ...]:
    return tuple(seconds * (1 + spread * turn) for turn in (-1, 0, 1))


def found(**changes: object) -> Found:
    """Measurements of a machine with 4 ranks whose figures are known."""
    compute = [Measured("launch", "add", 0, samples(2e-6))]
    for work, peak in (("matmul f32", 8e10), ("matmul f64", 4e10), ("attention", 4e10),
                       ("pointwise", 8e9), ("functions", 4e9), ("optimizer", 6e9)):  # fmt: skip
        compute += [
            Measured(work, f"{amount:g}", amount, samples(2e-6 + amount / peak))
            for amount in (1e5, 1e7, 1e9)
        ]
    links = [
        Measured(kind, f"{size}", size, samples(TRUE[kind][0] + TRUE[kind][1] * size))
        for size in SIZES
        for kind in COLLECTIVES
    ]
    beside = [Measured(name, "", 0, samples(seconds, 0)) for name, seconds in
              (("transfer", 0.02), ("computing", 0.05), ("both", 0.06))]  # fmt: skip
    given = Found("toy", "gloo", "CPU process of one thread", 10**9, 4, (4,), tuple(compute),
                  (tuple(links),), tuple(beside))  # fmt: skip
    return replace(given, **changes)  # type: ignore[arg-type]
