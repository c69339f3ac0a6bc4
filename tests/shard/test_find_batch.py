"""Which dim of each input is the batch: found, pinned, replayed, and refused where unclear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PlanError, ShardingError
from partc.passes.shard.find_batch import Found, batch_of
from partc.plan import Plan
from partc.plan.batch import BY_PLACE
from partc.plan.sharding import Layout, R, cut
from tests.batches import Case, bag, nodes, tokens, views, words


def found(case: Case) -> dict[str, Layout] | None:
    known = batch_of(partc.Traced(*case).graph())
    return None if known is None else known.batch


def test_dim_0_wins() -> None:
    assert found(tokens()) is None
    assert found(views()) is None  # batch norm and a loss over pairs move something


@pytest.mark.exhaustive
@pytest.mark.parametrize("mixed", ["flip", "roll", "permutation", "in a given order"])
def test_samples_that_are_mixed_before_the_model(mixed: str) -> None:
    order = torch.tensor([3, 1, 4, 0, 5, 7, 2, 6])

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        others = {
            "flip": lambda: x.flip(0),
            "roll": lambda: x.roll(1, 0),
            "permutation": lambda: x[torch.randperm(len(x))],
            "in a given order": lambda: x[order],
        }[mixed]()
        return F.cross_entropy(model(x + others), y)

    layers = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8)
    batch = torch.randn(8, 3, 8, 8), torch.randint(8, (8,))
    assert found((nn.Sequential(*layers), batch, loss)) is None
    program = partc.compile(nn.Sequential(*layers), "dp=2", batch, loss=loss, plan="ddp")
    assert "x dim 0 over dp" in program.source(rank=0)


@pytest.mark.exhaustive
def test_sequence_first() -> None:
    assert found(words()) == {"data": cut(1), "target": cut(0, 7)}
    assert found(words(state=True)) == {
        "data": cut(1), "target": cut(0, 7), "input_2": cut(1), "input_3": cut(1)
    }  # fmt: skip
    assert found(bag()) == {"data": cut(1), "target": cut(0), "weight": R}


class Translator(nn.Module):
    """A decoder over what was read, as torch has it: the sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(20, 16), nn.Embedding(20, 16)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0)
        self.head = nn.Linear(16, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(target))
        told = self.decoder(self.target(target), self.source(source), tgt_mask=mask)
        result: Tensor = self.head(told)
        return result


