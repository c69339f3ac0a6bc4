"""Train by a script's loop on ranks that share a GPU, and compare each loss with one process.

``torchrun --nproc-per-node 4 -m tests.gpu.training --device cuda``: for each layout, a loop with a
loader of pinned batches, extras, clipping, another length, evaluation, a checkpoint in the middle
and a resume from it; then one in autocast with a GradScaler. Everything else is float64. Rank 0
prints a row for each layout; the exit code is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import partc

ROWS, STEPS, WIDTH, WORDS = 8, 6, 32, 50
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("dp={n}", {"plan": "ddp"}),
    "zero1": ("dp={n}", {"plan": "zero1"}),
    "fsdp": ("dp={n}", {"plan": "fsdp"}),
    "megatron": ("tp={n}", {"plan": "megatron"}),
    "megatron-sp": ("tp={n}", {"plan": "megatron-sp"}),
    "fsdp+megatron": ("dp={h},tp=2", {"plan": "fsdp+megatron"}),
    "hsdp": ("dp_replicate=2,dp_shard={h}", {"plan": "hsdp"}),
    "inductor": ("dp={n}", {"plan": "fsdp", "compile": "inductor"}),
    "recompute": ("dp={n}", {"plan": "fsdp", "recompute": "block"}),
}


class Model(nn.Module):
    """Blocks of attention and a gated layer, with a buffer and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embed(ids)) * self.scale)
        return logits


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss, {"right": (logits.argmax(-1) == targets).sum()}


@dataclass
class Run:
    """What a loop has told, step by step."""

    losses: list[float] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)


def batches(device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one process; every third has another length."""
    for step, (ids, targets) in enumerate(zip(*_rows(), strict=True)):
        length = 12 if step % 3 == 2 else 16
        yield ids[:, :length].to(device), targets[:, :length].to(device)


def _rows() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(WORDS, (2, STEPS, ROWS, 16), generator=draw)
    return ids, targets


def alone(model: nn.Module, device: str) -> Run:
    """The same loop of one process, with torch alone."""
    told, model = Run(), model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids, targets in batches(device):
        loss, extras = loss_of(model, ids, targets)
        loss.backward()
        told.losses.append(float(loss.detach()))
        told.right.append(int(extras["right"]))
        told.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            told.held.append(float(loss_of(model, ids, targets)[0]))
    return told


def together(model: nn.Module, mesh: str, given: dict[str, Any], device: str, out: Path) -> Run:
    """The loop by partc, which is given up in the middle, and goes on from a checkpoint."""
    told, middle = Run(), STEPS // 2
    for start, stop in ((0, middle), (middle, STEPS)):
        twin = copy.deepcopy(model)
        first = next(batches("cpu"))
        program = partc.compile(twin, mesh, first, loss=loss_of, **given)
        stage = program.module(device)
        optimizer = stage.step_on_pieces(torch.optim.AdamW(stage.parameters(), lr=1e-2))
        if start:
            assert partc.load_checkpoint(out, stage, optimizer) == start
        for ids, targets in list(batches(device))[start:stop]:
            loss, extras = stage.step(ids, targets)
            told.losses.append(float(loss))
            told.right.append(int(extras["right"]))
            told.norms.append(float(stage.clip_grad_norm_(0.5)))
            optimizer.step()
            optimizer.zero_grad()
            told.held.append(float(stage.eval_step(ids, targets)[0]))
        partc.save_checkpoint(out, stage, optimizer, step=stop)
    return told


def read(stage: Any, device: str) -> None:
    """The rows that a loader gives this rank are those of the data set, from pinned memory."""
    ids, targets = (x.flatten(0, 1) for x in _rows())
    loader = stage.loader(TensorDataset(ids, targets), shuffle=False, batch="global", num_workers=1)
    for at, (found, _) in enumerate(loader):
        assert found.is_pinned() or found.is_cuda or device == "cpu"
        torch.testing.assert_close(found.cpu(), ids[at * ROWS : (at + 1) * ROWS])


def scaled(model: nn.Module, device: str) -> list[float]:
    """The losses of a loop in autocast with a GradScaler, whatever the model is."""
    kind, losses = torch.device(device).type, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**10)
    for ids, targets in batches(device):
        with torch.autocast(kind, torch.bfloat16):
            if isinstance(model, Model):
                loss, _ = loss_of(model, ids, targets)
            else:
                loss, _ = model(ids, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def worst(found: list[float], expected: list[float]) -> float:
    return max(abs(x - y) / max(abs(y), 1e-12) for x, y in zip(found, expected, strict=True))


def one_layout(name: str, device: str, out: Path) -> str:
    """Train under a layout; what is told of it, or an AssertionError."""
    mesh, given = LAYOUTS[name]
    ranks = dist.get_world_size()
    mesh = mesh.format(n=ranks, h=ranks // 2)
    torch.manual_seed(0)
    model = Model().double()
    expected = alone(copy.deepcopy(model), device)
    found = together(model, mesh, given, device, out)
    assert found.right == expected.right, f"{found.right}, not {expected.right}"
    errors = {
        what: worst(getattr(found, what), getattr(expected, what))
        for what in ("losses", "norms", "held")
    }
    assert max(errors.values()) < 1e-9, str(errors)
    return ", ".join(f"{what} {error:.1e}" for what, error in errors.items())


def mixed(device: str) -> str:
    """Autocast and a GradScaler through ``parallelize``; AssertionError if losses are others."""
    torch.manual_seed(0)
    model = Model()
    expected = scaled(copy.deepcopy(model).to(device), device)
    ranks = dist.get_world_size()
    stage = partc.parallelize(
        model.to(device), f"dp={ranks}", loss=loss_of, plan="fsdp", batch="global", device=device
    )
    found = scaled(stage, device)
    read(stage, device)
    assert worst(found, expected) < 2e-3, f"{found}, not {expected}"
    return f"losses {worst(found, expected):.1e}"


def main() -> int:
    """Run every layout on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="layouts (default: all)")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    every = True
    for name in args.names or [*LAYOUTS, "scaler"]:
        start, is_right = time.perf_counter(), True
        try:
            if name == "scaler":
                told = mixed(args.device)
            else:
                told = one_layout(name, args.device, Path(shared[0]) / name)
        except Exception as error:
            every, is_right, told = False, False, f"{type(error).__name__}: {error}"
            if os.environ.get("TRACE"):
                traceback.print_exc()
        if dist.get_rank() == 0:
            took = time.perf_counter() - start
            print(
                f"{name:<16} {'right' if is_right else 'wrong'}  {told[:600]} ({took:.0f} s)",
                flush=True,
            )
    dist.destroy_process_group()
    return 0 if every else 1


if __name__ == "__main__":
    sys.exit(main())
