"""The mesh for another number of ranks: data axes change first, the batch stays whole."""

from __future__ import annotations

import pytest

from partc.errors import UsageError
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.other_world import World


def world(mesh: str, rows: int = 12, microbatches: int = 1, **cuts: int) -> World:
    given = cuts or {name: 0 for name in Mesh.parse(mesh).names if name.startswith("dp")}
    cut = ", ".join(f"{axis} = {dim}" for axis, dim in given.items())
    turns = ", mb = 0" if microbatches > 1 else ""
    plan = Plan.parse(f"microbatches = {microbatches}\n[inputs]\nx = {{ {cut}{turns} }}")
    return World(Mesh.parse(mesh), plan, {"x": (rows, 5)})


@pytest.mark.parametrize(
    ("mesh", "num", "found"),
    [
        ("dp=4", 3, "dp=3"),
        ("dp=4", 12, "dp=12"),
        ("dp=4", 1, "dp=1"),
        ("dp=2,tp=2", 2, "dp=1 tp=2"),
        ("dp=2,tp=2", 3, "dp=3 tp=1"),
        ("dp=2,tp=2", 8, "dp=4 tp=2"),
        ("pp=2,dp=2,tp=2", 4, "pp=2 dp=1 tp=2"),
        ("pp=2,dp=2,tp=2", 6, "pp=2 dp=3 tp=1"),
        ("pp=4,dp=2", 4, "pp=4 dp=1"),
        ("pp=4,dp=2", 6, "pp=2 dp=3"),
        ("island=2,dp=2", 2, "island=2 dp=1"),
        ("dp_replicate=2,dp_shard=2", 2, "dp_replicate=1 dp_shard=2"),
        ("dp_replicate=2,dp_shard=2", 3, "dp_replicate=1 dp_shard=3"),
        ("dp_replicate=2,dp_shard=2", 12, "dp_replicate=6 dp_shard=2"),
        ("tp=4", 2, "tp=2"),
    ],
)
def test_of_ranks(mesh: str, num: int, found: str) -> None:
    assert str(world(mesh).of_ranks(num, "here")) == found


@pytest.mark.parametrize(
    ("given", "num", "do"),
    [
        (world("dp=4"), 5, "1, 2, 3, 4, 6."),
        (world("dp=4", microbatches=3), 3, "1, 2, 4."),
        (world("tp=4", tp=1, rows=5), 3, "1."),
        (world("island=3,dp=2"), 4, "3, 6, 9, 12."),
    ],
)
def test_numbers_that_do_are_told(given: World, num: int, do: str) -> None:
    with pytest.raises(UsageError) as error:
        given.of_ranks(num, "here")
    assert error.value.do.endswith(f"numbers of ranks: {do}")
    assert "x [" in str(error.value)


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ("dp=5", r"x \[12, 5\]: its dim 0, of 12, is not divided by dp=5"),
        ("cp=2", "no axis 'cp'"),
        ("island=1,dp=2", "1 islands are not 2"),
    ],
)
def test_axes_that_do_not_do(axes: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        world("island=2,dp=2").with_axes(
            Mesh.parse(axes if "island" in axes else f"island=2,{axes}"), ""
        )


def test_axes_that_are_not_named_have_one_rank() -> None:
    assert str(world("dp=2,tp=2").with_axes(Mesh.parse("tp=4"), "")) == "dp=1 tp=4"
