"""A folded compile is the compile of all blocks: the same plan, text and costs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.checks.local_graph import check
from partc.codegen.files.emit import emit
from partc.codegen.files.header import header
from partc.errors import CheckError
from partc.given_plan import read_plan
from partc.graph import Graph
from partc.graph.folds import RepeatedBlocks
from partc.lowering import partition, trace
from partc.passes.runner import State, Table
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program.stage.check_complete import check_complete, trained
from partc.reports.cost import cost_report
from tests.deep import deep
from tests.pipelines import toy

LEFT_OUT = {
    "gpt2": [RepeatedBlocks("transformer.h", 2, 3)],
    "llama": [RepeatedBlocks("model.layers", 2, 3)],
    "t5": [RepeatedBlocks("encoder.block", 2, 4)],
}


def compiled(name: str, mesh: str, plan: str, fold: bool) -> tuple[Any, Graph]:
    """Plan and text of a program, what it costs, and the graph that it was printed from."""
    graph = deep(name).step.graph(fold=fold)
    graph.mesh = Mesh.of(mesh)
    full, local = partition(graph, read_plan(plan))
    check(local)
    cost = cost_report(local)
    counted = cost.state, cost.saved_bytes, cost.flops, cost.moved_bytes, cost.traffic
    return (str(full), emit(local, header=header(local, full)).text, counted), local


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("name", "mesh", "plan"),
    [
        ("gpt2", "dp=2", "fsdp"),
        ("t5", "dp=2", "zero1"),
        ("llama", "dp=2,tp=2", 'preset = "fsdp+megatron"\noverlap_pieces = 2'),
        ("gpt2", "tp=2", "megatron-sp"),
    ],
)
def test_folded_program_is_the_program(name: str, mesh: str, plan: str) -> None:
    whole, _ = compiled(name, mesh, plan, fold=False)
    folded, graph = compiled(name, mesh, plan, fold=True)
    assert list(graph.folds) == LEFT_OUT[name]
    assert folded == whole


class Tower(nn.Module):
    """Blocks that are equal but for what a test changes in one of them."""

    def __init__(self, depth: int = 9) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth))
        self.listens = -1

    def forward(self, x: Tensor) -> Tensor:
        heard = x
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == self.listens:
                heard = x
        return x + heard


class Turned(nn.Module):
    """A block that makes a tensor of places at every call."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(8, 8), first

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)[:, [self.first, 0, 1, 2, 3, 4, 5, 6]].tanh()
        return y


def total(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    return loss


def folds(model: nn.Module) -> tuple[RepeatedBlocks, ...]:
    return trace(model, (torch.randn(4, 8),), total, fold=True).folds


def test_equal_blocks_are_left_out() -> None:
    (fold,) = folds(Tower())
    assert (fold.path, fold.first, fold.last, fold.like) == ("blocks", 2, 6, "blocks.1")


def test_a_block_that_something_else_reads_stays() -> None:
    model = Tower()
    model.listens = 4  # its gradient arrives from behind the blocks too
    assert all(not fold.first <= 4 <= fold.last for fold in folds(model))


def test_a_block_of_other_shape_or_state_stays() -> None:
    model = Tower()
    model.blocks[4].requires_grad_(False)
    assert all(not fold.first <= 4 <= fold.last for fold in folds(model))


def test_a_shared_block_stays() -> None:
    model = Tower()
    model.blocks[4] = model.blocks[3]
    assert all(not fold.first <= i <= fold.last for fold in folds(model) for i in (3, 4))


class Bare(nn.Module):
    """A block that computes without modules of its own; its weight goes through ``made``."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.made = nn.Parameter(torch.randn(8, 8) / 3), made

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(x @ self.made(self.weight))
        return y


class Bares(nn.Module):
    """Blocks and nothing before them but numbers made from nothing, as many as samples."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Bare(made) for _ in range(8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.ones(x.shape, dtype=x.dtype).cumsum(1)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda w: w,
    "of lower precision": lambda w: w.to(torch.bfloat16).to(w.dtype),
    "normalised": lambda w: F.normalize(w, dim=1),
}


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("made", "mesh"),
    [
        ("itself", "dp=2"), ("of lower precision", "pp=2"), ("normalised", "dp=2"),
        ("normalised", "pp=2"),
    ],
)  # fmt: skip
def test_blocks_make_what_microbatches_share_of_their_weights(mesh: str, made: str) -> None:
    model, x = Bares(MADE[made]), torch.randn(8, 8)
    program = partc.compile(model, mesh, (x,), loss=total, plan="ddp", microbatches=2)
    assert not any("_here" in source for source in program.sources.values())
    partc.verify(program, model, (x,), loss=total).check()


