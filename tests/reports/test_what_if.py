"""Saved programs walked again: the same on the same machines, never slower on better ones."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from partc.cli.main import main
from partc.cost.prediction import Prediction
from partc.cost.roofline import BLOCKS, COMPUTE
from partc.cost.step_events import StepEvents
from partc.errors import UsageError
from partc.machines.topology import Topology
from partc.machines.what_if import Change
from partc.program import Program
from partc.reports.other_machines import estimated_step, pipeline_step, stage_step
from tests.towers import compiled

LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("dp=2,tp=2", "fsdp+megatron", {}),
    ("open", "auto", {}),
    ("pp=2,dp=2", "ddp", {"microbatches": 4}),
    ("pp=2", "ddp", {"microbatches": 4, "schedule": "zb-h1"}),
]
SVG = "http://www.w3.org/2000/svg"
BETTER = [
    Change(bandwidth={"": 2.0}),
    Change(latency={"": 0.5}),
    Change(peak=2.0),
    Change(memory_bandwidth=2.0),
]


def step(program: Program, change: Change) -> Prediction:
    if program.schedule:
        return pipeline_step(program, change, "here").cost.prediction
    return stage_step(program, change, "here").prediction


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan", "options"), LAYOUTS)
def test_the_same_machines_give_the_prediction_that_was_saved(
    mesh: str, plan: str, options: dict[str, Any]
) -> None:
    program = compiled(mesh, plan, **options)
    cost: Any = program.cost
    assert step(program, Change()) == cost.prediction
    for tape in program.basis.tapes:
        assert StepEvents.of_json(json.loads(json.dumps(tape.as_json()))) == tape


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan", "options"), LAYOUTS)
def test_better_machines_are_never_slower_and_all_together_are_twice_as_fast(
    mesh: str, plan: str, options: dict[str, Any]
) -> None:
    program = compiled(mesh, plan, **options)
    planned = step(program, Change()).seconds
    for change in BETTER:
        assert step(program, change).seconds <= planned, change
    all_of_it = Change(bandwidth={"": 2.0}, latency={"": 0.5}, peak=2.0, memory_bandwidth=2.0)
    assert planned / 2 <= step(program, all_of_it).seconds <= 0.6 * planned  # launches stay


def test_a_level_is_changed_by_its_name() -> None:
    topology = Topology.load("dgx-h100", 32)
    changed = Change.parse(bandwidth=["nvlink=x2"], latency=["0.5"], devices=16).apply(topology)
    inside, between = topology.levels
    assert changed.levels[0].bytes_per_s == 2 * inside.bytes_per_s
    assert changed.levels[1].bytes_per_s == between.bytes_per_s
    assert [each.latency_s for each in changed.levels] == [1.7e-6, 7e-6]
    assert changed.num_devices == 16
    with pytest.raises(UsageError, match="Known are nvlink, infiniband ndr"):
        Change.parse(bandwidth=["ethernet=2"]).apply(topology)
    with pytest.raises(UsageError, match="no factor"):
        Change.parse(peak="fast")


def test_streams_never_do_two_things_at_once() -> None:
    shown = stage_step(compiled("dp=2,tp=2", "fsdp+megatron"), Change(), "here")
    streams: dict[str, list[tuple[float, float]]] = {}
    for box in shown.boxes:
        if box.stream == BLOCKS:
            continue  # around what others show
        streams.setdefault(box.stream, []).append((box.begin_s, box.begin_s + box.seconds))
    assert set(streams) == {COMPUTE, "dp", "tp"}
    for spans in streams.values():
        for (_, end), (begin, _) in itertools.pairwise(spans):
            assert begin >= end * (1 - 1e-12)
    assert max(span[1] for span in streams[COMPUTE]) == pytest.approx(shown.prediction.seconds)


def test_more_devices_are_estimated() -> None:
    own, there = estimated_step(compiled("open", "auto"), Change(devices=8), "here")
    assert there
    assert there.estimate.step_s < own.estimate.step_s
    assert there.candidate.data_ranks * there.candidate.tp * there.candidate.pp == 8
    with pytest.raises(UsageError, match="nothing estimates it"):
        estimated_step(compiled("dp=4", "zero2"), Change(devices=8), "here")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, traced = str(tmp_path / "b"), tmp_path / "step.json"
    compiled("open", "auto").save(folder)
    options = ["--peak", "x2", "--bandwidth", "nvlink=2", "--trace", str(traced)]
    options += ["--svg", str(tmp_path / "step.svg")]
    assert main(["simulate", folder, *options]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("  predicted step")
    assert "2 x bandwidth of nvlink, 2 x peak FLOP/s: " in shown.splitlines()[-1]
    assert "% against " in shown.splitlines()[-1]
    picture = ElementTree.parse(tmp_path / "step.svg").getroot()
    assert {"compute", "over dp"} <= {each.text for each in picture.iter(f"{{{SVG}}}text")}
    titles = [each.text or "" for each in picture.iter(f"{{{SVG}}}title")]
    assert " with 2 x bandwidth of nvlink, 2 x peak FLOP/s. Transfers take " in titles[0]
    named = [event["name"] for event in json.loads(traced.read_text())["traceEvents"]]
    assert {"partc::compute::aten.linear", "partc::dp::all_reduce"} <= set(named)
    assert main(["simulate", folder, *options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seconds"] < told["planned_s"]
    assert main(["simulate", folder, "--devices", "8"]) == 0
    assert "8 devices: estimated" in capsys.readouterr().out
    assert main(["simulate", folder, "--devices", "8", "--svg", str(traced)]) == 2


def test_another_process_gets_the_tapes_without_what_holds_a_graph() -> None:
    basis = compiled("dp=2,tp=2", "fsdp+megatron").basis
    there = pickle.loads(pickle.dumps(basis))
    assert there == basis
    assert there.taken is None
    assert basis.taken
