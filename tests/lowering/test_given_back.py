"""What passes of a user's package give back and leave: taken over, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

import partc
from partc.errors import CheckError, PartcError, UsageError
from partc.graph import Graph, is_call, set_like
from partc.graph.graph_edits import call_before, replace_by
from partc.passes import own_passes
from tests.mistakes.things import compiled

aten = torch.ops.aten
STAGES: dict[str, Any] = {"mesh": "pp=2", "microbatches": 2}
Given = Callable[[Any], Any]


def passed(function: Callable[..., Any], after: str = "insert_collectives", **given: Any) -> None:
    """A compile with this pass."""
    try:
        partc.graph_pass(after=after)(function)
        compiled(**given)
    finally:
        own_passes._OWN.clear()


def gives(what: Given, after: str = "insert_collectives", **given: Any) -> None:
    """A compile with a pass that asks for a graph, and gives this."""

    def broken(graph: Graph) -> Any:
        return what(graph)

    passed(broken, after, **given)


def gives_of_stages(what: Given, after: str = "split_stages", **given: Any) -> None:
    """A compile with a pass that asks for the stages."""

    def broken(stages: list[Graph]) -> Any:
        return what(stages)

    passed(broken, after, **given)


WRONG: dict[str, tuple[Given, str]] = {
    "a number as graph": (lambda graph: {"graph": 3}, "it gives 'graph': 3, and a pass may give"),
    "no graph": (lambda graph: {"graph": None}, "it gives 'graph': None"),
    "torch's graph": (lambda graph: fx.Graph(), "a torch.fx.graph.Graph, and a pass may give a "),
    "torch's graph by name": (lambda graph: {"graph": graph.fx}, "give the Graph that the pass"),
    "calls": (lambda graph: list(graph.calls()), "a list with a torch.fx.node.Node in it"),
    "a list without stages": (lambda graph: [graph], "not split into stages here"),
    "an empty list": (lambda graph: [], "not split into stages here"),
    "stages by name": (lambda graph: {"stages": [graph]}, "it gives 'stages': a list"),
    "a preset": (lambda graph: {"plan": "ddp"}, "it gives 'plan': 'ddp'"),
    "a misspelt key": (lambda graph: {"graf": graph}, "the key 'graf'.*Did you mean 'graph'"),
    "a key of partc's": (lambda graph: {"events": 5}, "the key 'events'"),
    "a pair": (lambda graph: (graph, None), "it gives a tuple"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_what_cannot_be_taken_over_is_refused_by_name(mistake: str) -> None:
    what, says = WRONG[mistake]
    with pytest.raises(CheckError, match=rf"pass broken \(.*{says}"):
        gives(what)


@pytest.mark.exhaustive
def test_what_does_not_fit_the_step_is_refused() -> None:
    with pytest.raises(CheckError, match="there is none yet"):
        gives(lambda graph: partc.Plan(preset="ddp"), "name_calls")
    with pytest.raises(CheckError, match="is split into stages here: a pass that asks for graph"):
        gives(lambda graph: [graph], "split_stages", **STAGES)
    with pytest.raises(CheckError, match="a list of 1, and the stages are 2"):
        gives_of_stages(lambda stages: stages[:1], **STAGES)
    with pytest.raises(CheckError, match="a pass that asks for stages gives their list"):
        gives_of_stages(lambda stages: stages[0], **STAGES)
    with pytest.raises(CheckError, match="it gives 'stages': a tuple"):
        gives_of_stages(lambda stages: {"stages": (*stages,)}, **STAGES)


@pytest.mark.exhaustive
def test_what_fits_is_taken_over() -> None:
    for what in (lambda graph: graph, lambda graph: {"graph": graph}, lambda graph: {}):
        gives(what)
        gives(what, "split_stages", **STAGES)
    gives_of_stages(lambda stages: stages, **STAGES)
    gives_of_stages(lambda stages: {"stages": [*stages]}, **STAGES)
    gives_of_stages(lambda stages: stages, "insert_collectives")  # none


def unnoted(graph: Graph) -> None:
    """A new call, of which nobody has said what it is of the whole."""
    for node in list(graph.calls()):
        if is_call(node, aten.relu.default):
            replace_by(node, call_before(node, aten.clamp_min.default, node.args[0], 0))


def of_torch(graph: Graph) -> None:
    for node in list(graph.calls()):
        if is_call(node, aten.relu.default):
            with graph.fx.inserting_before(node):
                new = graph.fx.call_function(torch.relu, (node.args[0],))
            set_like(new, node)
            replace_by(node, new)


def emptied(graph: Graph) -> None:
    graph.fx = fx.Graph()


def without_results(graph: Graph) -> None:
    graph.fx.output_node().args = ()


LEFT: dict[str, tuple[Callable[[Graph], None], str]] = {
    "a call without a note": (
        unnoted,
        r"clamp_min\.def.* is new: a rank gets f32\[4,8\] from it, and f32\[4@dp,8\].*set_like",
    ),
    "a call of torch's function": (of_torch, r"torch\.relu is what no call.*aten\.relu\.default"),
    "no results": (emptied, "the graph has no results"),
    "results that are none": (without_results, "cannot read the graph that it leaves: IndexError"),
}


@pytest.mark.parametrize("mistake", LEFT)
def test_what_a_pass_leaves_is_refused_behind_it(mistake: str) -> None:
    function, says = LEFT[mistake]
    with pytest.raises(CheckError, match=rf"pass {function.__name__} \(.*{says}"):
        passed(function)


def test_a_call_of_the_whole_needs_no_note() -> None:
    passed(unnoted, "name_calls")


def asks_for(function: Any, graph: Graph) -> bool:
    return is_call(next(graph.calls()), function)


def test_functions_of_torch_are_named_as_they_are_written() -> None:
    for function, name in ((torch.mul, r"torch\.mul"), (torch.Tensor.mul, r"torch\.Tensor\.mul")):
        with pytest.raises(UsageError, match=f"is_call: {name} is what") as told:
            gives(partial(asks_for, function))
        assert told.value.do == "Write torch.ops.aten.mul.Tensor or torch.ops.aten.mul.Scalar."


def test_a_misspelt_pass_to_leave_out_is_told_what_may_be_meant() -> None:
    def multiply_squares(graph: Graph) -> None: ...

    with pytest.raises(PartcError, match="Did you mean 'multiply_squares'"):
        passed(multiply_squares, disable=["multiply_square"])