@pytest.mark.exhaustive
def test_what_each_block_is_given_is_given_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partc.passes.stages.split_stages._of_a_block", lambda node: False)
    model, x = Bares(MADE["normalised"]), torch.randn(8, 8)
    program = partc.compile(model, "dp=2", (x,), loss=total, plan="ddp", microbatches=2)
    assert any("_here" in source for source in program.sources.values())
    partc.verify(program, model, (x,), loss=total).check()


@pytest.mark.rows(1)
@pytest.mark.parametrize("differ", [False, True])
def test_blocks_make_constants_of_their_own(differ: bool) -> None:
    model, x = nn.Sequential(*(Turned(i if differ else 7) for i in range(8))), torch.randn(4, 8)
    program = partc.compile(model, "dp=2", (x,), loss=total, plan="fsdp")
    assert len(program.constants) == (8 if differ else 1)
    partc.verify(program, model, (x,), loss=total).check()


def test_short_stacks_stay_whole() -> None:
    assert folds(Tower(depth=4)) == ()


@pytest.mark.exhaustive
def test_pins_tell_blocks_apart() -> None:
    model, x = Tower(), torch.randn(4, 8)
    plan = 'preset = "ddp"\n[params]\n"blocks.4.0.weight" = { dp = 0 }\n[gather]\ndp = "use"\n'
    program = partc.compile(model, "dp=2", (x,), loss=total, plan=plan)
    assert '"blocks.4.0.weight" = { dp = 0 }' in program.plan
    again = partc.compile(model, "dp=2", (x,), loss=total, plan=program.plan)
    assert again.sources == program.sources


@pytest.mark.exhaustive
def test_a_folded_plan_replays() -> None:
    case = deep("toy")
    first = partc.compile(case.step, "dp=2", plan="fsdp")
    again = partc.compile(case.step, "dp=2", plan=first.plan)
    assert (again.plan, again.sources) == (first.plan, first.sources)
    assert str(again.cost) == str(first.cost)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "plan", "schedule"),
    [
        ("pp=4,dp=2", Plan(preset="zero1"), "1f1b"),
        ("pp=2,tp=2", Plan(preset="megatron-sp", virtual_stages=3), "interleaved-1f1b"),
        ("pp=2", Plan(preset="ddp"), "zb-v"),
    ],
)
def test_stages_of_equal_blocks_are_compiled_once(
    mesh: str, plan: Plan, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The middle stages, and the middle of each stage, are copies: the program is the same."""
    step, state_of = toy(30).step, partc.Traced.state
    traced: list[State] = []

    def made(fold: bool) -> partc.Program:
        def traces(step: partc.Traced, rows: Table, **options: Any) -> State:
            traced.append(state_of(step, rows, **options) if fold else state_of(step, rows))
            return traced[-1]

        monkeypatch.setattr(partc.Traced, "state", traces)
        return partc.compile(step, mesh, plan=plan, schedule=schedule, microbatches=4)

    once = made(fold=True)
    kept = traced[-1].graph.kept
    assert kept is not None
    assert (
        kept.gaps or schedule == "zb-v"
    )  # its stages are four, of which the first and last differ
    assert kept.folds
    every = made(fold=False)
    assert (once.plan, once.sources, once.roles) == (every.plan, every.sources, every.roles)
    assert str(once.cost) == str(every.cost)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), [("pp=2", "ddp"), ("dp=2", "ddp")])
def test_a_block_that_no_rank_trains_is_found(mesh: str, plan: str) -> None:
    """The tables of a program of folded blocks, without the last block of each list."""
    step = deep("llama").step
    program = partc.compile(step, mesh, plan=plan)
    names = trained(step.graph())
    check_complete(names, program)
    fewer = {
        file: re.sub(r"range\((\d+)\) for attribute", r"range(\1 - 1) for attribute", text)
        for file, text in program.sources.items()
    }
    with pytest.raises(CheckError, match=r"trained parameters(.|\n)*layers\.5\.mlp\.up_proj"):
        check_complete(names, replace(program, sources=fewer))


@pytest.mark.exhaustive
def test_microbatches_fold_too(monkeypatch: pytest.MonkeyPatch) -> None:
    step, state_of = deep("llama").step, partc.Traced.state

    def made() -> partc.Program:
        return partc.compile(step, "dp=2", plan="fsdp", microbatches=2)

    folded = made()
    traced: list[tuple[RepeatedBlocks, ...]] = []

    def whole(step: partc.Traced, rows: Table, *, fold: bool, hooks: Any = ()) -> State:
        state = state_of(step, rows)
        traced.append(state.graph.folds)
        return state

    monkeypatch.setattr(partc.Traced, "state", whole)
    unfolded = made()
    assert traced == [()]
    assert (folded.plan, folded.sources) == (unfolded.plan, unfolded.sources)
    assert str(folded.cost) == str(unfolded.cost)
