"""Ranges for torch.profiler have the names of the predicted step's boxes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.codegen.safety import check_source
from partc.errors import CheckError, PlanError
from partc.machines.what_if import Change
from partc.program import Program
from partc.reports.simulate_saved import simulate_saved
from partc.verification.threads import ThreadMesh, run_ranks
from tests.texts import roles_of

X = torch.randn(8, 6)


class Layer(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(dim),
            nn.Linear(dim, inner),
            nn.Linear(inner, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Tower(nn.Module):
    def __init__(self, *inner: int) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Layer(8, each) for each in inner)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def compiled(
    mesh: str, preset: str, inner: tuple[int, ...] = (12,) * 4, **fields: object
) -> Program:
    plan = partc.Plan(preset=preset, profiler_ranges=True, **fields)  # type: ignore[arg-type]
    model = Tower(*inner)
    program = partc.compile(model, mesh, (X,), plan=plan)
    partc.verify(program, model, (X,)).check()
    return program


def entered(program: Program) -> list[Counter[str]]:
    """The ranges that each rank enters in a step, by name."""

    def rank(number: int, dist: object) -> Counter[str]:
        role, names = program.role(number), Counter[str]()

        @contextmanager
        def record_function(name: str) -> Iterator[None]:
            names[name] += 1
            yield

        role.module.record_function, role.module.dist = record_function, dist  # type: ignore[attr-defined]
        step = role.build(ThreadMesh(program.mesh, number))
        with torch.no_grad():
            for param in step.parameters():
                param.fill_(0.1)
        role.run(step, role.pieces([X], program.mesh.coords(number)) if program.dealt else [X])
        return names

    return run_ranks(program.mesh.num_ranks, rank)


def predicted(program: Program) -> list[Counter[str]]:
    """The boxes of the predicted step but those of single calls, by process of the trace."""
    saved = replace(program, cost=program.cost)
    events = json.loads(simulate_saved(saved, Change(), "program").file("trace", "program"))
    found: dict[int, Counter[str]] = {}
    for event in events["traceEvents"]:
        if event["ph"] == "X" and "::compute::" not in event["name"]:
            found.setdefault(event["pid"], Counter())[event["name"]] += 1
    return [found[number] for number in sorted(found)]


def without_waits(names: Counter[str]) -> Counter[str]:
    return Counter({n: c for n, c in names.items() if not n.startswith("partc::wait::")})


@pytest.mark.exhaustive
@pytest.mark.parametrize("inner", [(12,) * 4, (12, 16, 20)])
def test_a_step_has_the_names_of_its_prediction(inner: tuple[int, ...]) -> None:
    """Blocks in a loop, and blocks that stand in line as none equals another."""
    program = compiled("dp=2,tp=2", "fsdp+megatron", inner)
    (boxes,) = predicted(program)
    for names in entered(program):
        mine = without_waits(names)
        assert mine.keys() == boxes.keys()
        assert names["partc::wait::all_gather"] > 0
        for name in ("partc::dp::all_gather", "partc::dp::reduce_scatter", "partc::tp::all_reduce"):
            assert mine[name] == boxes[name], name


@pytest.mark.exhaustive
def test_a_pipeline_has_the_names_of_its_actions() -> None:
    """Ranks that share a file have numbers of their own in the names."""
    program = compiled("pp=4", "ddp", (12,) * 8, microbatches=8)
    assert len(roles_of(program)) < 4
    for names, boxes in zip(entered(program), predicted(program), strict=True):
        for kind in ("F", "B", "collective"):
            mine = {n: c for n, c in names.items() if n.startswith(f"partc::{kind}::")}
            known = {n: c for n, c in boxes.items() if n.startswith(f"partc::{kind}::")}
            assert known.items() <= mine.items()
        assert {n for n in boxes if "::send::" in n} <= names.keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-1f1b"])
def test_other_schedules(schedule: str) -> None:
    program = compiled("pp=2", "ddp", (12,) * 8, microbatches=4, schedule=schedule)
    names = sum(entered(program), Counter())
    boxes = sum(predicted(program), Counter())
    assert {n for n in boxes if n[7:9] in ("F:", "B:", "I:", "W:")} <= names.keys()


def test_compiled_functions_stay_whole() -> None:
    """torch.compile gets functions without ranges; the ranges stand around their calls."""
    plan = partc.Plan(preset="ddp", profiler_ranges=True, compile="inductor")
    text = partc.compile(Tower(12, 12), "dp=2", (X,), plan=plan).source()
    assert 'record_function(f"partc::forward::{layer.name}")' in text
    functions = text.split("@torch.compile\n")[1:]
    assert functions
    assert all("record_function" not in each.partition("\n\n\n")[0] for each in functions)


def test_no_other_with_belongs_in_a_program() -> None:
    check_source("def f() -> None:\n    with record_function('x'):\n        pass\n"
                 "from torch.profiler import record_function")  # fmt: skip
    for opened in ("torch.no_grad()", "record_function('x') as y"):
        with pytest.raises(CheckError, match="no record_function"):
            check_source(f"import torch\ndef f() -> None:\n    with {opened}:\n        pass\n")


def test_refused_by_name() -> None:
    with pytest.raises(PlanError, match="profiler_ranges = 1 means nothing"):
        partc.Plan.parse("profiler_ranges = 1")
    plan = partc.Plan(preset="ddp", profiler_ranges=True)
    loss = lambda m, x: m(x).mean()  # noqa: E731
    with pytest.raises(PlanError, match="nothing to put into a range"):
        partc.compile(nn.Linear(6, 4), "dp=1", (X,), loss=loss, plan=plan)
    text = str(replace(plan, profiler_ranges=True))
    assert partc.Plan.parse(text).profiler_ranges
