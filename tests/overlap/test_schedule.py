"""Where starts and waits stand, what runs between them, and what the backward computes again."""

from __future__ import annotations

from collections.abc import Callable

from partc.checks.local_graph import check
from partc.graph import Graph
from partc.graph.graph_parse import parse_graph
from partc.passes.overlap.overlap_collectives import overlap_collectives
from partc.passes.overlap.place_waits import place_waits
from partc.passes.recompute.choose import recompute
from partc.passes.shard.split_bias import fuse_bias, split_bias
from partc.plan import Plan
from tests.overlap.local_layer import LOCAL

Golden = Callable[..., None]


def scheduled() -> Graph:
    graph = overlap_collectives(place_waits(parse_graph(LOCAL)))
    check(graph)
    return graph


def order(graph: Graph) -> list[str]:
    return [node.name for node in graph.calls()]


def test_starts_early_and_waits_late(golden: Golden) -> None:
    golden(str(scheduled()))


def test_weight_gradients_run_beside_the_transfer() -> None:
    """``d_up_w`` and ``d_down`` stand before it is needed that the sum over tp is finished."""
    names = order(scheduled())
    wait = next(n for n in scheduled().calls() if n.args and str(n.args[0]) == "d_x_r")
    assert names.index("d_x_r") < names.index("d_up_w") < names.index(wait.name)
    assert names.index("d_x_r") < names.index("d_down") < names.index(wait.name)


def test_reductions_start_with_their_gradient_and_end_with_the_step() -> None:
    names = order(scheduled())
    assert names.index("d_up_r") == names.index("d_up_w") + 1
    waits = [n.name for n in scheduled().calls() if "wait" in n.name]
    assert names[-len(waits) + 2 :] == waits[2:]


def test_where_nothing_is_in_flight_weights_come_first() -> None:
    """What is computed again for the gradient of a weight is gone before that of the input."""
    alone = LOCAL.replace("  reduced = all_reduce(down, axis='tp', num=2) : f32[8@dp,16]\n", "")
    alone = alone.replace("  d_x_r = all_reduce(d_x, axis='tp', num=2)    : f32[8@dp,16]\n", "")
    alone = alone.replace("reduced", "down").replace("d_x_r", "d_x")
    alone = alone.replace("tp=2", "").replace("@tp", "").replace("{U:tp}", "")
    names = order(overlap_collectives(place_waits(recompute(parse_graph(alone), Plan()))))
    assert names.index("act_1") < names.index("d_down") < names.index("d_act")


def test_cheap_values_are_computed_again() -> None:
    """The activation follows from ``up``, which is kept anyway: the backward makes its own."""
    graph = recompute(parse_graph(LOCAL), Plan())
    d_down = next(n for n in graph.calls() if n.name == "d_down")
    again = d_down.args[1]
    assert again is not next(n for n in graph.calls() if n.name == "act")
    assert str(again.target) == "aten.silu.default"  # type: ignore[union-attr]
    assert again.args == next(n for n in graph.calls() if n.name == "act").args  # type: ignore[union-attr]


BIASED = """\
graph Head  mesh tp=2
param weight : f32[4,16]
param bias : f32[4]
input x : f32[8,16]
forward head
  y = linear(x, weight, bias) : f32[8,4]
outputs
  result y = y
"""


def test_a_bias_is_split_off_and_joined_again() -> None:
    split = split_bias(parse_graph(BIASED))
    assert [str(n.target) for n in split.calls()] == ["aten.linear.default", "aten.add.Tensor"]
    joined = fuse_bias(split)
    assert [str(n.target) for n in joined.calls()] == ["aten.linear.default"]
    assert len(next(joined.calls()).args) == 3
