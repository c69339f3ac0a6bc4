"""partc's programs beside PyTorch's DDP, FSDP2, DTensor and pipelines, in interleaved rounds.

Run ``python -m benchmarks.peers``. Every side of a layout lives in the same gloo processes and
takes its turn in every round; its first steps are compared with the model in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks import partc_side, torch_pipelines, torch_sides
from benchmarks.machine import machine
from benchmarks.measure import Sample, Side, Trial, peak_bytes, sample, trial
from benchmarks.peer_table import Measured, ratio_table, side_table
from benchmarks.workload import SIZES, Pipeline, Size, reference
from partc.measure.resident import free_at_once, give_back_freed
from partc.verification.processes import Processes

Build = Callable[[], Side]
Made = TypeVar("Made")

NUM_CHECKED = 3  # steps whose loss is compared; the last one's memory is measured
TOLERANCE = 1e-5
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Layout:
    """A mesh, partc's plan for it, and PyTorch's ways to do the same."""

    mesh: str
    num_ranks: int
    plan: str
    peers: tuple[torch_sides.Build, ...]
    cut: Pipeline | None = None

    def by_peer(self) -> list[Layout]:
        """The same with one peer each: half the sides hold half the memory at once."""
        return [dataclasses.replace(self, peers=(peer,)) for peer in self.peers]


_TP = torch_sides.tensor_parallel
_SP = torch_sides.sequence_parallel
_2D = torch_sides.fsdp_tensor_parallel
LAYOUTS = {
    "ddp": Layout("dp=2", 2, "ddp", (torch_sides.ddp,)),
    "fsdp": Layout(
        "dp=2",
        2,
        "fsdp",
        (partial(torch_sides.fsdp, prefetch=False), partial(torch_sides.fsdp, prefetch=True)),
    ),
    "megatron": Layout(
        "tp=2",
        2,
        "megatron",
        (
            partial(_TP, prepared=False, cut_loss=False),
            partial(_TP, prepared=True, cut_loss=False),
            partial(_TP, prepared=True, cut_loss=True),
        ),
    ),
    "megatron-sp": Layout(
        "tp=2", 2, "megatron-sp", (partial(_SP, cut_loss=False), partial(_SP, cut_loss=True))
    ),
    "fsdp+megatron": Layout(
        "dp=2,tp=2", 4, "fsdp+megatron", (partial(_2D, strong=False), partial(_2D, strong=True))
    ),
}


def _pipelined(schedule: str, stages: int, microbatches: int, num_dp: int) -> Layout:
    """Two pipeline ranks, each ``num_dp`` times, with torch's schedule of the same name."""
    cut = Pipeline(schedule, 2, stages, microbatches)
    mesh = "pp=2" if num_dp == 1 else f"pp=2,dp={num_dp}"
    peer = partial(torch_pipelines.pipelining, cut=cut)
    return Layout(mesh, 2 * num_dp, "ddp", (peer,), cut)


_STAGES = {"gpipe": 2, "1f1b": 2, "interleaved-1f1b": 4, "zb-v": 4}
LAYOUTS |= {
    f"{schedule} {num}": _pipelined(schedule, stages, num, 1)
    for schedule, stages in _STAGES.items()
    for num in (4, 8)
}
# only 1F1B has a peer with DDP (torch 2.13): GPipe and interleaved stop in the second step at an
# assertion of its reducer, ZB-V does not sum gradients over dp
LAYOUTS["1f1b 4 ddp"] = _pipelined("1f1b", 2, 4, 2)


def measure(layout: Layout, size: Size, num_rounds: int, with_partc: bool) -> list[Measured]:
    """All sides of a layout on gloo ranks of this machine, partc first where asked for."""
    with tempfile.TemporaryDirectory() if with_partc else nullcontext() as folder:
        if folder is not None:
            partc_side.compile_to(folder, size, layout.mesh, layout.plan, layout.cut)
        builds: list[Build] = [partial(peer, size) for peer in layout.peers]
        if folder is not None:
            builds.insert(0, partial(partc_side.load, folder, size))
        with Processes(layout.num_ranks, timeout=TIMEOUT_S, quiet=True) as world:
            ranks = world.run(_time_rank, builds, num_rounds)
        with Processes(layout.num_ranks, timeout=TIMEOUT_S, quiet=True) as world:
            peaks = world.run(_peak_rank, builds)
    return [
        _over_ranks([rank[side] for rank in ranks], [rank[side] for rank in peaks])
        for side in range(len(builds))
    ]


