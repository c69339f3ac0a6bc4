"""Say in a plan's notes where ranks of an axis compute the same, which costs time and memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from math import prod

from torch import fx

from partc.graph import Graph, tensor_args, value
from partc.plan import Cuts, Plan, fold_names
from partc.plan.mesh import MICROBATCH_AXIS, Mesh
from partc.rules.discover import strategies_for
from partc.rules.strategy import has_rule
from partc.rules.table import name_of

IDLE = "so that its ranks all compute the same"  # in the notes of axes that divide nothing
NO_ROWS = "no batch is a multiple of its ranks: take a size that divides the rows of the batch"
NO_PRODUCTS = (
    "the preset found no products that it divides, to cut by column and by row, and it cuts no "
    "weight that is computed from several parameters (weight norm): take a size that divides heads "
    "and widths of hidden layers, or leave the axis out"
)
MUCH = 0.25  # of the elements of all matrices
MOST_NAMES = 6


def idle_axes(
    plan: Plan, graph: Graph, params: Mapping[str, Cuts], inputs: Mapping[str, Cuts],
    data: Iterable[str], tensor: Iterable[str], mesh: Mesh,
) -> Iterator[str]:  # fmt: skip
    """A note for each axis of several ranks that divides no work between them, or little of it."""
    named = {axis for lies in plan.values.values() for axis in lies}
    for axes, table, kind, why in (
        (data, inputs, "input", NO_ROWS),
        (tensor, params, "weight", NO_PRODUCTS),
    ):
        cut_axes = named.union(*table.values())
        for axis in axes:
            num = mesh.size(axis)
            if axis == MICROBATCH_AXIS or num == 1:
                continue
            if axis not in cut_axes:
                op = next(ruleless(graph, num), None) if table is params else None
                yield f"{axis}={num} cuts no {kind}, {IDLE}: {why if op is None else _because(op)}"
            elif table is params and axis not in named:
                yield from _whole_matrices(graph, params, axis, num)


def ruleless(graph: Graph, num: int) -> Iterator[fx.Node]:
    """The calls of the forward, of weights and inputs, that can be cut in no way on ``num`` ranks,
    as no rule says how, and no experiment finds it.
    """
    kinds: dict[fx.Node, set[str]] = {}
    for node in graph.fx.nodes:
        operands = tensor_args(node) if node.op == "call_function" else []
        kinds[node] = {value(node).kind} if node.op == "placeholder" else set()
        kinds[node].update(*(kinds[operand] for operand in operands))
        if not operands or node.target is operator.getitem or value(node).phase != "F":
            continue
        known = has_rule(node.target) or not {"param", "input"} <= kinds[node]
        if not known and not strategies_for(node, num):
            yield node


def _because(node: fx.Node) -> str:
    known = value(node)
    at = ", ".join(filter(None, (known.module, known.source)))
    return (
        f"{name_of(node.target)} ({at}) stands between the products, has no sharding rule, and "
        "runs whole on every rank: add a rule for it"
    )


def _whole_matrices(graph: Graph, params: Mapping[str, Cuts], axis: str, num: int) -> Iterator[str]:
    """A note where a tensor axis leaves much of the weights whole."""
    sizes = {
        name: graph.times(node) * prod(value(node).shape)
        for name, node in graph.params.items()
        if len(value(node).shape) > 1
    }
    whole: dict[str, Cuts] = {name: {} for name in sizes if axis not in params.get(name, {})}
    share = sum(sizes[name] for name in whole) / max(sum(sizes.values()), 1)
    if share < MUCH:
        return
    names = list(fold_names(whole, apart=params.keys() - whole.keys()))
    listed = ", ".join(names[:MOST_NAMES]) + " ..." * (len(names) > MOST_NAMES)
    yield (
        f"{axis}={num} leaves {share:.0%} of the weights whole, with which its ranks all compute "
        f"the same: {listed}"
    )
