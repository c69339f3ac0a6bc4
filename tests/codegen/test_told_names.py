"""Names that say what a value is: of gradients, of what torch's own code computes, of classes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from tests.codegen.test_calls import Cell


class Decoder(nn.Module):
    """Each block reads what an encoder gave."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.up = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.norm(x)
        scores = torch.softmax(self.q(y) @ self.k(memory).mT, -1)
        out: Tensor = x + torch.tanh(self.up(scores @ memory))
        return out


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 8)
        self.h = nn.ModuleList(Decoder() for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        memory = self.into(memory)
        for block in self.h:
            x = block(x, memory)
        return x.square().mean()


@pytest.mark.exhaustive
def test_the_gradient_of_the_main_value_is_the_main_gradient() -> None:
    """A total to which all blocks add may be larger, and is not what runs through them."""
    inputs = torch.randn(4, 3, 8), torch.randn(4, 9, 8)
    text = partc.compile(Reads(), inputs=inputs, mesh="dp=2", plan="ddp").source()
    backward = text[text.index("def backward(") :]
    given, *_ = re.findall(r"d_up = torch\.ops\.aten\.tanh_backward\((\w+), ", backward)
    assert given == "d_y"
    assert "class Decoder(nn.Module):" in text  # the list's name, `h`, says nothing


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = Cell(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(6):
            h = self.cell(x[:, t], h)
        y: Tensor = self.out(h)
        return y.square().mean()


@pytest.mark.exhaustive
def test_a_weight_s_total_is_not_called_as_the_state() -> None:
    text = partc.compile(
        Tagger(), inputs=(torch.randn(4, 6, 8),), mesh="tp=2", plan="megatron"
    ).source()
    assert not re.search(r"d_[xy] = torch\.(full|zeros)\(", text)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.normalize(x, dim=-1)[:, 0].sum(0).square().mean()


@pytest.mark.exhaustive
def test_torch_s_own_attention_names_queries_keys_and_values() -> None:
    model, x = Encoder(), torch.randn(4, 5, 8)
    program = partc.compile(model, "dp=2", (x,), plan="ddp")
    text = program.source()
    for name in ("in_proj", "q", "k", "v"):
        assert re.search(rf"\b(\w+_)?{name} = ", text), name
    assert "denom = torch.clamp_min(" in text
    assert partc.verify(program, model, (x,)).worst.error < 1e-12


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = torch.relu(layer(x))
        return x.square().mean()


def test_a_batch_norm_of_all_ranks_names_its_statistics() -> None:
    text = partc.compile(Norms(), "dp=2", (torch.randn(8, 6),), plan="ddp").source()
    for name in ("mean", "var", "rstd", "normed", "x_hat", "running_mean", "running_var"):
        assert re.search(rf"\b{name} = ", text), name
    assert not re.search(r"\b(div|mul|sub|rsqrt|reshape)\w*_\d = ", text)


class Twice(nn.Module):
    """Two modules of one name, at paths of which one ends the other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.output = nn.Module(), nn.Module()
        self.attention.output, self.attention.output.dense = nn.Module(), nn.Linear(8, 8)
        self.output.dense = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.attention.output.dense(x))  # type: ignore[operator, union-attr]
        return x + torch.tanh(self.output.dense(x))  # type: ignore[operator]


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Twice() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return x.square().mean()


def test_a_value_is_called_as_its_module_s_whole_path_if_two_want_that() -> None:
    text = partc.compile(Layered(), "dp=2", (torch.randn(4, 8),), plan="ddp").source()
    assert " output_dense = F.linear(" in text
    assert "for layer in self.layers:" in text  # a list called as the loop's variable
