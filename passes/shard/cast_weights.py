"""Casts of gathered weights: autocast's bf16 copies of float32 parameters, or an upcast router.

A cast treats every entry by itself, so that a shard may be cast before it is gathered, with equal
bits: ``f32[8@dp] -> bf16[8]`` sends half of what ``f32[8@dp] -> f32[8] -> bf16[8]`` sends, and no
rank holds the whole float32 weight. Forward and backward each make the cast weight anew, as they
gather a weight anew, so that no cast weight is saved between them.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from partc.graph import Graph, fake_of, first_operand, is_call
from partc.graph.casts import VIEWS, is_cast, widens
from partc.passes.shard.price import Choices
from partc.passes.shard.propagate import placed
from partc.plan import Plan
from partc.plan.sharding import R


def cast_weights(
    graph: Graph, plan: Plan, choices: Choices, moved: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The casts that are made where weights are gathered, and the views of their results, each with
    its parameter.

    A parameter that is gathered once per step counts only if casts to one dtype of no more bytes
    are all that reads it: else its whole float32 is needed beside them. Casts in ``moved`` lie as
    the plan says and do not count.
    """
    found: dict[fx.Node, fx.Node] = {}
    for name, param in graph.params.items():
        lives = {plan.gather.get(axis) for axis in plan.stored(name)} - {None}
        casts = [n for n in param.users if is_cast(n) and n not in moved]
        casts = [n for n in casts if _lies_alike(n, param, graph, plan, choices)]
        if lives and ("use" in lives or _share_one_dtype(casts, param)):
            found |= dict.fromkeys(casts, param)
    for node in graph.calls() if found else ():
        if is_call(node, *VIEWS) and first_operand(node) in found and node not in moved:
            found[node] = found[first_operand(node)]
    return found


def _share_one_dtype(casts: Collection[fx.Node], param: fx.Node) -> bool:
    """Whether casts to one dtype of no more bytes are all that reads a parameter."""
    dtypes = {fake_of(n).dtype for n in casts}
    return len(dtypes) == 1 and len(casts) == len(param.users) and not any(map(widens, casts))


def _lies_alike(cast: fx.Node, param: fx.Node, graph: Graph, plan: Plan, choices: Choices) -> bool:
    """Whether a cast reads and makes the layouts in which the gathered parameter is used."""
    used, chosen = placed(param, plan), choices.get(cast, {})
    return all(
        (s.ins[0], s.outs[0]) == (used.on(axis),) * 2
        if (s := chosen.get(axis))
        else used.on(axis) == R
        for axis in graph.mesh.names
    )
