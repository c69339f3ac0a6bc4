"""A program on fakes holds what it holds on real tensors, and the report says on which line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from partc.api import compile
from partc.dryrun.alone import alone
from partc.dryrun.run import dry_run
from partc.program.role import Role
from partc.reports.cost import cost_report
from tests.allocations import measured_peak_bytes
from tests.build import mlp
from tests.dryrun.hand_program import SOURCE
from tests.zoo import MODELS

TOLERANCE = 0.05


def test_names_dels_and_functions_count(golden: Callable[..., None]) -> None:
    ran = dry_run(Role.load(SOURCE, "hand.py"))
    assert ran.peak_bytes == 3 * 1600  # y, local and what twice returns
    golden("\n".join(f"{h.num_bytes:6} B  {h}" for h in ran.holders))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "mesh", "plan"),
    [
        ("gpt2", "dp=2", "ddp"),
        ("llama", "dp=2,tp=2", "fsdp+megatron"),
        pytest.param("t5", "tp=2", "megatron", marks=pytest.mark.exhaustive),
        pytest.param("resnet", "dp=2", "ddp", marks=pytest.mark.exhaustive),
    ],
)
def test_generated_programs(name: str, mesh: str, plan: str) -> None:
    case = MODELS[name]()
    program = compile(case.model, mesh, case.inputs, loss=case.loss, plan=plan)
    role = program.role(0)
    with alone(role, 0) as here:
        step: Any = role.build(here)
        for tensor in (*step.parameters(), *step.buffers()):
            tensor.detach().fill_(1)
        step.step(*case.inputs)  # kernels set themselves up on first use
        step.zero_grad()
        measured = measured_peak_bytes(lambda: step.step(*case.inputs))
    assert measured > sum(p.grad.nbytes for p in step.parameters())
    assert dry_run(role).peak_bytes == pytest.approx(measured, rel=TOLERANCE)


def test_report_of_a_program(golden: Callable[..., None]) -> None:
    golden(str(cost_report(mlp(), role=Role.load(SOURCE, "hand.py"))))


def test_gradients_are_made_in_the_memory_that_is_sent() -> None:
    """A copy of a layer's gradients would be more than everything else that is held."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2)))
    batch = (torch.randn(4, 64),)
    program = compile(blocks, "dp=2", batch, loss=lambda m, x: m(x).square().mean(), plan="ddp")
    ran = dry_run(program.role(0))
    grads = sum(p.nbytes for p in blocks.parameters())
    assert grads < ran.peak_bytes < 1.25 * grads
