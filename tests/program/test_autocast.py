"""Autocast around a call of a stage: the casts of one process, by a program of their own."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import RunError
from partc.verification.processes import Processes

pytestmark = pytest.mark.gloo
BATCH = torch.linspace(-1, 1, 32).view(4, 8), torch.linspace(0, 1, 16).view(4, 4)
Casts = contextlib.AbstractContextManager[None]


class Net(nn.Module):
    """Layers in bfloat16, a softmax in float32, and a product that autocast leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.one(x).softmax(-1)) * 3
        return y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def casts(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


def alike(found: Tensor, expected: Tensor, bits: int = 8) -> None:
    """Equal but for the order of sums, in ``bits`` of a number."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2.0**-bits, atol=2.0 ** -(bits + 2))


def evaluated_and_trained() -> None:
    model = Net()
    stage = partc.compile(model, "dp=2", BATCH, loss=loss_of, plan="fsdp").module()
    with casts():
        loss, expected = stage.step(*BATCH), loss_of(model, *BATCH)
    expected.backward()
    alike(loss, expected.detach())
    for name, param in stage.named_parameters():
        alike(param.grad.full_tensor(), model.get_parameter(name).grad)  # type: ignore[union-attr,arg-type]
    stage.zero_grad()
    with casts():
        back = stage(*BATCH)
    back.backward()
    alike(stage.one.weight.grad.full_tensor(), model.one.weight.grad)  # type: ignore[arg-type]
    stage.eval()
    model.eval()
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            with casts(dtype):
                alike(stage(BATCH[0]), model(BATCH[0]))
        with casts():
            alike(stage.eval_step(*BATCH), loss_of(model, *BATCH))
            with torch.autocast("cpu", enabled=False):
                alike(stage(BATCH[0]), model(BATCH[0]), bits=20)
        alike(stage(BATCH[0]), model(BATCH[0]), bits=20)


def loaded(path: Path) -> None:
    """A program that was compiled ahead in autocast, and one that nobody compiled."""
    program, model = partc.load(path), Net().eval()
    stage = program.module()
    stage.load_full(model)
    stage.eval()
    with torch.no_grad(), casts():
        alike(stage(BATCH[0]), model(BATCH[0]))
    with casts(torch.float16), pytest.raises(RunError, match=r"under autocast \(cpu float16\)"):
        stage(BATCH[0])


def test_a_call_in_autocast_has_its_casts(world: Processes) -> None:
    world.run(evaluated_and_trained, num=2)


def test_programs_in_autocast_are_compiled_ahead(world: Processes, tmp_path: Path) -> None:
    program = partc.compile(Net(), "dp=2", BATCH, loss=loss_of, plan="ddp")
    with casts():
        program.for_shapes((BATCH[0],), modes=("forward",)).save(tmp_path / "saved")
    world.run(loaded, tmp_path / "saved", num=2)
