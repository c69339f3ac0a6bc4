"""What scripts do with a parameter of another pipeline rank ends in a sentence that names it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partc.errors import RunError
from partc.program.tensors.stand_in import StandIn

OPERATORS = ["add", "sub", "mul", "truediv", "matmul", "pow", "lt", "ge", "iadd", "imul"]


def stand_in() -> StandIn:
    made = StandIn(torch.empty(0))
    made.called, made.places = "0.weight", (1,)
    return made


@pytest.mark.parametrize("name", OPERATORS)
def test_a_gradient_that_is_not_here_is_refused_by_name(name: str) -> None:
    run, param = getattr(operator, name), stand_in()
    pairs: list[tuple[Any, Any]] = [(param, param.grad)]
    for left, right in pairs if name[0] == "i" else [*pairs, pairs[0][::-1]]:
        with (
            torch.no_grad(),
            pytest.raises(RunError, match=r"of 0.weight and None: .* rank 1.*p.grad is None"),
        ):
            run(left, right)


CALLS: dict[str, Callable[[Any], Any]] = {
    "add_": lambda p: p.data.add_(p.grad, alpha=-0.1),
    "index": lambda p: p[0],
    "len": len,
    "loop": list,
    "size": lambda p: p.size(1),
    "view": lambda p: p.view(4, 4),
    "product": lambda p: p @ p[1],
    "max": lambda p: p.max(),
    "bits": lambda p: p & 1,
    "svd": torch.linalg.svd,
    "linear": lambda p: F.linear(p, p.view(1, -1, 1)),
    "with another": lambda p: F.linear(torch.ones(2, 3), p),
    "equal": lambda p: torch.equal(p, p),
    "close": lambda p: torch.allclose(p, p),
    "number": lambda p: p.norm().item(),
    "branch": lambda p: bool(p.isnan().any()),
    "text": lambda p: f"{p.norm():.3f}",
}


@pytest.mark.parametrize("name", CALLS)
def test_what_needs_its_value_is_refused_by_name(name: str) -> None:
    with pytest.raises(RunError, match=r"of 0.weight"):
        CALLS[name](stand_in())


def test_scripts_may_look_at_it_and_print_it() -> None:
    param = stand_in()
    assert param.grad is None
    assert (param == None) is False  # noqa: E711  (as scripts write it)
    assert param.numel() == 0
    assert str(param.norm()) == f"{param.norm()}" == "StandIn(0.weight, on pipeline rank 1)"
    computed: Tensor = (param * 2).abs().sum()
    assert isinstance(computed, StandIn)
    with pytest.raises(TypeError, match="must be Tensor, not str"):
        param.add_(cast(Any, "text"))  # wrong of whole tensors too
