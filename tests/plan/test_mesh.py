"""Mesh: reading every form, ranks and coordinates, refusals."""

from pathlib import Path

import pytest

from partc.errors import PlanError
from partc.plan.mesh import Mesh, MeshLike


def test_every_form_gives_the_same_mesh(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("[axes]\ndp = 2\ntp = 4\n")
    forms: list[MeshLike] = ["dp=2,tp=4", {"dp": 2, "tp": 4}, str(path), path]
    mesh = Mesh((("dp", 2), ("tp", 4)))
    assert {Mesh.of(form) for form in [*forms, mesh]} == {mesh}


def test_ranks_and_coordinates_are_inverse() -> None:
    mesh = Mesh.of("a=2,b=3,c=2")
    assert [mesh.rank(mesh.coords(r)) for r in range(12)] == list(range(12))
    assert [mesh.coords(r) for r in range(12)] == mesh.all_coords()
    assert mesh.peers(7, "b") == [7 % 2 + 6 + 2 * i for i in range(3)]
    assert str(mesh) == "a=2 b=3 c=2"


def test_pipeline_ranks_stand_apart_from_the_axes_that_cut_tensors() -> None:
    mesh, flat = Mesh.of("dp=2,pp=3,tp=2"), Mesh.of("dp=2,tp=2")
    assert (mesh.pipeline_ranks, flat.pipeline_ranks) == (3, 1)
    assert mesh.cutting_axes() == flat == flat.cutting_axes()
    firsts = [mesh.first_rank(number) for number in range(3)]
    assert firsts == [mesh.rank({"dp": 0, "pp": number, "tp": 0}) for number in range(3)]
    assert flat.first_rank(0) == 0


@pytest.mark.parametrize(
    "bad", ["dp", "dp=0", "dp=two", "2=dp", "d-p=2", "dp=2,dp=2", "", 'a"];x=2']
)
def test_bad_meshes_are_refused(bad: str) -> None:
    with pytest.raises(PlanError):
        Mesh.of(bad)


def test_unknown_axis_names_those_there_are() -> None:
    with pytest.raises(PlanError, match="it has dp, tp"):
        Mesh.of("dp=2,tp=2").size("pp")
