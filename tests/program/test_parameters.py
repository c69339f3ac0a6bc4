"""Tools of torch over a stage's parameters compute what they compute on one device, or refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.program import load
from partc.program.runtime import Stage
from partc.verification.processes import Processes
from tests.patience import patience

pytestmark = pytest.mark.gloo
NUM_STEPS = 10
Params = Iterable[nn.Parameter]


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Towers(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def model_of(seed: int = 0) -> Towers:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Towers()


def batch_of(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 12, generator=generator), torch.randn(8, 8, generator=generator)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@pytest.fixture(scope="module")
def world() -> Iterator[Processes]:
    with Processes(4, timeout=patience()) as processes:
        yield processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "fsdp-megatron"
    partc.compile(
        model_of(), "dp=2,tp=2", batch_of(), loss=loss_of, plan="fsdp+megatron"
    ).save(path)
    return path


class Whitened(torch.optim.Optimizer):
    """Whole-tensor code as Shampoo's: each matrix gradient is multiplied by statistics of itself."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() < 2:
                    p.sub_(group["lr"] * p.grad)
                    continue
                state = self.state[p]
                rows = p.grad @ p.grad.T
                state["rows"] = state["rows"] + rows if state else rows
                p.sub_(group["lr"] * (state["rows"] @ p.grad) / (1 + state["rows"].norm()))
        return loss


def stage_of(folder: Path, seed: int = 0) -> Stage:
    stage = load(folder).module()
    stage.load_full(model_of(seed))
    return stage


def muon(params: Params) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2)


MAKERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Muon": muon,
    "Whitened": lambda params: Whitened(params, lr=1e-2),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "LBFGS": lambda params: torch.optim.LBFGS(list(params), lr=0.5, max_iter=3),
}


def train(module: nn.Module, loss_and_grads: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            return loss_and_grads()

    return [float(optimizer.step(closure)) for _ in range(NUM_STEPS)]


def alone(maker: str) -> tuple[list[float], dict[str, Tensor]]:
    model = model_of()
    batch = batch_of()

    def run() -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        return loss

    return train(model, run, MAKERS[maker](model.parameters())), model.state_dict()


def on_ranks(folder: Path, maker: str, how: str) -> None:
    stage, batch = stage_of(folder), batch_of()
    optimizer = MAKERS[maker](stage.parameters())
    if how != "dtensors":
        getattr(stage, how)(optimizer)
    losses = train(stage, lambda: stage.step(*batch), optimizer)
    expected, weights = alone(maker)
    tolerance = 1e-2 if maker == "Muon" and how == "dtensors" else 1e-6
    assert losses == pytest.approx(expected, rel=tolerance)
    for name, tensor in stage.full_state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("maker", "how"),
    [(m, "dtensors") for m in MAKERS]
    + [(m, "step_on_pieces") for m in MAKERS]
    + [(m, "step_on_whole") for m in MAKERS],
)
def test_optimizers(world: Processes, folder: Path, maker: str, how: str) -> None:
    world.run(on_ranks, folder, maker, how)
