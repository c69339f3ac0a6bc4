"""Blocks inside of blocks: a class that several classes share, with its weights and its draws."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import partc
from benchmarks.lines import MODELS
from partc.codegen.repeats.contiguous import in_one_piece
from partc.plan import Plan
from tests.codegen.test_account import MUCH, Noted, assert_agrees
from tests.styles.made import Attention, Branches


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


@pytest.mark.exhaustive
def test_blocks_of_two_lists_share_a_class() -> None:
    source = checked("t5", "dp=2", "ddp")
    assert source.count("\nclass T5LayerFF(") == 1
    assert instances(source, "T5LayerFF") == ["layer_1", "layer_2"]
    assert 'f"{self.name}.layer.1"' in source, "a draw's site begins with the block's own path"
    assert instances(source, "T5LayerSelfAttention") == ["layer_0", "layer_0"]
    waits = [line for line in source.splitlines() if "exposed" in line]
    assert len(waits) == 2, "no sum is waited for inside of a layer: of targets, and the last"
    assert "reduced.finish()" in waits[1]


@pytest.mark.exhaustive
def test_blocks_inside_and_outside_of_others_share_a_class() -> None:
    source = checked("resnet", "dp=2", "ddp")
    assert source.count("\nclass BatchNorm2d(") == 1
    inside = [name for name in instances(source, "BatchNorm2d") if name.startswith("layer_")]
    assert inside.count("layer_0_normalization") == inside.count("layer_1_normalization") == 2
    assert "divisor=divisor" in source


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "preset"), [("resnet", "ddp"), ("t5", "fsdp")])
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


# blocks in lists in lists --------------------------------------------------------------------
class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(16, 2, causal=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.relu(x) * torch.sigmoid(self.attention(x))
        return result


def branches() -> nn.Module:
    parts = {"0": nn.ReLU(), "layers": Attention(16, 4, causal=True)}
    return Branches(parts, gated=True)


def lists(block: Callable[[], nn.Module], *lengths: int) -> nn.Module:
    """Lists of lists of equal blocks: two lists of three, say."""
    if not lengths:
        return block()
    return nn.Sequential(*(lists(block, *lengths[1:]) for _ in range(lengths[0])))


def means(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(model(x).mean(1), label)


def squares(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    result: Tensor = (model(x) - label[:, None, None]).square().mean()
    return result


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("block", "lengths", "loss"),
    [
        (branches, (3, 2, 2), means),
        (Gated, (3, 2, 2), squares),
    ],
)
def test_lists_of_lists(
    block: Callable[[], nn.Module], lengths: tuple[int, ...], loss: Callable[..., Tensor]
) -> None:
    """The gradients of the last blocks are summed elsewhere than those of the others."""
    torch.manual_seed(0)
    model, x, label = lists(block, *lengths), torch.randn(8, 4, 16), torch.randint(0, 16, (8,))
    for name, param in model.named_parameters():  # open gates: no gradient is rounding alone
        if name.endswith("o.bias"):
            nn.init.constant_(param, 4)
    program = partc.compile(model, "dp=2,tp=2", (x, label), loss=loss, plan="fsdp+megatron-sp")
    partc.verify(program, model, (x, label), loss=loss).check()


@pytest.mark.exhaustive
def test_a_list_without_a_name() -> None:
    batch = torch.randn(8, 4, 16), torch.randint(0, 16, (8,))
    program = partc.compile(lists(Gated, 4, 2), "tp=4", batch, loss=means, plan="megatron")
    source = program.source()
    assert "BLOCKS_SHARDS" in source
