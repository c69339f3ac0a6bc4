"""Plans that save money or energy: fewer devices where these are used better, prices from the
machine's file alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import partc
from partc.errors import PlanError, UsageError
from partc.machines.objective import Batch, per_million
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
    with pytest.raises(UsageError, match="Known are time, dollars, energy"):
        partc.compile(model, "dp=4", batch(), loss=loss_of, objective="beauty")
