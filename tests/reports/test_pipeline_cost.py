"""Stages are cut by cost, schedules proved, and what is predicted of a step is what ranks hold."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from partc import compile
from partc.cli.main import main
from partc.cost.pipeline_step import check_queues, plan_step
from partc.cost.stage_cost import stage_link, with_send_costs
from partc.errors import CheckError, PartcError, PlanError
from partc.graph.blocks import blocks_of
from partc.machines.topology import APART_S, Topology
from partc.passes.stages.cut_stages import balance
from partc.passes.stages.stage_units import stage_units
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program, load
from partc.reports.pipeline_cost import PipelineCost
from partc.schedules import Action, Schedule, make
from partc.schedules.step_costs import StepCosts
from partc.schedules.timing import Costs
from partc.verification.verification import verify
from tests.example_program import example_program
from tests.zoo import FAMILIES, Case


@cache
def case_of(name: str, batch: int = 4, **changes: Any) -> Case:
    """A model of the zoo with other sizes, and a batch repeated to so many samples."""
    family = FAMILIES[name]
    case = replace(family, config={**family.config, **changes}).case(name)
    times = batch // case.inputs[0].shape[0]
    return replace(case, inputs=tuple(torch.cat([x] * times) for x in case.inputs))


@cache
def llama(schedule: str, microbatches: int = 4, **changes: Any) -> Program:
    step = case_of("llama", batch=8, num_hidden_layers=4).step
    given = {"microbatches": microbatches, "schedule": schedule, **changes}
    return compile(step, "pp=2", plan="ddp", **given)


# peaks --------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
def test_gpipe_holds_all_microbatches_and_1f1b_those_in_flight() -> None:
    for schedule, most in (("gpipe", (4, 4)), ("1f1b", (2, 1))):
        cost = llama(schedule).cost
        assert isinstance(cost, PipelineCost)
        for rank, held in zip(cost.ranks, most, strict=True):
            activations = held * cost.stages[rank.stages[0]].activation_bytes
            messages = 3 * max(stage.sent_bytes for stage in cost.stages)
            assert activations <= rank.in_flight <= activations + messages
        gradients = [sum(rank.grads for rank in cost.ranks)]
        assert gradients == [sum(rank.params for rank in cost.ranks)]


# what is proved -----------------------------------------------------------------------------------
def order(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())


def test_orders_that_cannot_finish_are_refused_with_the_cycle() -> None:
    stuck = Schedule("mine", (order("0F0 0B0 0F1 0B1"), order("1F0 1F1 1B0 1B1")), (0, 1), 2)
    costs = StepCosts.of(Costs.even(2))
    with pytest.raises((CheckError, PlanError), match="0WAIT_RECV_B0") as caught:
        plan_step(stuck, costs)
    assert "rank 0" in str(caught.value)
    assert "rank 1" in str(caught.value)


def test_queues_that_would_mix_microbatches_are_refused() -> None:
    mixed = Schedule("mine", (order("0F0 0F1 0B1 0B0"), order("1F0 1F1 1B0 1B1")), (0, 1), 2)
    with pytest.raises(PlanError, match="backwards of microbatches in different orders"):
        check_queues(mixed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe-v"])
def test_programs_carry_the_bounds_of_the_lowering(schedule: str) -> None:
    program = llama(schedule)
    assert isinstance(program.cost, PipelineCost)
    made = make(schedule, ranks=2, microbatches=4)
    wiring = program.cost.plan_step(made).wiring
    for rank in range(2):
        mine = [
            wiring.bounds[channel]
            for channel, one in enumerate(wiring.communicators[: len(wiring.bounds)])
            if channel in wiring.channels and one.members[0] == rank
        ]
        printed = re.findall(r"bound=(\d+)", program.source(rank))
        assert sorted(map(int, printed)) == sorted(mine)


# cuts ---------------------------------------------------------------------------------------------
def stages_of(program: Program) -> tuple[str, ...]:
    return Plan.parse(program.plan).stages


@pytest.mark.exhaustive
def test_a_heavy_head_counts_as_what_it_costs() -> None:
    layers = []
    for vocab in (112, 3000):
        case = case_of("llama", num_hidden_layers=4, vocab_size=vocab)
        graph = case.step.graph()
        (units, _) = stage_units(graph, Plan(microbatches=2), Mesh.of("pp=2"))
        (point,) = balance(units, 2, in_flight=(2, 1))
        layers.append(sum("layers" in unit.name for unit in units[:point]))
    assert layers[0] == 2
    assert 2 < layers[1] < 4  # the last stage has fewer


@pytest.mark.exhaustive
def test_a_head_alone_is_a_stage() -> None:
    case = case_of("llama")
    program = compile(case.step, "pp=2", microbatches=2, stages=["lm_head"])
    assert verify(program, case.model, case.inputs, case.loss).ok(1e-9)


@pytest.mark.exhaustive
def test_a_saved_plan_replays() -> None:
    first = llama("zb-v")
    assert len(stages_of(first)) == 3
    case = case_of("llama", batch=8, num_hidden_layers=4)
    again = compile(case.step, "pp=2", plan=Plan.parse(first.plan))
    assert again.sources == first.sources


@pytest.mark.exhaustive
def test_chosen_stages_compute_what_the_model_does() -> None:
    case = case_of("t5")
    program = compile(case.step, "pp=2", plan="ddp", microbatches=2, schedule="interleaved-1f1b")
    assert verify(program, case.model, case.inputs, case.loss).ok(1e-9)


@pytest.mark.exhaustive
def test_units_are_blocks_and_what_stands_between() -> None:
    case = case_of("t5")
    graph = case.step.graph()
    assert sorted(blocks_of(graph)) == [
        "decoder.block.0", "decoder.block.1", "encoder.block.0", "encoder.block.1"
    ]  # fmt: skip
    names = [unit.name for unit in stage_units(graph, Plan(), Mesh.of("pp=2"))[0]]
    assert names[1:4] == ["encoder.block.0", "encoder.block.1", "encoder.final_layer_norm"]
    assert names[-1] == "lm_head"


@pytest.mark.exhaustive
def test_an_order_made_for_the_costs_is_right_and_no_slower() -> None:
    best, named = llama("auto"), llama("1f1b")
    assert isinstance(best.cost, PipelineCost)
    assert isinstance(named.cost, PipelineCost)
    assert best.cost.step_s <= named.cost.step_s * (1 + 1e-9)
    case = case_of("llama", batch=8, num_hidden_layers=4)
    assert verify(best, case.model, case.inputs, case.loss).ok(1e-9)


def test_a_cost_is_read_back_from_what_is_saved() -> None:
    cost = llama("1f1b").cost
    assert PipelineCost.of_json(json.loads(json.dumps(cost.as_json()))) == cost


# bad input ----------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"stages": ["model.layers.1", "model.layers.0", "model.norm"]}, "does not run after"),
        ({"stages": ["model.layer.1"]}, "no such module runs"),
        ({"stages": ["model.layer.1"]}, "Did you mean 'model.layers.1'"),
        ({"stages": ["model.layers.0 model.norm"]}, "--stages model.layers.0,model.norm"),
        ({"stages": ["model.layers.0", "model.layers.1"]}, "3 stages cannot be dealt out to 2"),
        ({"schedule": "2f2b"}, "no such schedule"),
        ({"schedule": "forward-only"}, "it has no backwards"),
        ({"schedule": "zb-v", "virtual_stages": 3}, "does not take 3 stages per pipeline rank"),
        ({"microbatches": 3}, "the batch of 4 cannot be cut by microbatches=3"),
        (
            {"microbatches": 4, "mesh": "pp=2,dp=2"},
            "the batch of 4 cannot be cut by microbatches=4",
        ),
        ({"microbatches": 0}, "microbatches = 0 is no such number"),
        ({"virtual_stages": 20}, "units to cut between"),
        ({"memory_bytes": 10_000}, "no cut fits 10,000 bytes of memory"),
    ],
)
def test_what_cannot_be_is_refused_in_words(changes: dict[str, Any], what: str) -> None:
    case = case_of("llama")
    given = {"mesh": "pp=2", "microbatches": 2, "plan": "ddp", **changes}
    if given.get("virtual_stages") == 20 or len(given.get("stages", ())) == 3:
        given["schedule"] = "interleaved-1f1b"
    with pytest.raises(PartcError, match=re.escape(what)) as caught:
        compile(case.step, given.pop("mesh"), **given)
    assert caught.value.where
    assert caught.value.do


# the command line ---------------------------------------------------------------------------------
@pytest.mark.exhaustive
def test_simulate_shows_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, picture, trace_file = (tmp_path / name for name in ("b", "step.svg", "step.json"))
    llama("zb-v").save(folder)
    written = ["--svg", str(picture), "--trace", str(trace_file)]
    assert main(["simulate", str(folder), *written]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("zb-v: 2 ranks, 4 microbatches, bubble")
    assert "0F0" in shown
    assert picture.read_text().startswith("<svg")
    named = {event["name"] for event in json.loads(trace_file.read_text())["traceEvents"]}
    assert {"partc::W::1W3", "partc::collective::loss"} <= named
    assert main(["simulate", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    cost = llama("zb-v").cost
    assert isinstance(cost, PipelineCost)
    assert told["step_s"] == cost.step_s
    assert told["peak_bytes"] == [rank.peak_bytes for rank in cost.ranks]
    assert load(folder).schedule.splitlines()[1].startswith("1F0")


def test_simulate_refuses_what_was_not_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example_program().save(tmp_path / "b")
    assert main(["simulate", str(tmp_path / "b")]) == 2
    assert "nothing of this program's step was saved" in capsys.readouterr().err


def test_stages_lose_to_messages_what_the_machine_says() -> None:
    program = llama("1f1b")
    stages = program.cost.stages  # type: ignore[attr-defined]
    machine = Topology.load("cpu", 2)
    plain = replace(machine, contention=0.0, skew=0.0)
    assert with_send_costs(stages, Mesh((("pp", 2),), plain)) == stages
    slow = Mesh((("pp", 2),), replace(machine, contention=0.5, skew=0.1))
    first, last = with_send_costs(stages, slow)
    moving = stage_link(stages, slow).seconds(stages[0].sent_bytes)
    late = [0.1 * min(s, APART_S) for s in (stages[0].backward_s, stages[1].forward_s)]
    assert first.forward_s == pytest.approx(stages[0].forward_s + 0.5 * moving)
    assert first.backward_s == pytest.approx(stages[0].backward_s + 0.5 * moving + late[0])
    assert last.forward_s == pytest.approx(stages[1].forward_s + 0.5 * moving + late[1])
    assert last.spent["B"].exposed["pp"] == pytest.approx(0.5 * moving)
    assert with_send_costs(stages, Mesh((("pp", 1),), slow.hardware.resized(1))) == stages
