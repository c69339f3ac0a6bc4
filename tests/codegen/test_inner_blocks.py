"""Blocks inside of blocks: a class that several classes share, with its weights and its draws."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import partc
from benchmarks.lines import MODELS
from partc.codegen.repeats.contiguous import in_one_piece
from partc.plan import Plan
from tests.codegen.test_account import MUCH, Noted, assert_agrees


def loss_of(model: nn.Module, **batch: Tensor) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def checked(name: str, mesh: str, plan: str) -> str:
    """The source of a program, after it was compared with the model."""
    model, batch = MODELS[name](2)
    program = partc.compile(model, mesh, batch, loss=loss_of, plan=plan)
    report = partc.verify(program, model, batch, loss=loss_of)
    assert report.ok(), report.worst
    return program.source()


def instances(source: str, name: str) -> list[str]:
    return re.findall(rf"self\.(\w+) = {name}\(", source)


def test_blocks_of_two_lists_share_a_class() -> None:
    source = checked("t5", "dp=2", "ddp")
    assert source.count("\nclass T5LayerFF(") == 1
    assert instances(source, "T5LayerFF") == ["layer_1", "layer_2"]
    assert 'f"{self.name}.layer.1"' in source, "a draw's site begins with the block's own path"
    assert not instances(source, "T5LayerSelfAttention"), "it would expose a sum of gradients"


def test_blocks_inside_and_outside_of_others_share_a_class() -> None:
    source = checked("resnet", "dp=2", "ddp")
    assert source.count("\nclass BatchNorm2d(") == 1
    inside = [name for name in instances(source, "BatchNorm2d") if name.startswith("layer_")]
    assert inside.count("layer_0_normalization") == inside.count("layer_1_normalization") == 2
    assert "divisor=divisor" in source


@pytest.mark.parametrize(("name", "preset"), [("t5", "fsdp"), ("resnet", "ddp")])
def test_memory_is_counted_as_it_is_held(name: str, preset: str) -> None:
    model, batch = MODELS[name](2)
    plan = Plan(preset=preset, memory_bytes=MUCH)
    assert_agrees(Noted(model, "dp=2", batch, loss=loss_of, plan=plan))


# order ---------------------------------------------------------------------------------------
def test_calls_of_a_piece_move_together() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a, b = (graph.call_function(torch.relu, (x,)) for _ in range(2))
    c, d = (graph.call_function(torch.relu, (n,)) for n in (a, b))
    assert in_one_piece([a, b, c, d], [[a, c]]) == [0, 2, 1, 3]


def test_a_piece_through_which_others_run_has_no_place() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(3):
        nodes.append(graph.call_function(torch.relu, (nodes[-1],)))
    assert in_one_piece(nodes[1:], [[nodes[1], nodes[3]]]) is None


# results -------------------------------------------------------------------------------------
class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(*heads)
        result: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return result


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.relu(x) * torch.sigmoid(self.attention(x))
        return result


def test_a_block_in_a_block_returns_what_kin_of_the_outer_one_return() -> None:
    """The gradients of the last blocks are summed elsewhere than those of the others."""
    torch.manual_seed(0)
    pairs = [[nn.Sequential(Gated(16), Gated(16)) for _ in range(2)] for _ in range(3)]
    model = nn.Sequential(*(nn.Sequential(*each) for each in pairs))
    x, way = torch.randn(8, 4, 16), {"loss": lambda m, x: m(x).square().mean()}
    program = partc.compile(model, "dp=2,tp=2", x, plan="fsdp+megatron-sp", **way)
    assert program.source().count("\nclass Gated(") == 1
    partc.verify(program, model, x, **way).check()
