"""Modules that are called several times: one class, and a loop over the calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from benchmarks.names import numbered_share
from partc.reports.cost import CostReport
from partc.reports.pipeline_cost import PipelineCost

WIDTH, WORDS, STEPS = 8, 12, 6
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("dp=2", {}),
    "fsdp": ("dp=2", {}),
    "megatron": ("tp=2", {}),
    "fsdp+megatron-sp": ("dp=2,tp=2", {}),
    "pp": ("pp=2", {"plan": "ddp", "microbatches": 4}),
}


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


class Cell(nn.Module):
    """A recurrent cell as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        rx, zx, nx = self.x(x).chunk(3, -1)
        rh, zh, nh = self.h(h).chunk(3, -1)
        reset, update = torch.sigmoid(rx + rh), torch.sigmoid(zx + zh)
        return (1 - update) * torch.tanh(nx + reset * nh) + update * h


class Net(nn.Module):
    """Embeds words, goes through ``turns``, and says how likely each word is."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.num = num
        self.emb, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def turns(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.turns(self.emb(ids)))
        return scores


class Shared(Net):
    """One block for all layers, as in ALBERT."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.block = Mixer()

    def turns(self, x: Tensor) -> Tensor:
        for _ in range(self.num):
            x = self.block(x)
        return x


class Universal(Shared):
    """One block, and an embedding of each turn, as in the universal transformer."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.turn = nn.Embedding(num, WIDTH)

    def turns(self, x: Tensor) -> Tensor:
        for i in range(self.num):
            x = self.block(x + self.turn.weight[i])
        return x


class Recurrent(Net):
    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.reader, self.writer = Cell(), Cell()

    def turns(self, x: Tensor) -> Tensor:
        h, found = torch.zeros_like(x[:, 0]), []
        for t in range(self.num):
            h = self.reader(x[:, t], h)
        for t in range(self.num):
            h = self.writer(x[:, t], h)
            found.append(h)
        return torch.stack(found, 1)


class Fed(Net):
    """What the cell gives is scored in each turn, and goes into the next one."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.cell, self.out = Cell(), nn.Linear(WIDTH, WIDTH)

    def turns(self, x: Tensor) -> Tensor:
        y = h = x.mean(1)
        found = []
        for _ in range(self.num):
            h = self.cell(y, h)
            y = self.out(h).softmax(-1)
            found.append(y)
        return torch.stack(found, 1)


class Twins(Net):
    """One encoder for two views of a batch."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.encoder = nn.Sequential(*(layer for _ in range(2) for layer in (Mixer(), nn.ReLU())))
        self.encoder.append(nn.Linear(WIDTH, WIDTH))

    def turns(self, x: Tensor) -> Tensor:
        left: Tensor = self.encoder(x)
        right: Tensor = self.encoder(x.flip(1))
        return left * right


class Counting(Net):
    """A norm with running statistics in the block."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.block, self.norm = Mixer(), nn.BatchNorm1d(num)
        self.both = nn.Sequential(self.block, self.norm)

    def turns(self, x: Tensor) -> Tensor:
        for _ in range(self.num):
            x = self.both(x)
        return x


class Unlike(Shared):
    """The last call gets half of the positions."""

    def turns(self, x: Tensor) -> Tensor:
        x = self.block(self.block(x))
        return torch.cat([self.block(x[:, :2]), x[:, 2:]], 1)


MODELS = {c.__name__: c for c in (Shared, Universal, Recurrent, Fed, Twins, Counting, Unlike)}


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def batch(num: int) -> tuple[Tensor]:
    return (torch.arange(8 * num).reshape(8, num) * 7 % WORDS,)


@cache
def step(name: str, num: int = STEPS, train: bool = True) -> partc.Traced:
    torch.manual_seed(0)
    return partc.Traced(MODELS[name](num).train(train), batch(num), loss_of)


@cache
def compiled(name: str, layout: str, num: int = STEPS) -> tuple[nn.Module, partc.Program]:
    mesh, options = LAYOUTS[layout]
    given: dict[str, Any] = {"plan": layout, **options}
    return step(name, num).model, partc.compile(step(name, num), mesh, **given)


