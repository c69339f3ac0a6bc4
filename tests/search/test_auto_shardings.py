"""``plan="auto"`` searches the shardings over ``tp``: where no preset's words know how to cut a
model they are found, and where words do the plan says how far from the best they are.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.lowering import table
from partc.machines.topology import Topology
from partc.passes.search.plans.choose_plan import choose_plan
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.plan_values import PlannedLayout
from partc.reports.explanation import explain_program
from partc.verification.verification import verify
from tests.llamas import AUTO, llama, traced

WIDTH, LENGTH, BATCH = 64, 48, 8


class Stirred(nn.Module):
    """A norm between two products: a cut by column does not flow from one to the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stir, self.level = nn.Linear(width, 3 * width), nn.LayerNorm(3 * width)
        self.settle = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        settled: Tensor = self.settle(torch.tanh(self.level(self.stir(x))))
        return x + settled


class Soup(nn.Module):
    """Blocks of a kind that presets have no words for."""

    def __init__(self, width: int = WIDTH, depth: int = 4) -> None:
        super().__init__()
        self.pots = nn.ModuleList(Stirred(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for pot in self.pots:
            x = pot(x)
        return x


def error_of(model: nn.Module, x: Tensor) -> Tensor:
    error: Tensor = (model(x) - 1).square().mean()
    return error


def on(axes: str) -> Mesh:
    """So many of a machine's devices that transfers cost what they do on GPUs."""
    mesh = Mesh.of(axes)
    return Mesh(mesh.axes, Topology.load("dgx-h100", mesh.num_ranks))


def batch_of(width: int = WIDTH, length: int = LENGTH, size: int = BATCH, **how: Any) -> Tensor:
    x: Tensor = torch.randn(size, length, width, **how)
    return x


def told(program: partc.Program, word: str) -> list[str]:
    """The notes of a plan that have a word."""
    return [note for note in Plan.parse(program.plan).notes if word in note]


def large_soup(mesh: Mesh, size: int = BATCH, **given: Any) -> partc.Program:
    """Of sizes at which computing takes longer than calls do."""
    with torch.device("meta"):
        model = Soup(2048).bfloat16()
    x = batch_of(2048, 2048, size, device="meta", dtype=torch.bfloat16)
    return partc.compile(model, mesh, (x,), loss=error_of, **given)


@cache
def searched(axes: str, microbatches: int | None = None) -> partc.Program:
    """What a search finds for the large model, made once."""
    return large_soup(on(axes), microbatches=microbatches)


def seconds(program: partc.Program) -> float:
    cost: Any = program.cost
    return float(cost.prediction.seconds)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", ["tp=2", "dp=2,tp=2"])
def test_what_no_preset_knows_is_cut_all_the_same(axes: str) -> None:
    program = searched(axes)
    (line,) = told(program, "shardings over ")
    assert line.startswith("shardings over tp=2: searched, ")
    by_word = large_soup(on(axes), plan="fsdp+megatron" if "dp" in axes else "megatron")
    assert seconds(program) < 0.7 * seconds(by_word)


@pytest.mark.exhaustive
def test_an_open_mesh_gets_tensor_ranks_that_no_preset_has_a_use_for() -> None:
    """There are more devices than samples."""
    program = large_soup(Mesh.load("dgx-h100", 8), size=4)
    assert dict(program.mesh.axes) == {"dp": 4, "tp": 2}
    assert told(program, "shardings over tp=2: searched")


@pytest.mark.exhaustive
def test_the_axes_of_a_plan_are_those_of_an_open_mesh() -> None:
    plan = 'preset = "auto"\n[mesh]\ndp = 2\ntp = 4\n'
    program = large_soup(Mesh.load("dgx-h100", 8), plan=plan)
    assert dict(program.mesh.axes) == {"dp": 2, "tp": 4}


def test_what_was_searched_is_explained_from_the_saved_program(tmp_path: Path) -> None:
    searched("tp=2").save(tmp_path)
    text = str(explain_program(partc.load(tmp_path)))
    (row,) = (line for line in text.splitlines() if line.split()[:2] == ["tensor", "preset"])
    assert row.split()[2:4] == ["searched-2", "megatron-sp"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axes", "microbatches"), [("tp=2", None), ("dp=2,tp=2", 2), ("pp=2,tp=2", 4)]
)
def test_such_plans_compute_what_the_model_does(axes: str, microbatches: int | None) -> None:
    """And replay to the same text without a search."""
    torch.manual_seed(0)
    model, x = Soup(), batch_of()
    found = searched(axes, microbatches)
    entries = Plan.parse(found.plan).changed(notes=(), memory_bytes=0)
    program = partc.compile(model, axes, (x,), loss=error_of, plan=entries)
    verify(program, model, (x,), error_of).check()
    again = partc.compile(model, axes, (x,), loss=error_of, plan=program.plan)
    assert (again.plan, again.sources) == (program.plan, program.sources)


@pytest.mark.exhaustive
def test_words_that_are_near_the_best_stay_and_say_so() -> None:
    mesh, graph = on("dp=2,tp=4"), traced(llama(layers=5), 2)
    choice = choose_plan(graph, mesh, AUTO, table())
    _, plan = choice.ways(graph, mesh, AUTO)[0]
    assert "megatron-sp" in plan.preset
    assert not plan.values
    line = plan.notes[-1]
    assert line.startswith("megatron-sp over tp=4 is within ")
    assert "exact search" in line


@pytest.mark.exhaustive
def test_pins_hold_in_what_is_searched() -> None:
    pinned = Plan(
        preset="auto",
        params={"pots.*.settle.weight": {}},
        values={"pots.*.level:*": {"tp": PlannedLayout()}},
    )
    plan = Plan.parse(large_soup(on("dp=2,tp=2"), plan=pinned).plan)
    assert all("tp" not in plan.stored(f"pots.{i}.settle.weight") for i in range(4))
    assert plan.planned("pots.0.level:native_layer_norm") == {"tp": PlannedLayout()}
