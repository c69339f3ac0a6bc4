"""What every reader cuts in one way is computed in pieces, and no transfer brings zeros."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc


class Placed(nn.Module):
    """Adds to each token what its place says, looked up for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(16, 8), nn.Embedding(6, 8)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).expand(ids.shape)
        y: Tensor = self.words(ids) + self.places(places)
        return y.square().mean()


class Graph(nn.Module):
    """Adds to each node what its neighbours say."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 4)

    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        near = torch.zeros_like(x).index_add(0, dst, x[src])
        y: Tensor = self.mix(near)
        return y.square().mean()


class Recurrent(nn.Module):
    """Starts with a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.h, self.out = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = x.new_zeros(ids.shape[0], 6)
        for t in range(ids.shape[1]):
            h = torch.tanh(self.h(h) + x[:, t])
        y: Tensor = self.out(h)
        return y.square().mean()


class Biased(nn.Module):
    """A block between norms, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Biased() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y.square().mean()


class Bags(nn.Module):
    """Tables of whose rows each sample sums several, or takes the mean of."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(12, 6, mode=mode), nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.out(self.table(ids))
        return y.square().mean()


IDS = torch.arange(24).reshape(4, 6) % 6
EDGES = torch.randn(8, 6), torch.arange(12) % 8, torch.arange(12) % 5


def compiled(model: nn.Module, inputs: tuple[Tensor, ...], mesh: str, **options: Any) -> str:
    """The text of a program that computes what the model computes."""
    program = partc.compile(model, mesh, inputs, **options)
    assert partc.verify(program, model, inputs).worst.error < 1e-12
    return program.source()


def test_a_look_up_for_the_whole_batch_is_one_for_a_piece() -> None:
    text = compiled(Placed(), (IDS,), "dp=2", plan="ddp")
    assert ".expand(2, 6)" in text
    assert ".expand(4, 6)" not in text


def test_no_transfer_brings_zeros() -> None:
    text = compiled(Graph(), EDGES, "dp=2", plan="ddp")
    assert "zeros" in text
    assert not re.search(r"zeros\w*, \w+_done = ", text)


def test_a_state_of_zeros_is_not_cut_without_cause() -> None:
    text = compiled(Recurrent(), (IDS,), "tp=2", plan="megatron")
    assert "embed.new_zeros((4, 6))" in text
    assert "embed = masked_embedding(" in text  # a sum over ranks is called as its module


@pytest.mark.exhaustive
def test_the_last_block_finishes_its_gradients_as_all_others() -> None:
    text = compiled(Tower(), (torch.randn(4, 6, 8),), "dp=2,tp=2", plan="fsdp+megatron-sp")
    assert "# blocks.1 .. 2" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
    ("mesh", "plan", "more"),
    [("dp=2", "ddp", {"microbatches": 2}), ("dp=2,tp=2", "fsdp+megatron", {})],
)
def test_a_batch_of_bags_is_cut(mode: str, mesh: str, plan: str, more: dict[str, int]) -> None:
    text = compiled(Bags(mode), (IDS,), mesh, plan=plan, **more)
    assert "embedding_bag" not in text
