"""Figures with a unit, an exponent or at another place are told how to be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.plan.mesh_file import read_mesh
from partc.program.checkpoints.checkpoint import latest
from partc.verification.verification import verify
from tests.mistakes.things import Net, batch_of, check, compiled, loss_of

ISLANDS = 'preset = "ddp"\nallow = ["local_steps"]\n[local_steps]\nperiod = 4\n'
DEVICE = """name = "mine"
[[devices]]
name = "d"
memory_bytes = {memory}
memory_bytes_per_s = 1e12
flops_per_s = {{ f32 = 1e13 }}
launch_s = 1e-6
{more}
"""


def mesh_of(text: str, folder: Path) -> Any:
    path = folder / "mesh.toml"
    path.write_text(text)
    return read_mesh(path)


def of_device(memory: str, more: str = "") -> Callable[[Path], Any]:
    return lambda folder: mesh_of(DEVICE.format(memory=memory, more=more), folder)


def planned(entry: str, mesh: str = "dp=2") -> Callable[[Path], Any]:
    return lambda folder: compiled(mesh=mesh, plan=entry)


MISTAKES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "an exponent": (planned(f"{ISLANDS}start_step = 1e3", "island=2"), ("start_step = 1000.",)),
    "no parts": (planned('preset = "ddp"\ngrad_parts = { dp = 0 }'), ("grad_parts.dp = 0",)),
    "a seed": (planned('preset = "ddp"\nrandom = 42'), ("stage.seed(42)",)),
    "a float of bytes": (of_device("16e9", "watts = 9"), ("16_000_000_000",)),
    "bytes with a unit": (of_device('"16GB"', "watts = 9"),
        ("without a unit and quotation marks",)),
    "no watts": (of_device("16_000_000_000"), ("watts is missing", "Write a line watts = ...")),
    "axes as a text": (lambda folder: mesh_of('axes = "dp=2"', folder), ("Write a line [axes]",)),
    "a machine among axes": (
        lambda folder: mesh_of('[axes]\ndp = 2\nmachine = "cpu"', folder), ("above the line",)
    ),
    "a folder in the place of a program": (
        lambda folder: partc.with_model(str(folder), Net(), loss_of),  # type: ignore[arg-type]
        ("partc.load(folder)",),
    ),
    "no such checkpoint": (lambda folder: latest(folder / "none"), ("there is no such folder",)),
    "a home": (lambda folder: latest("~/no/such/folder"), ("Python does not",)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake: str, tmp_path: Path) -> None:
    make, words = MISTAKES[mistake]
    check((lambda: make(tmp_path), words))


def test_rounding_in_float32_is_said() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))
    x, y = batch_of()
    program = partc.compile(model, "dp=2", (x.random_(9), y), loss=loss_of, plan="ddp")
    report = verify(program, model, (x, y), loss=loss_of, dtype=None)
    assert not report.ok()
    check((report.check, ("rounding may be all", "check(tolerance=")))
