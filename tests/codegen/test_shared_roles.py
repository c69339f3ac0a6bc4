"""Pipeline ranks that differ in numbers alone run one file, others do not, and each has its own
layers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from partc.audit.edits import accept_edits
from partc.codegen.files.by_rank import RANK, merged
from partc.codegen.files.roll_schedule import turn_lines
from partc.codegen.text import Line
from partc.plan import Plan
from partc.program import Program, load
from partc.program.tensorfile import write_tensors
from partc.schedules import NAMES, make
from partc.verification.verification import verify
from tests.patience import patience
from tests.pipelines import TOLERANCE, Block, Toy, compiled, new_toy, stages_of_toy, toy
from tests.printed_turns import done_by
from tests.texts import roles_of
from tests.zoo import Case

Change = Callable[[Toy], None]


@cache
def program(schedule: str = "1f1b", mesh: str = "pp=4", preset: str = "ddp") -> Program:
    """A toy of two blocks on each stage of four ranks."""
    return of_case(toy(layers_of(schedule)), schedule, mesh, preset)


def layers_of(schedule: str) -> int:
    return 8 * NAMES[schedule].usual_chunks


def of_case(case: Case, schedule: str, mesh: str = "pp=4", preset: str = "ddp") -> Program:
    layers = layers_of(schedule)
    plan = Plan(preset=preset, stages=stages_of_toy(layers // 2, layers))
    return compiled(case, mesh, plan, schedule, 6 if "dp" in mesh else 8)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("schedule", "mesh", "preset"),
    [
        ("1f1b", "pp=4", "ddp"),
        ("gpipe", "pp=4,dp=2", "fsdp"),
        ("1f1b", "dp=2,pp=4", "zero1"),
    ],
)
def test_middle_ranks_share_a_file_and_compute_the_model(
    schedule: str, mesh: str, preset: str
) -> None:
    made = program(schedule, mesh, preset)
    assert sorted(roles_of(made)) == ["pipeline0.py", "pipeline1_to_2.py", "pipeline3.py"]
    case = toy(layers_of(schedule))
    verify(made, case.model, case.inputs, case.loss).check(TOLERANCE)


@pytest.mark.exhaustive
def test_each_rank_has_its_own_layers_from_a_folder_too(tmp_path: Path) -> None:
    program().save(tmp_path)
    for made in (program(), load(tmp_path), accept_edits(tmp_path)):
        blocks = [{shard.name[:8] for shard in made.role(rank).params} for rank in (1, 2)]
        assert blocks == [{"blocks.2", "blocks.3"}, {"blocks.4", "blocks.5"}]


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_a_saved_program_runs_by_itself(tmp_path: Path) -> None:
    """Four processes give the eager loss of the batch that run.py makes."""
    case = toy(layers_of("1f1b"))
    program().save(tmp_path / "build")
    write_tensors(tmp_path / "w.safetensors", case.model.state_dict())
    run = [str(tmp_path / "build" / "run.py"), "--device", "cpu", "--steps", "1", "--high", "13"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*torchrun, "--standalone", *run, "--weights", str(tmp_path / "w.safetensors")],
        capture_output=True, text=True, timeout=patience(), cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randint(14, x.shape, generator=generator) for x in case.inputs]
    expected = case.loss(case.model, *batch).item()
    assert float(done.stdout.split()[3]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.exhaustive
def test_a_stage_of_one_layer_names_it_by_rank() -> None:
    """Its layer is no element of a list in the program, so its parameters' names say which."""
    case = toy(4)
    made = compiled(case, "pp=4", Plan(preset="ddp", stages=stages_of_toy(4, 4)), "1f1b", 8)
    assert len(roles_of(made)) == 3
    assert 'f"blocks.{n}.w1.weight"' in made.source(1)
    assert "# blocks.n\n" in made.source(2)
    verify(made, case.model, case.inputs, case.loss).check(TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs"])
def test_stages_of_a_rank_that_are_alike_are_instances_of_one_class(schedule: str) -> None:
    """Of one layer each, so that its number stands in the names of its parameters."""
    case = toy(8)
    plan = Plan(preset="ddp", stages=stages_of_toy(8, 8), virtual_stages=2)
    made = compiled(case, "pp=4", plan, schedule, 8)
    middle = made.source(1)
    assert len(re.findall(r"^class Stage", middle, re.MULTILINE)) == 1
    assert middle.count(" = Stage") == 2
    verify(made, case.model, case.inputs, case.loss).check(TOLERANCE)


def wider(model: Toy) -> None:
    block(model, 4).w1, block(model, 4).w2 = nn.Linear(12, 22), nn.Linear(22, 12)


def another_epsilon(model: Toy) -> None:
    block(model, 5).norm.eps = 1e-3


def frozen(model: Toy) -> None:
    block(model, 4).w1.weight.requires_grad_(False)


def tied(model: Toy) -> None:
    block(model, 5).w1.weight = block(model, 0).w1.weight


def block(model: Toy, number: int) -> Block:
    found = model.blocks[number]
    assert isinstance(found, Block)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", [wider, another_epsilon, frozen, tied])
def test_ranks_that_differ_in_more_than_numbers_have_files_of_their_own(change: Change) -> None:
    case = new_toy(8)
    assert isinstance(case.model, Toy)
    change(case.model)
    made = of_case(replace(case, model=case.model.double()), "1f1b")
    assert sorted(roles_of(made)) == [f"pipeline{rank}.py" for rank in range(4)]
    verify(made, case.model, case.inputs, case.loss).check(TOLERANCE)


@pytest.mark.parametrize("schedule", NAMES)
def test_merged_orders_are_each_ranks_own(schedule: str) -> None:
    """What all ranks share, run with one of them, does what this rank's own lines do."""
    orders = make(schedule, ranks=6, microbatches=18).orders
    lines = {rank: list(turn_lines(order)) for rank, order in enumerate(orders)}
    groups = [group for first in range(6) for group in together(lines, first)]
    for group in groups:
        text = merged({rank: lines[rank] for rank in group})
        for rank in group:
            here = [replace(line, code=at_rank(line.code, rank)) for line in text or []]
            assert done_by(here) == list(orders[rank])
    if schedule in ("gpipe", "1f1b", "looped-bfs", "forward-only"):
        assert [0, 1, 2, 3, 4, 5] in groups or [0, 1, 2, 3, 4] in groups


def together(lines: dict[int, list[Line]], first: int) -> list[list[int]]:
    """Every run of ranks from the first on that has a text."""
    runs = [list(range(first, end)) for end in range(first + 2, 7)]
    return [run for run in runs if merged({rank: lines[rank] for rank in run}) is not None]


def at_rank(code: str, rank: int) -> str:
    return re.sub(rf"\b{RANK}\b", str(rank), code)


def test_only_what_is_linear_in_the_rank_is_merged() -> None:
    def text(*codes: str) -> str | None:
        lines = merged({rank: [Line(code)] for rank, code in enumerate(codes, 1)})
        return lines[0].code if lines else None

    assert text("f(3, 7)", "f(2, 7)") == "f(4 - pp_rank, 7)"
    assert text("f(i - 3)", "f(i - 5)") == "f(i - (2 * pp_rank + 1))"
    assert text("f(a1)", "f(a2)") is None
    assert text("f(1)", "f(2)", "f(4)") is None
    assert text("f(1)", "g(1)") is None


def test_golden(golden: Callable[..., None]) -> None:
    golden(program().source(1), ".py")
