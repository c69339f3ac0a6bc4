"""What a rank spends before and behind the bytes of a save, among many ranks: planning alone.

Run ``python -m benchmarks.planned_save``. One process has the stage, with AdamW; what the other
ranks would say is what it says itself, as JSON, as often as there are ranks. Measured: naming each
tensor, its piece and its state (``snapshot_of``), comparing what all ranks must have alike, and the
text of the list on rank 0. No tensor is written.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import partc
from benchmarks.machine import machine
from partc.errors import RunError
from partc.program.checkpoints.files import FileEntry, file_name
from partc.program.checkpoints.snapshot import snapshot_of
from partc.program.checkpoints.writing import Writer
from partc.program.ranks.together import Together

WIDTH, BATCH, ROUNDS = 8, 4, 5


class Block(nn.Module):
    """Six parameters: two linear layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return found


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Simulated(Together):
    """Many ranks, of which each says what this one says."""

    num: int = 1

    def exchange(self, said: Any) -> list[Any]:
        return [json.loads(json.dumps(said)) for _ in range(self.num)]

    def to_first(self, said: Any, senders: Any) -> list[Any]:
        return [json.loads(json.dumps(said)) for _ in senders]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=167, help="each has six parameters")
    options = parser.parse_args()
    torch.manual_seed(0)
    x, model = torch.randn(BATCH, WIDTH), Model(options.blocks)
    stage = partc.compile(model, "dp=1", (x,), loss=loss_of, plan="fsdp").module()
    optimizer = torch.optim.AdamW(stage.parameters())
    stage.step(x)
    optimizer.step()
    ranks = Simulated("planned_save", torch.device("cpu"), RunError, num=options.ranks)
    seconds = sorted(planned(stage, optimizer, ranks) for _ in range(ROUNDS))
    num = len(snapshot_of(stage, optimizer, None, 1).tensors)
    print(machine())
    print(
        f"{options.ranks} ranks x {num} tensors: planned in {seconds[ROUNDS // 2]:.3f} s "
        f"({seconds[0]:.3f} to {seconds[-1]:.3f} of {ROUNDS})"
    )
    torch.distributed.destroy_process_group()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def planned(stage: Any, optimizer: torch.optim.Optimizer, ranks: Simulated) -> float:
    """The seconds of one plan."""
    start = time.perf_counter()
    snapshot = snapshot_of(stage, optimizer, None, 1)
    ranks.check_alike(snapshot.facts)
    sum(ranks.exchange(snapshot.num_bytes))
    Writer(Path())._list(snapshot, {file_name(0): FileEntry(snapshot.num_bytes, "0" * 64)}, ranks)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
