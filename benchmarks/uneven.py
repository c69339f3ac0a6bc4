"""How much faster a step is when a rank at half speed computes fewer microbatches.

Run ``python -m benchmarks.uneven``. Two ranks, each on a core of its own; a process that only
computes shares the core of one of them, which is then half as fast. The same microbatches are
divided evenly, and by ``partc.plan.uneven.shares`` of the measured speeds; both programs take their
steps in turn, in the same processes. Their gradients are compared.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import partc
from benchmarks.machine import machine
from partc.plan.uneven import shares
from partc.program import Program
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes

WIDTH, ROWS, LAYERS = 384, 64, 6
SLOW = 1  # the rank whose core is shared
Found = tuple[list[int], list[tuple[float, float]], float]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    )


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = module(x).square().mean()
    return value


def program(counts: list[int]) -> Program:
    """A program whose islands, of one rank each, compute so many microbatches."""
    plan = f'preset = "ddp"\n[uneven]\nmicrobatches = {counts}\n'
    return partc.compile(model(), "island=2", (torch.zeros(ROWS, WIDTH),), loss=loss_of, plan=plan)


def stage_of(counts: list[int]) -> Stage:
    stage = program(counts).module()
    stage.load_full(model())
    return stage


def rows_of(counts: list[int]) -> Tensor:
    """This rank's rows of a batch that does not depend on how it is divided."""
    whole = torch.randn(sum(counts) * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return whole.split([ROWS * num for num in counts])[dist.get_rank()]


def seconds_of(stage: Stage, rows: Tensor) -> float:
    """The seconds of a step, from a moment at which both ranks are ready."""
    for param in stage.parameters():
        param.grad = None
    dist.barrier()
    start = time.perf_counter()
    stage.step(rows)
    return time.perf_counter() - start


def compute(until: float) -> None:
    """Keep the core of the slow rank busy."""
    os.sched_setaffinity(0, {SLOW})
    x = torch.randn(WIDTH, WIDTH)
    while time.time() < until:
        torch.mm(x, x)


def measure(microbatches: int, rounds: int) -> Found:
    """By rank: the uneven numbers, seconds of a step in each round (even, uneven), and the largest
    relative difference of both programs' gradients.
    """
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {dist.get_rank()})
    even = [microbatches // 2, microbatches - microbatches // 2]
    first, rows = stage_of(even), rows_of(even)
    speeds = measured_speeds(rows[:ROWS])
    uneven = shares(speeds, microbatches)
    second, other_rows = stage_of(uneven), rows_of(uneven)
    times = []
    for _ in range(rounds + 2):
        times.append((seconds_of(first, rows), seconds_of(second, other_rows)))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    worst = max(_difference(a.grad, b.grad) for a, b in pairs)
    return uneven, times[2:], worst


def measured_speeds(rows: Tensor) -> list[float]:
    """Microbatches per second of each rank, all of them at work."""
    own, times = model(), []
    for _ in range(12):
        start = time.perf_counter()
        loss_of(own, rows).backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - start)
    speeds = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(speeds, torch.tensor([1 / statistics.mean(times)]))
    return [float(each) for each in speeds]


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    assert a is not None
    assert b is not None
    a, b = a.full_tensor(), b.full_tensor()  # type: ignore[attr-defined]
    return float((a - b).abs().max() / a.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    print(machine())
    busy = multiprocessing.get_context("spawn").Process(target=compute, args=(time.time() + 600,))
    busy.start()
    try:
        with Processes(2, timeout=600.0) as world:
            found = world.run(measure, options.microbatches, options.rounds)
    finally:
        busy.kill()
    counts, times, worst = found[0]
    even, uneven = (statistics.median(each) for each in zip(*times, strict=True))
    ratios = sorted(a / b for a, b in times)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    print(f"{options.microbatches} microbatches, one of two ranks shares its core")
    print(f"even [{options.microbatches // 2}, ...]: {1e3 * even:.0f} ms a step")
    print(f"uneven {counts}: {1e3 * uneven:.0f} ms a step")
    middle = statistics.median(ratios)
    print(f"even over uneven: {middle:.2f} (80 % of rounds from {low:.2f} to {high:.2f})")
    print(f"largest relative difference of a gradient: {worst:.1e}")


if __name__ == "__main__":
    main()