def translated(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    scores = model(source, target[:-1])
    return F.cross_entropy(scores.flatten(0, 1), target[1:].flatten())


@pytest.mark.exhaustive
@pytest.mark.parametrize("length", [6, 8])
def test_inputs_that_read_each_other_are_cut_together(length: int) -> None:
    batch = torch.randint(20, (length, 8)), torch.randint(20, (7, 8))
    assert found((Translator(), batch, translated)) == {"source": cut(1), "target": cut(1)}


def test_edges_are_no_batch() -> None:
    assert found(nodes()) == {"x": cut(0), "edges": R, "target": cut(0)}


def test_small_batches_of_wide_samples() -> None:
    model = nn.Sequential(nn.Linear(512, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    batch = torch.randn(4, 512), torch.randint(5, (4,))
    assert found((model, batch, lambda m, x, t: F.cross_entropy(m(x), t))) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", ["ddp", "auto"])
def test_sequence_first_programs(plan: str) -> None:
    model, batch, loss = words()
    program = partc.compile(model, "dp=2", batch, loss=loss, plan=plan)
    partc.verify(program, model, batch, loss=loss).check()
    full = Plan.parse(program.plan)
    assert full.inputs == {"data": {"dp": cut(1)}, "target": {"dp": cut(0, 7)}}
    assert any("the batch is { batch = 1 }" in note for note in full.notes)
    again = partc.compile(model, "dp=2", batch, loss=loss, plan=program.plan)
    assert again.sources == program.sources


@pytest.mark.exhaustive
def test_microbatches_are_cut_along_the_batch() -> None:
    model, batch, loss = words()
    program = partc.compile(model, "dp=2", batch, loss=loss, plan="ddp", microbatches=5)
    partc.verify(program, model, batch, loss=loss).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("plan", "pin"), [("ddp", "dp"), ("auto", "batch")])
def test_pins_stay(plan: str, pin: str) -> None:
    model, batch, loss = words(steps=8)  # so that time could be cut too
    own = Plan.parse(f'preset = "{plan}"\n[inputs]\n"data" = {{ {pin} = 0 }}\n"target" = {{}}\n')
    program = partc.compile(model, "dp=2", batch, loss=loss, plan=own)
    partc.verify(program, model, batch, loss=loss).check()
    assert Plan.parse(program.plan).inputs == {"data": {"dp": cut(0)}, "target": {}}


@pytest.mark.exhaustive
def test_a_pin_is_of_microbatches_too() -> None:
    model, batch, loss = words()
    own = Plan.parse('preset = "ddp"\n[inputs]\n"data" = { dp = 1 }\n')
    program = partc.compile(model, "dp=2", batch, loss=loss, plan=own, microbatches=5)
    assert Plan.parse(program.plan).inputs["data"] == {"dp": cut(1), "mb": cut(1)}
    assert Plan.parse(program.plan).inputs["target"] == {"dp": cut(0, 7), "mb": cut(0, 7)}
    partc.verify(program, model, batch, loss=loss).check()


@pytest.mark.exhaustive
def test_pins_of_an_open_mesh() -> None:
    model, batch, loss = words(16)
    own = Plan.parse('preset = "auto"\n[inputs]\n"data" = { dp = 1 }\n')
    mesh = partc.Mesh.load("dgx-h100", devices=2)
    program = partc.compile(model, mesh, batch, loss=loss, plan=own)
    cuts = Plan.parse(program.plan).inputs["data"]
    assert all(layout == cut(1) for layout in cuts.values())


@pytest.mark.exhaustive
def test_a_search_over_machines_finds_the_batch() -> None:
    model, batch, loss = words(8)
    mesh = partc.Mesh.load("dgx-h100", devices=4)
    program = partc.compile(model, mesh, batch, loss=loss, plan="auto")
    partc.verify(program, model, batch, loss=loss).check()
    notes = Plan.parse(program.plan).notes
    assert any("data: the batch is { batch = 1 }" in note for note in notes)


def test_an_odd_batch_says_what_helps() -> None:
    model, batch, loss = tokens(7)
    with pytest.raises(ShardingError, match=r"batch of 7 cannot be cut by dp=2(.|\n)*drop_last"):
        partc.compile(model, "dp=2", batch, loss=loss, plan="ddp")


def test_two_dims_that_are_as_good_are_refused() -> None:
    unclear = Found({"x": cut(1)}, (("x", 1, 2),))
    unclear.check(Plan())
    with pytest.raises(PlanError, match="dim 1 and dim 2 may both be the batch"):
        unclear.check(Plan(batch="local"))


class Table(nn.Module):
    """Dim 0 is summed away; the two others never mix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(torch.tanh(x.sum(0) * self.scale) * self.scale)
        return y.square().mean()


def test_a_model_with_two_such_dims() -> None:
    batch = (torch.randn(4, 6, 6),)
    program = partc.compile(Table(), "dp=2", batch, plan="ddp")
    assert Plan.parse(program.plan).inputs == {"x": {"dp": cut(1)}}
    with pytest.raises(PlanError, match="may both be the batch"):
        partc.compile(Table(), "dp=2", batch, plan="ddp", batch="local")


def halves(model: nn.Module, x: Tensor) -> Tensor:
    """As of two views of each sample, one batch of views behind the other."""
    first, second = model(x).chunk(2)
    loss: Tensor = (first - second).square().mean()
    return loss


def some_rows(model: nn.Module, x: Tensor) -> Tensor:
    """As of labelled samples before others."""
    y = model(x)
    loss: Tensor = y[:1].square().mean() + y[1:].abs().mean()
    return loss


def all_pairs(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)[:, :2]
    loss: Tensor = (y @ y.T).square().mean()
    return loss


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", [halves, some_rows, all_pairs])
def test_rows_that_ranks_have_and_the_step_takes_by_their_place_are_noted(loss: Any) -> None:
    batch = (torch.randn(4, 4),)
    for given in ("local", "global"):
        program = partc.compile(nn.Linear(4, 4), "dp=2", batch, loss=loss, plan="ddp", batch=given)
        notes = [note for note in Plan.parse(program.plan).notes if note.startswith(BY_PLACE)]
        assert len(notes) == (given == "local" and loss is not all_pairs)
        assert all("test_find_batch.py:" in note for note in notes)