def num_lines(program: partc.Program) -> int:
    return max(len(text.splitlines()) for text in program.sources.values())


# Each loop of calls with data, with tensors and with stages; one of them in every layout.
LOOPS = [
    *(("Shared", layout) for layout in LAYOUTS),
    ("Universal", "fsdp"), ("Universal", "megatron"), ("Universal", "pp"),
    ("Recurrent", "ddp"), ("Recurrent", "fsdp+megatron-sp"), ("Recurrent", "pp"),
    ("Fed", "fsdp"), ("Fed", "megatron"),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "layout"), LOOPS)
def test_parity(name: str, layout: str) -> None:
    model, program = compiled(name, layout)
    partc.verify(program, model, batch(STEPS), loss=loss_of).check(1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["ddp", "megatron"])
@pytest.mark.parametrize("name", ["Twins", "Counting", "Unlike"])
def test_calls_that_make_no_loop(name: str, layout: str) -> None:
    model, program = compiled(name, layout)
    partc.verify(program, model, batch(STEPS), loss=loss_of).check(1e-12)


@pytest.mark.exhaustive
def test_a_loss_that_calls_the_model_twice() -> None:
    def both(model: nn.Module, ids: Tensor) -> Tensor:
        apart: Tensor = model(ids) - model(ids.flip(1)).detach()
        return apart.square().mean() + loss_of(model, ids)

    torch.manual_seed(0)
    model = Shared(2)
    program = partc.compile(model, "dp=2", batch(STEPS), loss=both, plan="ddp")
    partc.verify(program, model, batch(STEPS), loss=both).check(1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Shared", "fsdp"), ("Shared", "megatron"), ("Universal", "megatron"), ("Universal", "pp"),
        ("Recurrent", "ddp"), ("Recurrent", "pp"), ("Fed", "fsdp"), ("Fed", "megatron"),
    ],
)  # fmt: skip
def test_lines_do_not_grow_with_calls(name: str, layout: str) -> None:
    lines = num_lines(compiled(name, layout)[1])
    twice = compiled(name, layout, 2 * STEPS)[1]
    assert num_lines(twice) <= lines + 2, "a longer comment may take a line more"


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("name", "layout"), [("Shared", "ddp"), ("Universal", "megatron"), ("Universal", "pp")]
)
def test_few_names_are_numbered(name: str, layout: str) -> None:
    for text in compiled(name, layout)[1].sources.values():
        assert numbered_share(text) < 0.12


def test_one_class_serves_all_calls() -> None:
    text = compiled("Shared", "ddp")[1].source(0)
    assert text.count("class Mixer(nn.Module):") == 1
    assert '"""block, called 6 times."""' in text
    assert "for _ in range(6):" in text
    assert "sums.add_product(self.up_weight, " in text


@pytest.mark.exhaustive
def test_a_call_takes_its_time_step() -> None:
    text = compiled("Recurrent", "ddp")[1].source(0)
    assert "for index in range(1, 6):" in text, "the first call's state needs no gradient"
    assert "[:, index]" in text


# Each model, with a loop and without one in each kind of layout.
LIMITED = [
    ("Shared", "ddp"), ("Universal", "fsdp+megatron-sp"), ("Recurrent", "fsdp"), ("Fed", "pp"),
    ("Twins", "fsdp+megatron-sp"), ("Counting", "pp"), ("Unlike", "fsdp"), ("Unlike", "megatron"),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "layout"), LIMITED)
def test_a_limit_of_memory_is_judged_before_and_after_printing(name: str, layout: str) -> None:
    mesh, options = LAYOUTS[layout]
    given: dict[str, Any] = {"plan": layout, **options}
    of = step(name, train=(name, layout) != ("Counting", "pp"))  # statistics of microbatches differ
    made = partc.compile(of, mesh, memory_bytes=10**9, **given)
    assert isinstance(made.cost, CostReport | PipelineCost)
    most = max(peak.num_bytes for peak in made.cost.peaks())
    with pytest.raises(partc.PartcError, match=r"memory_bytes=|no cut fits"):
        partc.compile(of, mesh, memory_bytes=most // 2, **given)
