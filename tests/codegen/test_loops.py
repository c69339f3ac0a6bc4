"""Loops as people write them: each is printed as one class and a loop, at any depth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from tests.patience import patience

WIDTH, WORDS, POSITIONS = 8, 12, 6
IDS = (torch.arange(4 * POSITIONS).reshape(4, POSITIONS) % WORDS,)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Net(nn.Module):
    """Embeds words, goes through ``turns``, and says how likely each word is."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Mixer() for _ in range(num))

    def turns(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.turns(self.emb(ids)))
        return scores


class TwoLists(Net):
    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(num))

    def turns(self, x: Tensor) -> Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x


class SharedNorm(Net):
    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.norm = nn.LayerNorm(WIDTH)

    def turns(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x


class Parameters(Net):
    def __init__(self, num: int) -> None:
        super().__init__(0)
        self.w = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(num))
        self.b = nn.ParameterList(torch.zeros(WIDTH) for _ in range(num))

    def turns(self, x: Tensor) -> Tensor:
        for w, b in zip(self.w, self.b, strict=True):
            x = x + torch.tanh(x @ w + b)
        return x


class Scaled(nn.Module):
    def __init__(self, scale: float, rate: float) -> None:
        super().__init__()
        self.mix, self.scale, self.drop = Mixer(), scale, nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.scale * self.drop(self.mix(x))
        return y


class Numbers(Net):
    """Numbers that differ from turn to turn."""

    def __init__(self, num: int) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Scaled(1 / (i + 2), 0.1 + 0.1 * i) for i in range(num))

    def turns(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class FromFirst(Net):
    """All blocks read a bias that the first one computes from a table of its own."""

    def __init__(self, num: int) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Biased(first=i == 0) for i in range(num))

    def turns(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class Biased(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.mix, self.table = Mixer(), nn.Embedding(3, WIDTH) if first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.table is not None
            bias = self.table(torch.arange(POSITIONS, device=x.device) % 3)
        return x + self.mix(x + bias), bias


STYLES = {cls.__name__: cls for cls in (TwoLists, SharedNorm, Parameters, Numbers, FromFirst)}
LAYOUTS = {"ddp": "dp=2", "fsdp+megatron": "dp=2,tp=2"}


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def compiled(model: nn.Module, plan: str) -> partc.Program:
    return partc.compile(model, LAYOUTS[plan], IDS, loss=loss_of, plan=plan)


def num_lines(program: partc.Program) -> int:
    return len(program.source(0).splitlines())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("style", "plan"),
    [
        ("SharedNorm", "ddp"), ("Parameters", "ddp"), ("FromFirst", "ddp"),
        ("TwoLists", "fsdp+megatron"), ("Numbers", "fsdp+megatron"),
        ("Parameters", "fsdp+megatron"),
    ],
)  # fmt: skip
def test_lines_do_not_grow_with_depth(style: str, plan: str) -> None:
    torch.manual_seed(0)
    model = STYLES[style](3)
    program = compiled(model, plan)
    partc.verify(program, model, IDS, loss=loss_of).check(1e-12)
    deep = compiled(STYLES[style](5), plan)
    assert num_lines(deep) <= num_lines(program) + 1, "a row of numbers may take a line more"
    assert deep.source(0).count("nn.ModuleList(") == 1


def test_blocks_have_members_of_other_lists() -> None:
    text = compiled(TwoLists(3), "ddp").source(0)
    assert '"norms_weight": ("norms.{}.weight", (8,), "float32", ())' in text
    assert '"up_weight": ("blocks.{}.up.weight", (16, 8), "float32", ())' in text


def test_blocks_have_numbers_of_their_own() -> None:
    text = compiled(Numbers(3), "ddp").source(0)
    assert "(0.5, 0.3333333333333333, 0.25)" in text
    assert "self.factor" in text


def test_numbers_stay_in_line_where_they_are_sizes() -> None:
    class Rolled(Net):
        def turns(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = x + block(torch.roll(x, i, 1))
            return x

    model = Rolled(3)
    program = compiled(model, "ddp")
    partc.verify(program, model, IDS, loss=loss_of).check(1e-12)


@pytest.mark.exhaustive
def test_processes() -> None:
    model = FromFirst(3)
    program = compiled(model, "fsdp+megatron")
    report = partc.verify(program, model, IDS, loss=loss_of, processes=True, timeout=patience())
    report.check(1e-12)