def _peak_rank(builds: list[Build]) -> list[int | None]:
    """One rank's peak memory of every side."""
    free_at_once()
    for build in builds:  # a side's first step imports modules, which is no memory of the side
        build().step()
    return [peak_bytes(build, NUM_CHECKED) for build in builds]


def _time_rank(builds: list[Build], num_rounds: int) -> list[tuple[str, Trial, list[Sample]]]:
    """One rank's trial and samples of every side."""
    sides = [_without_rest(build) for build in builds]
    trials = [_without_rest(partial(trial, side, NUM_CHECKED)) for side in sides]
    samples: dict[str, list[Sample]] = {side.name: [] for side in sides}
    for turn in range(num_rounds):
        first = turn % len(sides)  # nobody always runs after the same neighbour
        for side in sides[first:] + sides[:first]:
            samples[side.name].append(sample(side))
    return [(s.name, t, samples[s.name]) for s, t in zip(sides, trials, strict=True)]


def _without_rest(make: Callable[[], Made]) -> Made:
    """What is made, without the memory that only its making took: of large models it is scarce."""
    made = make()
    give_back_freed()
    return made


def _over_ranks(ranks: list[tuple[str, Trial, list[Sample]]], peaks: list[int | None]) -> Measured:
    """One side's figures: the slowest rank's time, the sum of processor times, the most bytes."""
    name, first, _ = ranks[0]
    rounds = list(zip(*(samples for _, _, samples in ranks), strict=True))
    sent = [[s.sent_bytes for s in turn if s.sent_bytes is not None] for turn in rounds]
    return Measured(
        name=name,
        losses=first.losses,
        grad_norm=first.grad_norm,
        peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
        collectives=first.collectives,
        forward_backward_s=[max(s.forward_backward_s for s in turn) for turn in rounds],
        step_s=[max(s.step_s for s in turn) for turn in rounds],
        cpu_s=[sum(s.cpu_s for s in turn) for turn in rounds],
        sent_bytes=[max(turn) for turn in sent if turn],
    )


def main() -> int:
    """Measure what the command line asks for; 1 if a side's numbers are wrong."""
    options = _options()
    torch.set_num_threads(1)
    print(machine(), end="\n\n")
    found: list[tuple[str, str, list[Measured]]] = []
    worst = 0.0
    layouts = [
        (name, one)
        for name in options.layouts
        for one in (LAYOUTS[name].by_peer() if options.pairs else [LAYOUTS[name]])
    ]
    for size in (SIZES[name] for name in options.sizes):
        expected = _without_rest(partial(reference, size, NUM_CHECKED))
        for name, layout in layouts:
            sides = measure(layout, size, options.rounds, not options.peers_only)
            found.append((size.name, name, sides))
            worst = max(worst, *(s.loss_error(expected) for s in sides))
            worst = max(worst, *(s.norm_error(expected) for s in sides))
            title = f"{size.name}, {name}, {layout.mesh}"
            print(f"### {title}\n\n{side_table(sides, expected)}\n", flush=True)
    print(f"### partc over each peer\n\n{ratio_table(found)}")
    if options.json:
        Path(options.json).write_text(json.dumps(_records(found), indent=1))
    return int(worst > TOLERANCE)


def _records(found: list[tuple[str, str, list[Measured]]]) -> dict[str, Any]:
    """Every figure as plain data."""
    rows = [
        {"size": size, "layout": layout, **dataclasses.asdict(side)}
        for size, layout, sides in found
        for side in sides
    ]
    return {"machine": machine(), "rows": rows}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["demo"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument(
        "--pairs", action="store_true", help="each peer apart from the others: less memory"
    )
    parser.add_argument("--peers-only", action="store_true", help="leave partc out")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
