"""What a second save of a frozen model with adapters writes, beside the first one.

Run ``python -m benchmarks.incremental``. Layers with LoRA adapters (Hu et al., 2021) are trained on
the ranks of one host, under ``fsdp`` with AdamW; the layers themselves are frozen. A save links to
the files of frozen parameters of the step before, and writes the adapters with their moments.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import partc
from benchmarks.machine import machine
from benchmarks.ranks import run_ranks

RANKS, BATCH, SAVES = 2, 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--low", type=int, default=4, help="the adapters' rank")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = Adapted(options.width, options.layers, options.low)
    if options.rank:
        run_rank(Path(options.rank), model)
        return
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        x = torch.zeros(BATCH, options.width)
        partc.compile(model, f"dp={RANKS}", (x,), loss=loss_of, plan="fsdp").save(f"{folder}/made")
        run_ranks("benchmarks.incremental", RANKS, folder, options)


class Adapted(nn.Module):
    """Frozen layers of one size, each with an adapter of low rank, added to its input."""

    def __init__(self, width: int, layers: int, low: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(width, low, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(low, width, bias=False) for _ in range(layers))
        self.layers.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = x + (layer(x) + up(down(x))).tanh()
        return x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def run_rank(folder: Path, model: Adapted) -> None:
    """Train on this rank and save each step; rank 0 prints what each save wrote, and its time."""
    torch.set_num_threads(1)
    stage = partc.load(folder / "made").module()
    stage.load_full(model)
    optimizer = torch.optim.AdamW(p for p in stage.parameters() if p.requires_grad)
    x, first = torch.randn(BATCH, model.width), 0
    for step in range(1, SAVES + 1):
        stage.step(x)
        optimizer.step()
        dist.barrier()
        start = time.perf_counter()
        path = partc.save_checkpoint(folder / "saved", stage, optimizer, step=step)
        seconds = time.perf_counter() - start
        dist.barrier()
        written = written_anew(Path(path))
        first = first or written
        if dist.get_rank() == 0:
            share = f"{written:>12,} bytes, {written / first:7.2%} of the first"
            print(f"save {step}: {share}, {seconds:.3f} s", flush=True)
    dist.destroy_process_group()


def written_anew(step: Path) -> int:
    """The bytes of a step's files that are no links to files of the step before."""
    files = [file.stat() for file in step.rglob("*") if file.is_file()]
    return sum(each.st_size for each in files if each.st_nlink == 1)


if __name__ == "__main__":
    main()
