"""Styles of models that once met a raw error, or a refusal that was none of theirs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.errors import PlanError, TraceError
from tests.styles import STYLES

RIGHT: dict[tuple[str, str], dict[str, Any]] = {
    # an index outside of a rank's rows would be counted outside of the kernel's memory
    ("factorisation by frequency", "tp=2"): {"plan": "megatron"},
    # gradients of two dtypes cannot leave in one transfer
    ("complex layers", "dp=2"): {"plan": "ddp", "microbatches": 2},
    ("two dtypes", "dp=2"): {"plan": "zero1", "microbatches": 2},
    # nothing is trained: no gradients, no optimizer
    ("all frozen", "dp=2"): {"plan": "fsdp"},
    ("old weight norm", "tp=2"): {"plan": "megatron"},
    ("a number as input", "dp=2"): {"plan": "ddp"},
    ("one tensor as batch", "dp=2"): {"plan": "ddp"},
    ("equal blocks and a head", "pp=4"): {"plan": "ddp", "microbatches": 4},
    # of the candidates some need what the model does not allow
    ("mixture by sort", "pp=2"): {"plan": "auto"},
    # a number that is added to a mean of the batch
    ("likeness by fixed windows", "pp=2"): {"plan": "ddp", "microbatches": 2},
    # samples that are mixed before the model reads them
    ("mixup of pictures", "dp=2"): {"plan": "ddp"},
    # what its backward reads again is as long as the longest target of the samples at hand
    ("connectionist temporal", "pp=2"): {"plan": "auto", "microbatches": 2},
    ("graph attention", "dp=2"): {"plan": "ddp"},
    ("mixture with capacity", "dp=2"): {"plan": "ddp"},
    # two parameters are expanded, one of a late gather, before anything is computed
    ("transformer of sets", "dp=2"): {"plan": "zero1", "microbatches": 2},
    # a mask for each head, where a rank has some of the heads
    ("prefix from lengths", "tp=2"): {"plan": "megatron"},
    # two lists of blocks whose paths have no word
    ("equal layers without a word", "dp=2"): {"plan": "fsdp"},
    ("lists of equal layers in a list", "dp=2"): {"plan": "fsdp"},
}


@pytest.mark.rows(2)
@pytest.mark.parametrize(("name", "mesh"), RIGHT)
def test_a_style_is_right(name: str, mesh: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the old weight_norm
        one = STYLES[name]()
    program = partc.compile(one.model, mesh, one.inputs, loss=one.loss, **RIGHT[name, mesh])
    partc.verify(program, one.model, one.inputs, loss=one.loss).check()


REFUSED = {
    "lazy": "the model's 0 is a LazyLinear",
    "sparse gradients": "0.weight: its gradient is sparse",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_style_is_refused_by_name(name: str) -> None:
    one = STYLES[name]()
    with pytest.raises(TraceError, match=REFUSED[name]):
        partc.compile(one.model, "dp=2", one.inputs, loss=one.loss, plan="ddp")


@pytest.mark.parametrize("how", [{}, {"schedule": "forward-only"}])
def test_a_loss_that_trains_nothing_is_refused_with_microbatches(how: dict[str, Any]) -> None:
    one = STYLES["all frozen"]()
    with pytest.raises(PlanError, match=r"has a loss and trains no parameter.*microbatches=1"):
        partc.compile(one.model, "dp=2", one.inputs, loss=one.loss, microbatches=2, **how)


@pytest.mark.rows(2)
@pytest.mark.parametrize("axis", ["step", "seed", "stages", "forward", "lambda", "None"])
def test_an_axis_cannot_have_a_name_of_the_programs(axis: str) -> None:
    model, batch = nn.Linear(4, 4), (torch.randn(4, 4),)
    plan = f'[inputs]\n"x" = {{ {axis} = 0 }}'
    with pytest.raises(PlanError, match=f"an axis is called '{axis}'"):
        partc.compile(model, {axis: 2}, batch, loss=lambda m, x: m(x).mean(), plan=plan)


def test_nor_that_of_another_axis_with_its_rank() -> None:
    model, batch = nn.Linear(4, 4), (torch.randn(4, 4),)
    plan = '[inputs]\n"x" = { dp = 0, dp_rank = 1 }'
    with pytest.raises(PlanError, match="an axis is called 'dp_rank'"):
        partc.compile(model, "dp=2,dp_rank=2", batch, loss=lambda m, x: m(x).mean(), plan=plan)


def test_a_plan_may_be_a_text_of_one_line() -> None:
    model, batch = nn.Linear(4, 4), (torch.randn(4, 4),)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x).mean()
        return result

    program = partc.compile(model, "dp=2", batch, loss=loss, plan='preset = "ddp"')
    assert program.plan == partc.compile(model, "dp=2", batch, loss=loss, plan="ddp").plan
