"""Recompute whole regions of the model, a block or a module that the plan names, from their inputs.

A region saves only the values that enter it, draws that depend on values (``bernoulli(p)``),
weights that are gathered once per step (ZeRO-1 and 2), and values that other regions read, which
exist anyway. A dropout's mask is drawn again.
"""

from __future__ import annotations

import operator

from torch import fx

from partc.errors import PlanError
from partc.graph import Graph, is_weight, picked, tensor_args, value
from partc.graph.blocks import blocks_of, prefixes
from partc.graph.folds import list_member
from partc.graph.moves import gathers_param
from partc.passes.recompute.copy_forward import Copies, Home, may_repeat
from partc.plan import Plan, fits
from partc.plan.field_kinds import RECOMPUTES


def recompute_regions(graph: Graph, plan: Plan) -> Graph:
    """Recompute in every region's backward the forward values that the backward reads, in place.

    PlanError if a path of ``plan.recompute`` fits no module that runs.
    """
    home = _home(graph, plan)
    inside = [n for n in graph.calls() if value(n).phase == "F" and home(n)]
    again = {n for n in inside if _is_made_again(n, plan)}
    again -= {n for n in again if _leaves(n, home)}
    Copies(graph, again, home).insert()
    _gather_once(graph, home)
    return graph


def has_blocks(graph: Graph) -> bool:
    """Whether the forward has a region of ``recompute = "block"``."""
    home = _block_home(graph)
    return any(value(n).phase == "F" and home(n) for n in graph.calls())


def _home(graph: Graph, plan: Plan) -> Home:
    """The function from a call to the path of its region, "" for a call in no region."""
    if plan.recompute == "block":
        return _block_home(graph)
    patterns = plan.recompute_paths
    for pattern in patterns:
        _check_pattern(graph, pattern)

    def home(node: fx.Node) -> str:
        paths = prefixes(value(node).module)
        return next((p for p in paths if any(fits(pattern, p) for pattern in patterns)), "")

    return home


def _block_home(graph: Graph) -> Home:
    """Regions of ``recompute = "block"``: the outermost block of a stack of alike blocks around a
    call; where the model has none, the outermost member of any list of modules.
    """
    alike = blocks_of(graph)

    def home(node: fx.Node) -> str:
        module = value(node).module
        path, index = list_member(module)
        return next((p for p in prefixes(module) if p in alike), f"{path}.{index}" if path else "")

    return home


def _check_pattern(graph: Graph, pattern: str) -> None:
    modules = dict.fromkeys(value(n).module for n in graph.calls() if value(n).phase == "F")
    paths = dict.fromkeys(path for module in modules for path in prefixes(module))
    if not any(fits(pattern, path) for path in paths):
        raise PlanError(
            where=f"plan, recompute, {pattern!r}",
            what="no module that runs is called so",
            why="a path, or a pattern with *, names the modules whose values are computed again",
            do=f"Write {', '.join(map(repr, RECOMPUTES))}, or a list with some of "
            f"{', '.join(filter(None, [*paths][:8]))}.",
        )


def _is_made_again(node: fx.Node, plan: Plan) -> bool:
    """Whether a call gives the same result when run again, and its result is not a weight that
    exists for the whole step.
    """
    if node.target is operator.getitem:
        return _is_made_again(picked(node)[0], plan)
    return may_repeat(node) and not (is_weight(node) and _is_whole_for_step(node, plan))


def _is_whole_for_step(weight: fx.Node, plan: Plan) -> bool:
    """Whether a weight comes from a parameter that is gathered once per step (ZeRO-1 and 2)."""
    while weight.op == "call_function":
        if gathers_param(weight):
            return plan.gather.get(str(weight.kwargs["axis"])) == "step"
        weight = tensor_args(weight)[0]
    return False


def _leaves(node: fx.Node, home: Home) -> bool:
    """Whether other regions read a value."""
    return any(u.op == "call_function" and home(u) != home(node) for u in node.users)


def _gather_once(graph: Graph, home: Home) -> None:
    """Let a region's backward gather each weight once, for the recomputed forward and the gradients
    together.
    """
    first: dict[object, fx.Node] = {}
    for node in list(graph.calls()):
        if value(node).phase == "B" and home(node) and gathers_param(node):
            kwargs = tuple(sorted(node.kwargs.items()))
            once = first.setdefault((home(node), node.target, *tensor_args(node), kwargs), node)
            if once is not node:
                node.replace_all_uses_with(once)
                graph.fx.erase_node(node)
