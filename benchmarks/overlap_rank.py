"""What every host of ``benchmarks.overlap`` runs: all sides of one layout, in turns."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import partc_side
from benchmarks.call_tape import Tape, compute_alone, record
from benchmarks.measure import Side, first_steps
from benchmarks.overlap_layouts import LAYOUTS, NUM_CHECKED, TIMEOUT_S
from benchmarks.overlap_table import Round, own_order
from benchmarks.workload import SIZES


def main(layout_name: str, size_name: str, rounds: str, folder: str, result: str) -> None:
    """Measure; rank 0 writes each side's first losses and gradient norm, and the rounds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    layout, size = LAYOUTS[layout_name], SIZES[size_name]
    sides = [partc_side.load(folder, size), *(peer(size) for peer in layout.peers)]
    checks = [first_steps(side, NUM_CHECKED) for side in sides]
    measured = _measure(sides[0], sides[1], int(rounds), is_pipeline=layout.cut is not None)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, measured)
    if dist.get_rank() == 0:
        found = {
            "peer": sides[1].name,
            "checks": checks,
            "rounds": [_slowest(ranks) for ranks in zip(*every, strict=True)],
        }
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _measure(ours: Side, peer: Side, num_rounds: int, is_pipeline: bool) -> list[Round]:
    """This rank's seconds."""
    ours.optimizer.zero_grad()
    tape = record(ours.forward_backward)
    each_s = [] if is_pipeline else tape.replay_each()
    return [_round(ours, peer, tape, each_s, turn) for turn in range(num_rounds)]


def _round(ours: Side, peer: Side, tape: Tape, each_s: list[float], turn: int) -> Round:
    """Every side once, each round in another order: nobody always runs after the same neighbour."""
    found: dict[str, Any] = {}
    runs: list[tuple[str, Callable[[], Any]]] = [
        ("step", lambda: _seconds(ours)),
        ("compute", lambda: _compute(ours, tape)),
        ("communication", tape.replay),
        ("peer", lambda: _seconds(peer)),
    ]
    first = turn % len(runs)
    for name, run in runs[first:] + runs[:first]:
        gc.collect()
        dist.barrier()
        found[name] = run()
    (compute_s, events), all_s = found["compute"], found["communication"]
    # two at once may be faster than one after the other
    shares = [seconds * all_s / sum(each_s) for seconds in each_s]
    return Round(
        step=found["step"],
        compute=compute_s,
        communication=all_s,
        own_order=own_order(events, compute_s, shares) if shares else None,
        peer=found["peer"],
    )


def _seconds(side: Side) -> float:
    side.optimizer.zero_grad()
    start = time.perf_counter()
    side.forward_backward()
    return time.perf_counter() - start


def _compute(side: Side, tape: Tape) -> Any:
    side.optimizer.zero_grad()
    return compute_alone(tape, side.forward_backward)


def _slowest(ranks: tuple[Round, ...]) -> dict[str, float | None]:
    """The longest time of any rank, of each figure."""
    names = [each.name for each in dataclasses.fields(Round)]
    columns = {name: [getattr(rank, name) for rank in ranks] for name in names}
    return {name: None if None in each else max(each) for name, each in columns.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
