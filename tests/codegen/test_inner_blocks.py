"""Blocks inside of blocks: a class that several classes share, with its weights and its draws."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn

import partc
from partc.codegen.repeats import blocks
from partc.codegen.repeats.contiguous import in_one_piece
from partc.plan import Plan
from tests.codegen.test_account import MUCH, Noted, assert_agrees

WIDTH, BATCH = 12, 8
X = torch.randn(BATCH, 4, WIDTH, generator=torch.Generator().manual_seed(0))


class Feed(nn.Module):
    """A norm, a gated product and a dropout, beside which the input goes on."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(rate)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        result: Tensor = x + self.drop(self.down(torch.sigmoid(self.gate(y)) * self.up(y)))
        return result


class Mixer(nn.Module):
    """Two feed forwards, of which each is a block inside of this one."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.one, self.two = Feed(rate), Feed(rate)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.two(torch.tanh(self.one(x)))
        return found


class Encoder(nn.Module):
    def __init__(self, rate: float = 0.1, inner: type[nn.Module] = Feed) -> None:
        super().__init__()
        self.mix, self.ff = nn.Linear(WIDTH, WIDTH), inner(rate)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.ff(x + torch.relu(self.mix(x)))
        return found


class Decoder(nn.Module):
    def __init__(self, rate: float = 0.1, inner: type[nn.Module] = Feed) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed = inner(rate)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        found: Tensor = self.feed(torch.tanh(self.first(x)) + self.second(memory))
        return found


class Both(nn.Module):
    """Two lists of blocks of two classes; the blocks of both have a ``Feed``."""

    def __init__(
        self, rates: tuple[float, float] = (0.1, 0.1), inner: type[nn.Module] = Feed
    ) -> None:
        super().__init__()
        self.enc = nn.ModuleList(Encoder(rate, inner) for rate in rates)
        self.dec = nn.ModuleList(Decoder(rate, inner) for rate in rates)
        self.stem, self.start = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        memory, y = self.stem(x), self.start(x)
        for block in self.enc:
            memory = block(memory)
        for block in self.dec:
            y = block(y, memory)
        result: Tensor = self.head(y).square().mean()
        return result


def compiled(model: nn.Module, mesh: str, plan: str, **options: Any) -> Any:
    return partc.compile(model, mesh, (X,), loss=lambda m, x: m(x), plan=plan, **options)


def checked(model: nn.Module, mesh: str, plan: str, **options: Any) -> str:
    """The source of a program, after it was compared with the model."""
    program = compiled(model, mesh, plan, **options)
    report = partc.verify(program, model, (X,), loss=lambda m, x: m(x))
    assert report.ok(), report.worst
    source: str = program.source()
    return source


def instances(source: str, name: str = "Feed") -> list[str]:
    return re.findall(rf"self\.(\w+) = {name}\(", source)


@pytest.mark.parametrize(
    ("mesh", "plan", "options"),
    [
        ("dp=2", "ddp", {}),
        ("dp=2", "fsdp", {"microbatches": 2}),
        ("dp=2", "ddp", {"compile": "inductor"}),
    ],
)
def test_blocks_of_two_lists_share_a_class(mesh: str, plan: str, options: dict[str, Any]) -> None:
    source = checked(Both(), mesh, plan, **options)
    assert source.count("\nclass Feed(") == 1
    assert instances(source) == ["ff", "feed"]
    assert 'f"{self.name}.ff"' in source, "a draw's site begins with the block's own path"


def test_a_program_is_shorter_with_inner_blocks() -> None:
    with patch.object(blocks, "nested", lambda graph, runs, alone: runs):
        flat = compiled(Both(), "dp=2", "ddp").source()
    assert not instances(flat)
    nested = compiled(Both(), "dp=2", "ddp").source()
    assert len(nested.splitlines()) < len(flat.splitlines())


def test_inner_blocks_have_inner_blocks() -> None:
    source = checked(Both(inner=Mixer), "dp=2", "fsdp")
    assert instances(source, "Mixer") == ["ff", "feed"]
    assert source.count("\nclass Mixer(") == 1


def test_numbers_of_inner_blocks_are_given_by_the_blocks_around() -> None:
    source = checked(Both(rates=(0.1, 0.3)), "dp=2", "ddp")
    assert instances(source) == ["ff", "feed"]
    assert "p=p" in source


def test_names_of_parameters_are_the_models() -> None:
    model = Both()
    program = compiled(model, "dp=1", "ddp")
    stage = program.module()
    stage.load_full(model)
    mine = stage.full_state_dict()
    theirs = model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("preset", ["ddp", "fsdp"])
def test_memory_is_counted_as_it_is_held(preset: str) -> None:
    plan = Plan(preset=preset, memory_bytes=MUCH)
    assert_agrees(Noted(Both(), "dp=2", (X,), loss=lambda m, x: m(x), plan=plan))


# order ---------------------------------------------------------------------------------------
def chain(num: int) -> list[fx.Node]:
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(num):
        nodes.append(graph.call_function(torch.relu, (nodes[-1],)))
    return nodes[1:]


def test_calls_of_a_piece_move_together() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a, b = (graph.call_function(torch.relu, (x,)) for _ in range(2))
    c, d = (graph.call_function(torch.relu, (n,)) for n in (a, b))
    assert in_one_piece([a, b, c, d], [[a, c]]) == [0, 2, 1, 3]


def test_a_piece_through_which_others_run_has_no_place() -> None:
    nodes = chain(3)
    assert in_one_piece(nodes, [[nodes[0], nodes[2]]]) is None
