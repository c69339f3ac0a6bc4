"""The plan that a search writes says all that was decided, also where propagation goes on alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partc.graph import value
from partc.lowering import trace
from partc.passes.search.shardings.decided import Decided
from partc.passes.search.shardings.decode import copy_graph, shortest_plan
from partc.passes.search.shardings.step_values import StepValues
from partc.passes.shard.propagate import propagate, whole_strategy
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.plan_values import PlannedLayout
from partc.plan.sharding import cut


class Gated(nn.Module):
    """Heads of one product are scaled by those of another, which is normed over all heads."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.level = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.level(self.q(x)).unflatten(-1, (4, -1))
        y: Tensor = self.o((self.v(x).unflatten(-1, (4, -1)) * q).flatten(-2))
        return y


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


def test_what_is_wanted_whole_stays_so_though_all_its_readers_cut_it() -> None:
    mesh = Mesh((("tp", 2),))
    graph = trace(Gated(), (torch.randn(8, 4, 16),), loss_of, fold=False)
    graph.mesh = mesh
    stored = {"v.weight": {"tp": cut(0)}, "o.weight": {"tp": cut(1)}}
    base = Plan(mesh=mesh, params=stored)
    values = StepValues(graph, Plan())
    heads = next(node for node in values.names if value(node).shape == (8, 4, 4, 4))
    twin, twins = copy_graph(graph)
    assert propagate(twin, base)[twins[heads]]["tp"].outs == (cut(2),), "each rank takes its heads"

    wanted = base.changed(values={values.names[heads]: {"tp": PlannedLayout()}})
    twin, twins = copy_graph(graph)
    made = propagate(twin, wanted)
    choices = {n: made.get(twins[n], {}) for n in values.names}
    decided = {n: found or {"tp": whole_strategy(n)} for n, found in choices.items()}
    plan = shortest_plan(base, Decided(decided, stored), ("tp",), values, "use")

    twin, twins = copy_graph(graph)
    again = propagate(twin, Plan.parse(str(plan)))
    assert not choices[heads]
    assert {n: again.get(twins[n], {}) for n in choices} == choices
