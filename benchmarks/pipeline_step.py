"""Processor seconds of planning one pipeline step: make the schedule, lower it, check, simulate.

Run ``python -m benchmarks.pipeline_step``: 64 pipeline ranks, 512 microbatches, and 4 stages on a
rank where the schedule takes so many.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from benchmarks.machine import machine
from partc.schedules import NAMES, make
from partc.schedules.check_programs import check_programs
from partc.schedules.lower import lower
from partc.schedules.simulate import simulate
from partc.schedules.step_costs import StepCosts
from partc.schedules.timing import Costs

COLUMNS = ("make", "lower", "check", "simulate", "memory", "sum")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--schedules", nargs="*", default=list(NAMES))
    given = parser.parse_args()
    print(machine())
    print(f"{given.ranks} ranks, {given.microbatches} microbatches, processor seconds")
    print(f"{'schedule':18}{'events':>9}" + "".join(f"{name:>10}" for name in COLUMNS))
    for name in given.schedules:
        events, seconds = plan(name, given.ranks, given.microbatches, given.chunks)
        seconds.append(sum(seconds))
        print(f"{name:18}{events:9}" + "".join(f"{s:10.2f}" for s in seconds))


def plan(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[int, list[float]]:
    """The number of events, and the seconds of every part."""
    most = NAMES[name].chunks[1]
    chunks = chunks if most is None else most
    seconds: list[float] = []

    def timed(part: Callable[..., Any], *args: Any, **options: Any) -> Any:
        began = time.process_time()
        result = part(*args, **options)
        seconds.append(time.process_time() - began)
        return result

    schedule = timed(make, name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    programs = timed(lower, schedule)
    timed(check_programs, programs)
    stages = ranks * chunks
    costs = StepCosts.of(Costs.even(stages, transfer=0.1), message=(1.0,) * stages)
    step = timed(simulate, programs, costs)
    timed(lambda: step.peaks)
    return sum(len(program.events) for program in programs), seconds


if __name__ == "__main__":
    main()
