"""How far sums with fewer bytes are from exact ones, and the bounds that their schemes promise."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from partc.api import compile
from partc.cli.main import main
from partc.errors import CheckError, UsageError
from partc.plan.compress import Compress
from partc.plan.wires import BLOCK, RANK, SHARE, WIRES
from partc.program import Program
from partc.verification.defined_sums import Site
from partc.verification.lossy import BOUNDS, SentError, Sum
from partc.verification.verification import verify
from tests.texts import everywhere
from tests.verification.two_blocks import small
from tests.zoo import Case

PLAN = 'preset = "{}"\nallow = ["compress"]\n[compress]\nleast_mb = 0.0001\nwire = "{}"\n'
SIZES = {BLOCK: "block = 64", SHARE: "share = 0.1", RANK: "rank = 1", "": ""}
OWN = {wire: SIZES[each.entry] for wire, each in WIRES.items()}


@cache
def compiled(wire: str, mesh: str = "dp=4", preset: str = "ddp", more: str = "") -> Program:
    case, plan = small(), PLAN.format(preset, wire) + OWN[wire]
    return compile(case.step, mesh, plan=f"{more}{plan}")


def errors(program: Program, **options: Any) -> tuple[SentError, ...]:
    case = small()
    report = verify(program, case.model, case.inputs, loss=case.loss, lossy=True, **options)
    return report.check().sent


def exactly(wire: str, every: torch.Tensor) -> Sum:
    """A sum as the scheme defines it."""
    how = Compress(wire, block=16, share=0.1, rank=1)
    shapes = [torch.Size([20, every.shape[1] // 20 - 1]), torch.Size([20])]
    site = Site(how, shapes, lambda rank: torch.Generator().manual_seed(rank + 5))
    drawn = site.key if WIRES[wire].drawn else None
    return Sum(every, shapes, replace(site, key=drawn).add(every))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_a_scheme_keeps_its_bound(wire: str, scale: float) -> None:
    """On numbers that differ by orders of magnitude, zeros, and a lonely large one."""
    how = Compress(wire, block=16, share=0.1, rank=1)
    for seed in range(20):
        numbers = torch.Generator().manual_seed(seed)
        every = torch.randn(3, 420, generator=numbers, dtype=torch.float64)
        every *= scale * torch.rand(420, generator=numbers, dtype=torch.float64) ** 8
        every[:, 40:72], every[1, 7] = 0, 50 * scale
        found = exactly(wire, every)
        assert 0 < found.error <= found.bound(how)


def test_bounds_are_near() -> None:
    """Of numbers of one size an error is no small part of what is promised."""
    numbers = torch.Generator().manual_seed(0)
    every = torch.randn(4, 4200, generator=numbers, dtype=torch.float64)
    for wire in ("bf16", "fp16", "fp8", "int8", "int8-stochastic", "top-k", "random-k"):
        found = exactly(wire, every)
        assert found.error > 0.1 * found.bound(Compress(wire, block=16, share=0.1)), wire


@pytest.mark.rows(2)
@pytest.mark.parametrize("wire", WIRES)
def test_every_sum_is_told(wire: str) -> None:
    sent = errors(compiled(wire))
    assert sum(each.numbers for each in sent) == sum(p.numel() for p in small().model.parameters())
    assert all(0 < each.error <= each.bound for each in sent)
    assert sent[0].name.endswith("and 1 more")
    assert "weight" in sent[0].name or "bias" in sent[0].name


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "preset", "more"),
    [
        ("dp_replicate=2,dp_shard=2", "hsdp", ""),
        ("dp=2,tp=2", "megatron", ""),
        ("pp=2,dp=2", "ddp", "microbatches = 2\n"),
        ("dp=4", "ddp", "microbatches = 2\n"),
    ],
)
def test_other_layouts(mesh: str, preset: str, more: str) -> None:
    sent = errors(compiled("int8", mesh, preset, more))
    assert sent
    assert all(0 < each.error < 0.02 for each in sent)


@pytest.mark.exhaustive
def test_the_command_tells_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.format("ddp", "int8"))
    named, out = "tests.example_program:cli_target", str(tmp_path / "build")
    assert main(["compile", named, "--mesh", "dp=2", "--plan", str(plan), "--out", out]) == 0
    assert main(["verify", out, "--model", named, "--lossy"]) == 0
    assert "gradients as they are sent" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_processes_tell_the_same() -> None:
    program = compiled("int8")
    assert errors(program, processes=True) == errors(program)


@pytest.mark.exhaustive
def test_a_sum_beyond_its_bound_is_refused() -> None:
    """Where nothing is equal to a definition any more, the bound still tells."""
    case, program = small(), compiled("int8")
    wrong = everywhere(program, "(x + 0.5).floor()", "(x + 3).floor()")
    report = verify(wrong, case.model, case.inputs, loss=case.loss, lossy=True)
    assert not any(each.holds for each in report.sent)
    assert "BEYOND" in str(report)
    with pytest.raises(CheckError, match=r"promises .*% at most"):
        replace(report, rows=tuple(row for row in report.rows if row.error == 0)).check()


def test_what_is_too_large_for_the_wire_is_told() -> None:
    case = Case(small().model, small().inputs, lambda m, x: 1e8 * m(x).square().mean())
    plan = PLAN.format("ddp", "fp16")
    program = compile(case.step, "dp=4", plan=plan)
    report = verify(program, case.model, case.inputs, loss=case.loss, lossy=True)
    assert not report.ok()
    assert any(each["error"] is None for each in report.as_json()["sent"])


def test_a_plan_without_fewer_bytes_is_refused() -> None:
    case = small()
    program = compile(case.step, "dp=2", plan="ddp")
    with pytest.raises(UsageError, match=r"the plan has no \[compress\]"):
        verify(program, case.model, case.inputs, loss=case.loss, lossy=True)


def test_every_scheme_has_a_bound() -> None:
    assert [*BOUNDS] == [*WIRES]
