"""The search for shardings: optimal where everything can be tried, and its plans run."""

from __future__ import annotations

import math

import pytest

from benchmarks.joint_shardings import Found, search_shardings
from partc.machines.topology import Topology
from partc.passes.search.shardings.decode import copy_graph
from partc.passes.search.shardings.transfers import Transfers
from partc.passes.shard.propagate import propagate, whole_strategy
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.sharding import R, U, cut
from tests.search.random_steps import BruteForce, random_step

CLOSE = 1e-9  # relative: the same times added up in another order


@pytest.mark.rows(1)
@pytest.mark.parametrize("seed", range(16))
def test_no_plan_for_one_axis_is_faster(seed: int) -> None:
    check_optimal(seed, 5)


def check_optimal(seed: int, num_calls: int) -> None:
    """The plan's own time, not only the search's word for it, is the least of all."""
    machine = ("dgx-h100", "p4d-ethernet")[seed % 2]
    num = (2, 3, 4)[seed % 3]
    mesh = Mesh((("x", num),), Topology.load(machine, num) if num != 3 else None)
    graph = random_step(seed, num_calls)
    found = search_shardings(graph, mesh, tie=False)
    every = BruteForce(graph, mesh)
    least = every.least()
    assert found.seconds == pytest.approx(least, rel=CLOSE)
    assert found.bound == pytest.approx(least, rel=CLOSE)
    assert seconds_of(found, every) == pytest.approx(least, rel=CLOSE)


def test_rows_in_an_order_of_their_own_stay_where_they_are() -> None:
    """No other rank knows where they belong."""
    mesh = Mesh((("x", 2),))
    transfers = Transfers(mesh, mesh)
    own = transfers.number({"x": cut(0, permuted=True)})
    others = [transfers.number({"x": layout}) for layout in (R, U, cut(0), cut(1))]
    assert transfers.seconds(1e6, own, own) == 0
    assert all(transfers.seconds(1e6, own, other) == math.inf for other in others)
    assert all(transfers.seconds(1e6, other, own) == math.inf for other in others)


def seconds_of(found: Found, every: BruteForce) -> float:
    """What a plan's propagation takes by the formulas of the brute force."""
    graph, twins = copy_graph(every.graph)
    graph.mesh = every.mesh
    choices = propagate(graph, Plan.parse(str(found.plan)))
    left = dict.fromkeys(graph.fx.nodes)  # what was decomposed has gone
    chosen = {
        n: choices.get(twins[n], {}).get("x", whole_strategy(n))
        if twins[n] in left
        else every.decomposed(n)[0]
        for n in every.calls
    }
    stored = tuple(found.plan.stored(name).get("x", R) for name in every.graph.params)
    again = found.plan.gather.get("x", "use") == "use"
    return every.seconds(chosen, stored, again)
