"""Gradients summed over two axes: in levels where that is faster, half over the slow one."""

from __future__ import annotations

from functools import cache

import pytest

from partc.api import compile
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.verification.verification import verify
from tests.pairs import FAST, SLOW, in_pairs
from tests.texts import roles_of
from tests.zoo import FAMILIES, MODELS, Case


@cache
def llama() -> Case:
    return MODELS["llama"]()


def compiled(case: Case, mesh: Mesh, plan: str = "ddp") -> Program:
    return compile(case.step, mesh, plan=plan)


def sent_bytes(program: Program, axis: str) -> int:
    traffic = program.cost.as_json()["traffic"]
    return sum(each["sent_bytes"] for each in traffic if each["axis"] == axis)


def in_levels(program: Program) -> bool:
    return any(each["kind"] == "all_gather" for each in program.cost.as_json()["traffic"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("inside", "across", "inner", "outer"),
    [(FAST, SLOW, "dp_shard", "dp_replicate"), (SLOW, FAST, "dp_replicate", "dp_shard")],
)
def test_the_slow_axis_carries_half(inside: float, across: float, inner: str, outer: str) -> None:
    case = llama()
    program = compiled(case, in_pairs("dp_replicate=2,dp_shard=2", inside, across))
    grads = sum(p.nbytes for p in case.model.parameters())
    assert sent_bytes(program, outer) == pytest.approx(grads / 2, rel=0.01)
    assert sent_bytes(program, inner) == pytest.approx(grads, rel=0.01)
    source = program.source()
    for call in (
        f"scatter_grads(grads, 2, self.{inner})",
        f"sum_grads(grads, self.{outer})",
        f"gather_grads(grads, 2, self.{inner})",
    ):
        assert call in source
    verify(program, case.model, case.inputs, loss=case.loss).check()


@pytest.mark.exhaustive
def test_beside_tensor_parallelism() -> None:
    """A gradient that tp cuts by rows is cut further."""
    case = llama()
    mesh = in_pairs("dp_replicate=2,dp_shard=2,tp=2", FAST, SLOW)
    program = compiled(case, mesh, "ddp+megatron")
    assert in_levels(program)
    verify(program, case.model, case.inputs, loss=case.loss).check()


def test_small_sums_stay_as_they_are() -> None:
    """Three transfers start later than two."""
    case = llama()
    program = compiled(case, in_pairs("dp_replicate=2,dp_shard=2", FAST, FAST, 1e-3))
    assert not in_levels(program)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", ["dp_replicate=2,dp_shard=2", "pp=2,dp_replicate=2,dp_shard=2"])
def test_what_microbatches_add_up(axes: str) -> None:
    """Once per step, in stages and without; the tied embedding is one of two of them."""
    case = FAMILIES["gpt2"].case("gpt2", batch=8)
    mesh = in_pairs(axes, FAST, SLOW)
    program = compile(case.step, mesh, plan="ddp", microbatches=2)
    assert all("gather_grads(grads, 2, self.dp_shard)" in s for s in roles_of(program).values())
    verify(program, case.model, case.inputs, loss=case.loss).check()
