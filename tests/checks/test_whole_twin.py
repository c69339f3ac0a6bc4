"""Calls on whole tensors, of which the checks ask the rules, where some results are not read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import partc
from partc.checks.whole_twin import whole_twin
from partc.graph import results_of
from partc.rules import strategies
from partc.rules.signature import Signature
from tests.rule_cases.cases import cases_by_rule


def with_several_results() -> list[Signature]:
    each = [case for cases in cases_by_rule().values() for case in cases]
    return [case for case in each if len(results_of(case.node())) > 1]


@pytest.mark.exhaustive
def test_results_that_nobody_reads_change_nothing() -> None:
    cases = with_several_results()
    assert len(cases) > 50
    for case in cases:
        node = case.node()
        with FakeTensorMode(allow_non_fake_inputs=True):
            twin = whole_twin(node, [None] * len(results_of(node)))
        assert strategies(twin, 2) == strategies(node, 2), str(case)


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_group_norm_without_a_backward(groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(groups, 8), nn.Conv2d(8, 3, 1))
    x = torch.randn(4, 3, 4, 4)
    with torch.no_grad():
        program = partc.compile(model, "dp=2", (x,), plan="ddp")
    partc.verify(program, model, (x,)).check()


@pytest.mark.parametrize("sizes", [2, [1, 3]])
def test_parts_of_which_each_rank_has_one_row(sizes: int | list[int]) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        first, second = model(x).split(sizes)
        result: Tensor = (first.sum(0) * second.square().sum(0)).mean()
        return result

    model, x = nn.Linear(4, 3), torch.randn(4, 4)
    program = partc.compile(model, "dp=2", (x,), loss=loss, plan="ddp")
    partc.verify(program, model, (x,), loss=loss).check()
