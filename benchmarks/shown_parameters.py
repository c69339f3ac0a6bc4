"""What a stage's DTensor parameters cost a training step, beside the program's own plain ones.

Run ``python -m benchmarks.shown_parameters``. Steps of the demo's model on its four ranks, by
turns: the program's text alone with fused AdamW on its plain tensors; the stage with
``step_on_pieces``; the stage with fused AdamW on DTensors.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import partc
from benchmarks.machine import machine
from examples.demo import MESH, NUM_RANKS, PLAN, batches, build_model, loss_of
from partc.verification.processes import Processes

Turn = Callable[[], None]
TIMEOUT_S = 3600.0
PLAIN = "plain tensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="of each kind")
    steps: int = parser.parse_args().steps
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo"
        partc.compile(build_model(), MESH, tuple(batches(1)), loss=loss_of, plan=PLAN).save(path)
        with Processes(NUM_RANKS, timeout=TIMEOUT_S) as world:
            found = world.run(timed, path, steps)[0]
    print(f"{'step and optimizer on':24}{'ms':>8}{'beside plain':>14}{'processor ms':>14}{'':8}")
    for name in found:
        wall, processor = (
            [[times[i] for times in found[key]] for key in (name, PLAIN)] for i in (0, 1)
        )
        print(f"{name:24}{_compared(wall, 8)}{_compared(processor, 14)}")


def _compared(times: list[list[float]], width: int) -> str:
    """The median in ms of the first times; the median of their ratios to the second ones."""
    mine, plain = times
    ratio = statistics.median(a / b for a, b in zip(mine, plain, strict=True))
    return f"{1e3 * statistics.median(mine):{width}.1f}{100 * (ratio - 1):+{20 - width}.1f} %"


def timed(path: Path, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor seconds of each turn on this rank; the kinds take turns step by step."""
    torch.set_num_threads(1)
    turns = turns_of(path)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for number in range(steps + 3):
        for name, turn in turns.items():
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            turn()
            if number >= 3:  # the first ones warm up
                took = time.perf_counter() - wall, time.process_time() - processor
                found[name].append(took)
    return found


def turns_of(path: Path) -> dict[str, Turn]:
    (ids,) = batches(1)
    program, model = partc.load(path), build_model()
    plain, pieces, dtensors = (program.module() for _ in range(3))
    for stage in (plain, pieces, dtensors):
        stage.load_full(model)
    on_plain, on_pieces, on_dtensors = (
        torch.optim.AdamW(params, lr=1e-3, fused=True)
        for params in (
            plain.rank_step.parameters(), pieces.parameters(), dtensors.parameters()
        )
    )  # fmt: skip
    pieces.step_on_pieces(on_pieces)
    step: Any = plain.rank_step.step

    def turn(run: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer) -> Turn:
        def go() -> None:
            optimizer.zero_grad()
            run(ids)
            optimizer.step()

        return go

    return {
        PLAIN: turn(step, on_plain),
        "stage.step_on_pieces": turn(pieces.step, on_pieces),
        "DTensors": turn(dtensors.step, on_dtensors),
    }


if __name__ == "__main__":
    main()
