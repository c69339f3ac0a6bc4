"""Which blocks a forward shows to be equal, and what speaks against leaving any out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partc.graph.folds import RepeatedBlocks
from partc.lowering import trace
from partc.trace import scan_blocks
from partc.trace.scan_blocks import FEWEST, spare_blocks

WHOLE = (RepeatedBlocks("blocks", 2, 6),)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block() for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def total(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    return loss


def spared(model: nn.Module) -> tuple[RepeatedBlocks, ...]:
    return spare_blocks(model, (torch.randn(4, 8),), total, True)


def with_forward(model: Tower, index: int, forward: Callable[[Any, Tensor], Tensor]) -> Tower:
    """The model, one of whose blocks computes something else."""
    block: Any = model.blocks[index]
    block.forward = lambda x: forward(block, x)
    return model


def test_the_middle_of_equal_blocks() -> None:
    assert spared(Tower()) == WHOLE


def test_one_that_computes_something_else_parts_them() -> None:
    model = with_forward(Tower(), 4, lambda block, x: torch.sigmoid(block.linear(x)) * block.scale)
    assert spared(model) == ()


def test_a_constant_of_its_own_parts_them() -> None:
    model = Tower()
    model.blocks[4].scale.fill_(3.0)
    assert spared(model) == ()


def test_a_frozen_one_parts_them() -> None:
    model = Tower()
    model.blocks[4].linear.weight.requires_grad_(False)
    assert spared(model) == ()


def test_what_leaves_the_graph_parts_them() -> None:
    def without_gradient(block: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = block.linear(x)
        return torch.tanh(y) * 2

    assert spared(with_forward(Tower(), 4, without_gradient)) == ()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def own_function(block: Any, x: Tensor) -> Tensor:
    doubled: Any = Doubled
    y: Tensor = torch.tanh(doubled.apply(block.linear(x))) * block.scale
    return y


def own_hook(block: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.tanh(block.linear(x))
    y.register_hook(lambda grad: grad * 3)
    return y * 2


def in_place(block: Any, x: Tensor) -> Tensor:
    return x.add_(torch.tanh(block.linear(x)) * block.scale)


@pytest.mark.parametrize("forward", [own_function, own_hook, in_place])
def test_what_a_forward_does_not_show_speaks_against_it(
    forward: Callable[[Any, Tensor], Tensor],
) -> None:
    model = Tower()
    for index in range(9):
        with_forward(model, index, forward)
    assert spared(model) == ()


def test_a_backward_hook_of_a_module_speaks_against_it() -> None:
    model = Tower()
    model.blocks[4].register_full_backward_hook(lambda module, grads, outer: None)
    assert spared(model) == ()


def test_a_failing_forward_is_left_to_the_recording() -> None:
    assert spared(with_forward(Tower(), 4, lambda block, x: x @ torch.zeros(3))) == ()


def test_the_graph_knows_the_constants_of_blocks_that_did_not_run() -> None:
    graph = trace(Tower(), (torch.randn(4, 8),), total, fold=True)
    assert graph.folds == WHOLE
    assert sorted(graph.constants) == [f"blocks.{i}.scale" for i in range(9)]


def test_the_model_is_left_as_it_was() -> None:
    model = Tower()
    before = [dict(vars(module)) for module in model.modules()]
    spared(model)
    assert [dict(vars(module)) for module in model.modules()] == before


def test_few_blocks_need_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = [], scan_blocks._run

    def noted(*given: Any) -> Any:
        runs.append(given)
        return run(*given)

    monkeypatch.setattr(scan_blocks, "_run", noted)
    model = Tower()
    model.blocks = nn.ModuleList(Block() for _ in range(FEWEST - 1))
    assert spared(model) == ()
    assert not runs
    model.blocks.append(Block())
    spared(model)
    assert runs
