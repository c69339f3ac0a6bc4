"""A small model, its compiled programs, and one training of it by any optimizer, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.program import load
from partc.program.stage.runtime import Stage

NUM_STEPS = 10
Params = Iterable[nn.Parameter]
Maker = Callable[[Params], torch.optim.Optimizer]


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


class Residuals(nn.Module):
    """Two blocks, a head, and a gain, which is a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(12, 8)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x) * self.gain
        return y


@contextmanager
def in_double() -> Iterator[None]:
    """Models and batches that are made within are of float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def model_of(seed: int = 0) -> Residuals:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Residuals()


def batch_of(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 12, generator=generator), torch.randn(8, 8, generator=generator)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def whole(tensor: Any) -> Tensor:
    """The whole of a stage's parameter or gradient; all ranks call this together."""
    joined: Tensor = tensor.full_tensor()
    return joined


def save_program(path: Path, mesh: str, plan: str, microbatches: int = 1) -> Path:
    """Compile the model and save its program; the path."""
    model, batch = model_of(), batch_of()
    partc.compile(
        model, mesh, batch, loss=loss_of, plan=plan, microbatches=microbatches
    ).save(path)  # fmt: skip
    return path


def stage_of(path: Path, seed: int = 0) -> Stage:
    """The stage of a saved program with the weights of ``model_of(seed)``."""
    stage = load(path).module()
    stage.load_full(model_of(seed))
    return stage


class FrozenTwice(nn.Module):
    """Begins and ends with one frozen matrix, so that a pipeline has it on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        for layer in self.layers:
            x = x + F.relu(layer(x))
        y: Tensor = self.frozen(x)
        return y


class Whitened(torch.optim.Optimizer):
    """Whole-tensor code like Shampoo's: a matrix gradient is multiplied by its own statistics."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() < 2:
                    p.sub_(group["lr"] * p.grad)
                    continue
                state = self.state[p]
                rows = p.grad @ p.grad.T
                state["rows"] = state["rows"] + rows if state else rows
                p.sub_(group["lr"] * (state["rows"] @ p.grad) / (1 + state["rows"].norm()))
        return loss


class LARS(torch.optim.SGD):
    """Steps as long as the weight, by numbers of Python."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(p.norm().item() / (p.grad.norm().item() + 1e-3))
        super().step()
        return loss


class LAMB(torch.optim.Optimizer):
    """Steps as long as the weight, by numbers of its own states."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = closure() if closure else None
        for p in self.param_groups[0]["params"]:
            if p not in self.state:
                self.state[p]["mean"] = torch.zeros_like(p)
            mean = self.state[p]["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
            p.sub_(mean, alpha=self.param_groups[0]["lr"] * p.norm().item() / mean.norm().item())
        return loss


def matrices(params: Params) -> list[nn.Parameter]:
    return [p for p in params if p.dim() == 2]


MAKERS: dict[str, Maker] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    # Makes its states at once. From an accumulator of 0 the first step would be as long for a
    # gradient that is all rounding, so that float32 would differ by processors.
    "Adagrad": lambda params: torch.optim.Adagrad(params, 1e-2, initial_accumulator_value=0.1),
    "Muon": lambda params: torch.optim.Muon(matrices(params), lr=1e-2),
    "LAMB": lambda params: LAMB(params, lr=1e-2),
    "LARS": lambda params: LARS(params, lr=1e-2),
    "Whitened": lambda params: Whitened(params, lr=1e-2),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "LBFGS": lambda params: torch.optim.LBFGS(
        list(params), max_iter=4, line_search_fn="strong_wolfe"
    ),
}


def train(optimizer: torch.optim.Optimizer, run: Callable[[], Tensor], num: int) -> list[float]:
    """The losses of some steps; ``run`` computes the loss and adds the gradients."""

    def closure() -> float:
        optimizer.zero_grad()
        with torch.enable_grad():
            return run().item()

    return [optimizer.step(closure) for _ in range(num)]


def train_stage(stage: Stage, optimizer: torch.optim.Optimizer, num: int) -> list[float]:
    batch = batch_of()
    return train(optimizer, lambda: stage.step(*batch), num)


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, num: int) -> list[float]:
    """The same in one process."""
    batch = batch_of()

    def run() -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        return loss

    return train(optimizer, run, num)


def difference(path: Path, maker: str, route: str, num_steps: int = NUM_STEPS) -> float:
    """How far a stage's losses and weights are from one process after some steps.

    ``route``: "" for an optimizer on DTensors, or the method of the stage that it goes by.
    """
    stage, model = stage_of(path), model_of()
    optimizer = MAKERS[maker](stage.parameters())
    if route:
        getattr(stage, route)(optimizer)
    found = train_stage(stage, optimizer, num_steps)
    expected = train_alone(model, MAKERS[maker](model.parameters()), num_steps)
    weights = model.state_dict()
    worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    whole = stage.full_state_dict()
    errors = [float((whole[name] - weights[name]).abs().max()) for name in weights]
    return max(worst, *errors)
