"""Plans that save money or energy: fewer devices where these are used better, prices from the
machine's file alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from partc.errors import PlanError, UsageError
from partc.machines.objective import Batch, objective_of, per_million
from partc.machines.topology import Topology
from partc.passes.search.plans.choose_plan import choose
from partc.plan.mesh import Mesh
from partc.program import load
from partc.reports.explanation import explain_program
from tests.towers import batch, compiled, loss_of, tower


def priced() -> Mesh:
    topology = Topology.load("dgx-h100", 8)
    ((device, count),) = topology.groups
    return Mesh((), replace(topology, groups=((replace(device, dollars_per_hour=3.6), count),)))


def test_a_million_tokens_cost_what_devices_cost_while_the_step_runs() -> None:
    machines = priced().hardware
    few, many = Batch(1000, "tokens"), Batch(10**6, "tokens")
    assert per_million("dollars", 2.0, 5, machines, few) == pytest.approx(10.0)
    assert per_million("energy", 36.0, 10, machines, many) == pytest.approx(0.07)
    assert per_million("time", 36.0, 10, machines, many) is None


@pytest.mark.exhaustive
def test_fewer_devices_are_taken_where_the_others_cost_more_than_they_gain(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = tower()
    fast = partc.compile(model, priced(), batch(), loss=loss_of)
    cheap = partc.compile(model, priced(), batch(), loss=loss_of, objective="dollars")
    assert fast.mesh.num_ranks == 8
    assert 1 < cheap.mesh.num_ranks < 8
    assert "auto: cheapest of " in cheap.plan
    assert " $ per million samples; next: " in cheap.plan
    cheap.save(tmp_path / "b")
    shown = explain_program(load(tmp_path / "b"))
    text = str(shown)
    assert " $ per million samples" in text.splitlines()[0]
    assert text.splitlines()[1].split() == ["choice", "taken", "instead", "step", "cost", "memory"]
    assert shown.estimated
    chosen, search = shown.estimated.chosen, shown.estimated.search
    assert all(search.cost(one) >= search.cost(chosen) for one in search.ascending())


def test_time_and_money_agree_on_fixed_axes() -> None:
    taken = compiled("open", "auto").basis.taken
    assert taken
    fixed = replace(taken.search, mesh=Mesh((("dp", 4),), taken.search.mesh.topology))
    by_time, by_energy = (
        [each.candidate for each in found.ranked]
        for name in ("time", "energy")
        if (found := choose(replace(fixed, objective=name)))
    )
    assert by_time == by_energy


def test_what_has_no_price_or_nothing_to_choose_is_refused() -> None:
    with torch.device("meta"):
        model = tower()
    with pytest.raises(PlanError, match="add `dollars_per_hour = ") as caught:
        partc.compile(model, Mesh.load("dgx-h100", 4), batch(), loss=loss_of, objective="dollars")
    assert "H100 SXM 80GB" in str(caught.value)
    with pytest.raises(PlanError, match="leaves nothing to choose"):
        partc.compile(model, "dp=4", batch(), loss=loss_of, plan="ddp", objective="energy")


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ("beauty", "Write one of time, dollars, energy; memory is limited by memory_bytes="),
        ("memory", "Memory is a limit: memory_bytes=16_000_000_000"),
        ("throughput", 'or write "time"'),
        ("cost_per_token", 'Write "dollars"'),
        ("Power", 'Write "energy"'),
        ("times", "Did you mean 'time'"),
        (None, 'it is "time", of a step, or "dollars" or "energy", of a token'),
        (["time"], "objective=['time']: there is no such objective"),
    ],
)
def test_another_objective_is_told_which_there_are(objective: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        objective_of(objective)
    assert said in str(caught.value)


def test_memory_is_limited_as_an_objective_of_memory_is_told() -> None:
    program = partc.compile(tower(), "dp=4", batch(), loss=loss_of, memory_bytes=16_000_000_000)
    assert "memory_bytes = 16000000000" in program.plan
