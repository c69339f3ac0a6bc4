"""What ``partc.partition`` is given: a graph on a mesh, and a Plan; how each is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from partc.errors import UsageError
from partc.graph import Graph
from partc.plan import Plan
from partc.program import Program
from partc.wrong_calls import quoted

_GRAPH = 'graph = partc.Traced(model, inputs, loss).graph(); graph.mesh = partc.Mesh.of("dp=2")'


def check_given(graph: Any, plan: Any) -> None:
    """UsageError for what is no graph on a mesh, or no Plan. A graph that is on no mesh yet takes
    that of the plan.
    """
    if isinstance(plan, Graph) and not isinstance(graph, Graph):
        raise _refused(
            "the graph and the plan stand in each other's place", "Pass partition(graph, plan)."
        )
    if not isinstance(graph, Graph):
        raise _refused(f"the graph is {quoted(graph)}", f"Make one: {_GRAPH}.")
    if not isinstance(plan, Plan):
        raise _refused(f"the plan is {quoted(plan)}", _plan_of(plan))
    if not graph.mesh.axes and plan.mesh is not None:
        graph.mesh = plan.mesh
    if not graph.mesh.axes:
        raise _refused(
            "the graph is on no mesh", 'Say over which ranks: graph.mesh = partc.Mesh.of("dp=2").'
        )


def _plan_of(given: Any) -> str:
    """How what is no Plan becomes one."""
    if isinstance(given, Program):
        return "Pass partc.Plan.parse(program.plan)."
    if not isinstance(given, str | Path):
        return 'Make one: partc.Plan(preset="ddp").'
    text = str(given)
    if isinstance(given, Path) or text.endswith(".toml"):
        return f"Pass partc.Plan.load({text!r})."
    if "\n" in text:
        return "Pass partc.Plan.parse(text)."
    if "=" in text:
        return (
            f"A mesh is the graph's: graph.mesh = partc.Mesh.of({text!r}). The plan is a Plan: "
            'partc.Plan(preset="ddp").'
        )
    return f"Pass partc.Plan(preset={text!r})."


def _refused(what: str, do: str) -> UsageError:
    return UsageError(
        where="partition", what=what, why="it takes a traced graph on a mesh, and a Plan", do=do
    )
