"""What a pass of a user's package may give back, and why nothing else can be taken over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from partc.graph import Graph
from partc.plan import Plan
from partc.wrong_calls import did_you_mean, quoted

PARTS = ("graph", "plan", "stages")
_MAY = (
    "a pass may give a Graph (partc.graph.Graph), a Plan, the list of the stages' graphs, a dict "
    "of these by the names graph, plan and stages, or nothing where it has changed the graph itself"
)
_NO_STAGES = "the step is not split into stages here"
_IN_STAGES = "the step is split into stages here"


@dataclass(frozen=True)
class Step:
    """What a pass was given: by which names, of how many stages, and whether there is a plan."""

    names: tuple[str, ...]
    num_stages: int
    has_plan: bool

    @property
    def by_stage(self) -> bool:
        """Whether the pass is called with the graph of each stage."""
        return "stages" not in self.names


def wrong_return(given: object, step: Step) -> str:
    """Why what a pass gave cannot be taken over; "" if it can."""
    if given is None:
        return ""
    if not isinstance(given, Mapping):
        return _wrong_part(_part_of(given), given, "it gives", step)
    for name, part in given.items():
        if name not in PARTS:
            near = f" {hint}" if (hint := did_you_mean(name, PARTS)) else ""
            return f"it gives a dict with the key {quoted(name)}, and {_MAY}.{near}"
        wrong = _wrong_part(name, part, f"it gives {name!r}:", step)
        if wrong:
            return wrong
    return ""


def _part_of(given: object) -> str:
    """What of a step something by itself is meant to be; "" for nothing that there is."""
    kinds = ((Graph, "graph"), (Plan, "plan"), (list, "stages"))
    return next((name for kind, name in kinds if isinstance(given, kind)), "")


def _wrong_part(name: str, part: object, gives: str, step: Step) -> str:
    if name == "stages":
        return _wrong_stages(part, gives, step)
    if not isinstance(part, {"graph": Graph, "plan": Plan}.get(name, ())):
        return f"{gives} {_named(part)}, and {_MAY}{_meant(part)}"
    if name == "plan" and not step.has_plan:
        return f"{gives} a Plan, and there is none yet: one traced graph serves several plans"
    if name == "graph" and step.num_stages and not step.by_stage:
        return f"{gives} a Graph, and {_IN_STAGES}: a pass that asks for stages gives their list"
    return ""


def _wrong_stages(part: object, gives: str, step: Step) -> str:
    if not isinstance(part, list):
        return f"{gives} {_named(part)}, and {_MAY}"
    other = next((each for each in part if not isinstance(each, Graph)), None)
    if not all(isinstance(each, Graph) for each in part):
        return f"{gives} a list with {_named(other)} in it, and {_MAY}{_meant(other)}"
    if step.by_stage:
        where = _IN_STAGES if step.num_stages else _NO_STAGES
        return f"{gives} a list, and {where}: a pass that asks for graph gives a Graph or nothing"
    if len(part) != step.num_stages:
        have = f"{step.num_stages}" if step.num_stages else "none"
        return f"{gives} a list of {len(part)}, and the stages are {have}"
    return ""


def _named(given: object) -> str:
    """A value as a message quotes it, with the module of a class that is not Python's."""
    kind = type(given)
    if isinstance(given, type) or kind.__module__ == "builtins":
        return quoted(given)
    return f"a {kind.__module__}.{kind.__qualname__}"


def _meant(given: object) -> str:
    """What to give in place of parts of torch's graph."""
    if isinstance(given, fx.Graph):
        return ". It is the fx of one: give the Graph that the pass was given"
    if isinstance(given, fx.Node):
        return ". Calls are changed in place, and nothing is given back"
    return ""
