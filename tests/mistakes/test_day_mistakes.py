"""Mistakes of a day's work with plans, machine files, scripts: each answer is true and enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.plan.mesh import Mesh
from partc.program.checkpoints.checkpoint import latest
from partc.program.not_a_stage import NoStageError
from tests.mistakes.things import Mistake, Net, batch_of, check, compiled, loss_of, one_rank

MACHINE = """name = "own"
[[devices]]
name = "a"
count = 2
memory_bytes = 10_000_000_000
memory_bytes_per_s = 1e10
watts = 100
{device}
launch_s = 1e-6
[[levels]]
name = "net"
size = 2
bytes_per_s = 1e9
latency_s = 1e-5
{level}
[axes]
dp = 2
"""


def machine(path: Path, device: str = "flops_per_s = { f32 = 1e12 }", level: str = "") -> Any:
    file = path / "mesh.toml"
    file.write_text(MACHINE.format(device=device, level=level))
    return compiled(mesh=file)


def swapped() -> None:
    """The two inputs of a step in each other's place, of two shapes."""
    x, target = torch.ones(8, 4), torch.ones(8, 3)
    with one_rank():
        stage = compiled(model=nn.Linear(4, 3), mesh="dp=1", inputs=(x, target)).module()
        stage.step(target, x)


MISTAKES: dict[str, Mistake] = {
    "a key behind a table of words": (
        lambda: compiled(plan='preset = "fsdp"\n[gather]\ndp = "use"\nmicrobatches = 2'),
        ("'microbatches' stands in the table [gather]", "above the first line in brackets"),
    ),
    "a table that is a text": (
        lambda: compiled(plan='preset = "fsdp"\ngather = "use"'), ("gather", "Write"),
    ),
    "inputs that are exchanged": (
        swapped, ("It was compiled for x float32[8, 4], target float32[8, 3]", "in the place of"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_refused_in_words(case: str) -> None:
    check(MISTAKES[case])


def test_figures_by_kind_are_tables(tmp_path: Path) -> None:
    assert machine(tmp_path).mesh == Mesh.of("dp=2")
    number = "flops_per_s = 1e12"
    words = ("device a", "is no table", "Write flops_per_s = { bf16 = 400e12, f32 = 60e12 }")
    check((lambda: machine(tmp_path, number), words))
    level = "factors = 1.2"
    words = ("level net", "factors = 1.2", "Write factors = { all_reduce = [1.2, 1.1] }")
    check((lambda: machine(tmp_path, level=level), words))


def test_a_program_before_the_first_step() -> None:
    with one_rank():
        model = partc.parallelize(Net(), "dp=1", loss=loss_of, plan="ddp")
        with pytest.raises(NoStageError, match=r"program: .* no step yet .* model\.compile_for"):
            print(model.program.plan)
        assert not hasattr(model, "program")
        model.compile_for(*batch_of())
        assert "ddp" in model.program.plan


def test_a_checkpoint_of_torch(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / ".metadata").touch()
    words = ("step_1 is of torch.distributed.checkpoint", "dcp.load", "stage.load_state_dict")
    check((lambda: latest(tmp_path), words))
    check((lambda: latest(tmp_path / "step_1"), words))


def test_an_axis_that_cuts_nothing_says_which_size_would() -> None:
    with pytest.warns(UserWarning, match="tp=3 cuts no weight.* take a size that divides heads"):
        compiled(mesh="tp=3", plan="megatron")


def test_processes_of_a_lightning_trainer() -> None:
    pytest.importorskip("lightning")
    from partc.wrappers.lightning_errors import check_devices

    check_devices(Mesh.of("dp=2,tp=2"), 4)
    words = ("Strategy, mesh dp=2", "1 processes", "Trainer(devices=2)")
    check((lambda: check_devices(Mesh.of("dp=2"), 1), words))
