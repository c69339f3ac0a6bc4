"""How long a training loop waits for a checkpoint: beside its steps, at once, and by torch's DCP.

Run ``python -m benchmarks.checkpoints``. A stack of layers on the ranks of one host, with AdamW.
*Waiting* is what the loop waits for a save: in the call, and before the next ``optimizer.step()``.
*Step* is a step with its share of the save.
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
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import partc
from benchmarks.machine import machine
from benchmarks.ranks import run_ranks

RANKS, BATCH, SAVES = 2, 64, 4
Save = Callable[[int], None]
SIDES = ("none", "save_checkpoint", "Checkpoints", "dcp.save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="from one save to the next")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(Path(options.rank), options.width, options.layers, options.steps)
        return
    print(machine())
    num = options.layers * options.width * (options.width + 1)
    print(f"{num / 1e6:.1f} M parameters, {12 * num / 1e6:.0f} MB with AdamW's moments, fsdp dp=2")
    print(f"{'':18}{'step ms':>10}{'waiting ms':>12}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model, x = build(options.width, options.layers), torch.zeros(BATCH, options.width)
        partc.compile(model, f"dp={RANKS}", (x,), loss=loss_of, plan="fsdp").save(f"{folder}/made")
        run_ranks("benchmarks.checkpoints", RANKS, folder, options)


class Stack(nn.Module):
    """Layers of one size, each added to its input."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def build(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return Stack(width, layers)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def run_rank(folder: Path, width: int, layers: int, steps: int) -> None:
    """Train on this rank with each way to save; rank 0 prints a row for each."""
    torch.set_num_threads(1)
    stage = partc.load(folder / "made").module()
    stage.load_full(build(width, layers))
    optimizer = stage.step_on_pieces(torch.optim.AdamW(stage.parameters(), fused=True))
    x = torch.randn(BATCH, width)
    for side in SIDES:
        with partc.Checkpoints(folder / side, keep_latest_k=1) as checkpoints:
            save = saving(side, folder / side, stage, optimizer, checkpoints)
            rows = [
                timed(stage, optimizer, x, steps, save, n + 1, checkpoints) for n in range(SAVES)
            ]
        step, waited = (statistics.median(column) for column in zip(*rows[1:], strict=True))
        if dist.get_rank() == 0:
            print(f"{side:18}{step:10.1f}{waited:12.1f}", flush=True)
    dist.destroy_process_group()


def saving(side: str, folder: Path, stage: Any, optimizer: Any, checkpoints: Any) -> Save:
    """What saves a step in one of the ways."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def by_dcp(step: int) -> None:
        state = dict(
            zip(("model", "optimizer"), get_state_dict(stage, optimizer, options=flat), strict=True)
        )
        dcp.save(state, checkpoint_id=folder / str(step))

    return {
        "none": lambda step: None,
        "save_checkpoint": lambda step: void(
            partc.save_checkpoint(folder, stage, optimizer, step=step)
        ),
        "Checkpoints": lambda step: void(checkpoints.save(step, stage, optimizer)),
        "dcp.save": by_dcp,
    }[side]


def void(_: object) -> None:
    pass


def timed(
    stage: Any, optimizer: Any, x: Tensor, steps: int, save: Save, number: int, checkpoints: Any
) -> tuple[float, float]:
    """Of a save and the steps behind it, in ms: a step with its share of the save, the waiting."""
    dist.barrier()
    start = time.perf_counter()
    save(number)
    waited = time.perf_counter() - start
    for _ in range(steps):
        stage.step(x)
        before = time.perf_counter()
        checkpoints.wait_for_staging()
        waited += time.perf_counter() - before
        optimizer.step()
        optimizer.zero_grad()
    end = time.perf_counter()
    checkpoints.wait()  # the next save would
    waited += time.perf_counter() - end
    return 1e3 * (time.perf_counter() - start) / steps, 1e3 * waited


if __name__ == "__main__":
    main()
