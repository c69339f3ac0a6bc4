"""Trainings of islands that tests run, on four gloo ranks, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc.api import compile
from partc.program import Program
from partc.program.stage.runtime import Stage

MEAN = "period = 3"
DILOCO = 'period = 2\nouter = "nesterov"\nouter_lr = 0.6\nouter_momentum = 0.8\nstart_step = 1'
STREAMING = 'period = 4\nfragments = 2\nouter = "nesterov"'
RING = 'period = 2\npartners = "ring"\nstart_step = 1'
PAIRS = 'period = 2\npartners = "pairs"\nfragments = 2'
OVERLAPPED = 'period = 4\nfragments = 2\nouter = "nesterov"\noverlap = 1\nmix = 0.3'
LONG = 'period = 4\nouter = "nesterov"\nouter_momentum = 0.5\noverlap = 3\nstart_step = 1'
STEPS = 9


class Net(nn.Module):
    """A residual and a batch norm, whose statistics islands have to share; one frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16, bias=False)  # before a norm its gradient is noise
        self.norm = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.taken = nn.Parameter(torch.ones(16))  # a name that the printed class has too
        self.fixed = nn.Parameter(torch.linspace(0.5, 1.5, 16), requires_grad=False)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        for block in self.blocks:
            h = h + torch.tanh(block(h)) * self.fixed
        result: Tensor = self.last(h * self.taken)
        return result


class Both(nn.Module):
    """Names that begin like others: ``read.weight_ih_l0`` and ``read.weight_ih_l0_reverse``."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.GRU(4, 6, bidirectional=True, batch_first=True)
        self.last = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.read(x.view(len(x), 3, 4))[0][:, -1])
        return result


class Deep(nn.Module):
    """The same without batch norm, for stages and microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        result: Tensor = self.last(h)
        return result


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(F.dropout(self.first(x).cos(), 0.5))
        return result


LAYOUTS: list[tuple[str, str, type[nn.Module]]] = [
    ("island=2,dp=2", "ddp", Net),
    ("island=2,dp=2", "fsdp", Net),
    ("island=2,tp=2", "megatron", Net),
    ("island=4", "ddp", Net),
    ("island=2,dp=2", "ddp", Both),
    ("island=2,pp=2", "ddp;microbatches = 2", Deep),
    ("island=2,dp=2", 'zero1;microbatches = 2', Deep),
]  # fmt: skip


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def batch(step: int, island: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(100 * step + island)
    x = torch.randn(8, 12, dtype=torch.float64, generator=numbers)
    return x, x[:, :4].sin()


def plan(own: str, preset: str) -> str:
    """``own``: the entries of [local_steps], or of [stale]."""
    head, _, more = preset.partition(";")
    table = "stale" if own.startswith("steps") else "local_steps"
    return f'preset = "{head}"\n{more}\nallow = ["{table}"]\n[{table}]\n{own}\n'


@cache
def compiled(mesh: str, preset: str, own: str, kind: Any) -> Program:
    """Once in each process: a run of several stages is not about compiling."""
    return compile(made(kind), mesh, batch(0, 0), loss=loss, plan=plan(own, preset))


def begin(mesh: str, preset: str, own: str, kind: Any = Net) -> tuple[Stage, torch.optim.Optimizer]:
    stage = compiled(mesh, preset, own, kind).module()
    stage.load_full(made(kind))
    return stage, torch.optim.AdamW([p for p in stage.parameters() if p.requires_grad], lr=1e-2)


def train(stage: Stage, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(stage.step(*batch(step, stage.coords["island"])).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
