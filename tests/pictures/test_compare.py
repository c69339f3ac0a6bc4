"""Programs beside each other: speed-up, cost, the Pareto front, and estimates elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import partc
from partc.cli.main import main
from partc.errors import UsageError
from partc.machines.objective import Batch
from partc.pictures.compare_svg import compare_svg
from partc.pictures.comparison import Compared, Comparison, comparison
from tests.pictures.test_pictures import check_inside
from tests.reports.report_programs import compiled


def point(name: str, devices: int, step_s: float, dollars: float | None = None) -> Compared:
    batch = Batch(1000, "samples")
    return Compared(name, "predicted", "", "m", devices, step_s, batch, 10**9, dollars)


POINTS = (point("one", 1, 8.0), point("two", 2, 5.0), point("four", 4, 2.0), point("bad", 4, 6.0))


def test_speed_up_is_relative_to_the_fewest_devices() -> None:
    found = Comparison(POINTS)
    assert [found.speed_up(each) for each in POINTS] == pytest.approx([1.0, 1.6, 4.0, 8 / 6])
    assert found.base.name == "one"


def test_the_front_has_what_nothing_beats() -> None:
    """By hand: cost is devices x time; 'two' costs more than 'four' and is slower."""
    found = Comparison(POINTS)
    assert [each.name for each in found.front] == ["four"]  # 8 device-seconds, as 'one', but faster
    cheap = Comparison((*POINTS, point("cheap", 1, 7.0)))
    assert [each.name for each in cheap.front] == ["four", "cheap"]
    for each in cheap.points:
        faster = [x for x in cheap.points if x.per_s > each.per_s]
        beats = [x for x in faster if cheap.cost(x) < cheap.cost(each)]
        assert not (each in cheap.front and beats)


def test_cost_is_in_dollars_where_all_have_a_price() -> None:
    some = Comparison((point("a", 1, 1.0, 3.0), point("b", 1, 1.0)))
    every = Comparison((point("a", 1, 1.0, 3.0), point("b", 1, 2.0, 5.0)))
    assert not some.in_dollars
    assert some.cost(some.points[0]) == pytest.approx(1.0 * 1 / 1000 * 1e6 / 3600)
    assert every.cost(every.points[1]) == 5.0
    assert "$ per M samples" in str(every)


@pytest.mark.exhaustive
def test_saved_programs_have_their_predictions() -> None:
    programs = {"a": compiled("ddp"), "b": compiled("megatron")}
    found = comparison(programs)
    for each, program in zip(found.points, programs.values(), strict=True):
        cost = program.cost.as_json()
        assert cost is not None
        assert each.step_s == cost["prediction"]["seconds"]
        assert each.peak_bytes == cost["peak_bytes"]
        assert each.devices == program.mesh.num_ranks
    check_inside(compare_svg(found))


def test_other_devices_and_machines_are_estimated() -> None:
    program = {"p": compiled("ddp")}
    found = comparison(program, devices=[1, 2, 4])
    assert [each.devices for each in found.points] == [1, 2, 4]
    assert {each.how for each in found.points} == {"estimated"}
    taken = program["p"].basis.taken
    assert taken is not None
    own = taken.search.estimate(taken.candidate)
    assert found.points[1].step_s == pytest.approx(own.estimate.step_s)
    check_inside(compare_svg(found))
    there = comparison(program, devices=[8], machines=["dgx-h100", "l40s-pcie"])
    assert [each.machine for each in there.points] == ["dgx-h100", "l40s-pcie"]
    check_inside(compare_svg(there))
    assert "3" in comparison(program, devices=[2, 3]).left_out[0]


def test_what_cannot_be_compared_is_refused() -> None:
    program = compiled("ddp")
    with pytest.raises(UsageError, match=r"nothing to compare .*no plan fits there"):
        comparison({"p": program}, devices=[3])
    bare = replace(program, basis=replace(program.basis, find=lambda: None))
    with pytest.raises(UsageError, match="none that the search knows"):
        comparison({"p": bare}, devices=[2])


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build, out = str(tmp_path / "build"), tmp_path / "x.svg"
    compiled("ddp").save(build)
    assert main(["compare", build, "-o", str(out)]) == 0
    assert "predicted" in capsys.readouterr().out
    check_inside(out.read_text())
    assert main(["compare", build, "--devices", "1,2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], [each["devices"] for each in told["points"]]) == (1, [1, 2])
    assert main(["compare", build, "--devices", "0"]) == 2
    assert main(["compare", build, "--machines", "dgx-h10"]) == 2
    assert "dgx-h100" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "biuld")]) == 2
    assert partc.load(build).mesh.num_ranks == 2
