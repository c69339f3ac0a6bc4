"""Embeddings under fsdp of which the rows travel, not the table.

To gather a table of embeddings and to reduce-scatter its gradient sends the whole table twice, for
the rows of a few tokens. Stored cut along its columns it need not be gathered: each rank looks up
its columns for the tokens of all ranks, and one all_to_all gives each its own tokens' rows, whole.
Their gradients go back the same way, and each rank then has all that its columns' gradient is made
of. Done where these transfers take less time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from partc.collective_cost import collective_seconds
from partc.graph import Graph, tensor_args, value
from partc.mesh import Mesh
from partc.passes.microbatches import MB
from partc.passes.value_names import value_names
from partc.plan import Cuts
from partc.plan_values import Lies
from partc.rules import Strategy, strategies
from partc.sharding import Layout, R, cut

aten = torch.ops.aten
COLUMNS = cut(1)


@dataclass(frozen=True)
class Lookup:
    """The calls that read a table and make its gradient; ``batch`` is how its tokens are cut."""

    table: fx.Node
    call: fx.Node
    grad: fx.Node | None
    batch: Layout
    over: tuple[str, ...]  # the axes that cut the tokens

    @property
    def strategies(self) -> Iterator[tuple[fx.Node, Strategy]]:
        """How its calls are cut where rows are exchanged: along the columns."""
        columns = cut(len(value(self.call).shape) - 1)
        yield self.call, Strategy((COLUMNS, R), (columns,))
        if self.grad is not None:
            yield self.grad, Strategy((columns, R), (COLUMNS,))


def exchange_rows(
    graph: Graph, params: Mapping[str, Cuts], inputs: Mapping[str, Cuts], axis: str, mesh: Mesh
) -> dict[str, dict[str, Lies]]:
    """Tables, of the parameters given with their cuts on other axes, whose rows are exchanged over
    ``axis``: per table what the plan then says of it, and of its calls, on this axis.
    """
    found = {name: _lookup(graph, name, inputs, axis) for name in params}
    better = {
        name: one
        for name, one in found.items()
        if one and all(test(one, params[name], axis, mesh) for test in (_cut_free, _faster))
    }
    names = value_names(graph) if better else {}
    return {name: dict(_values(one, name, names)) for name, one in better.items()}


def _values(lookup: Lookup, name: str, names: Mapping[fx.Node, str]) -> Iterator[tuple[str, Lies]]:
    yield name, Lies(COLUMNS)
    for node, strategy in lookup.strategies:
        then = lookup.batch if node is lookup.call else None
        yield names[node], Lies(strategy.outs[0], strategy.ins, then)


def _lookup(graph: Graph, name: str, inputs: Mapping[str, Cuts], axis: str) -> Lookup | None:
    """The one call that reads a parameter, if it looks up tokens of the batch that ``axis`` cuts;
    None where something else is done with it.
    """
    table, grad = graph.params[name], graph.grads.get(name)
    call = next(iter(table.users), None)
    if len(table.users) != 1 or call is None or call.target != aten.embedding.default:
        return None
    if grad is not None and grad.target != aten.embedding_dense_backward.default:
        return None
    tokens = _first(tensor_args(call)[1])
    cuts = inputs.get(value(tokens).name, {}) if value(tokens).kind == "input" else {}
    layout = cuts.get(axis)
    return Lookup(table, call, grad, layout, tuple(cuts)) if layout == cut(0) else None


def _first(tokens: fx.Node) -> fx.Node:
    """What tokens are made of, without what only reshapes or casts a batch."""
    while tokens.op == "call_function" and len(made_of := tensor_args(tokens)) == 1:
        if value(made_of[0]).shape[:1] != value(tokens).shape[:1]:
            break
        tokens = made_of[0]
    return tokens


def _cut_free(lookup: Lookup, cuts: Cuts, axis: str, mesh: Mesh) -> bool:
    """Whether the columns can be cut so: nothing else cuts them, and the rules allow it."""
    num = mesh.size(axis)
    if any(layout.dim == 1 for each, layout in cuts.items() if each != axis):
        return False
    return value(lookup.table).shape[1] % num == 0 and all(
        any(
            (each.ins, each.outs) == (wanted.ins, wanted.outs)
            for each in strategies(node, num, [*enumerate((*wanted.ins, *wanted.outs))])
        )
        for node, wanted in lookup.strategies
    )


def _faster(lookup: Lookup, cuts: Cuts, axis: str, mesh: Mesh) -> bool:
    """Whether rows travel in less time than the table and its gradient; tokens do not travel, as
    every rank is given the batch of all.
    """
    num, ways = mesh.size(axis), 1 if lookup.grad is None else 2
    turns = {each: mesh.size(each) for each in {*lookup.over, *(MB,)} & {*mesh.names}}
    pieces = prod(turns.values())
    table = _bytes(lookup.table) / prod(mesh.size(a) for a in cuts if a != axis)
    gather_s = collective_seconds("all_gather", table / num, mesh, axis)
    reduce_s = collective_seconds("reduce_scatter", table, mesh, axis) * (ways - 1)
    rows_s = collective_seconds("all_to_all", _bytes(lookup.call) / pieces, mesh, axis) * ways
    return rows_s < gather_s + reduce_s


def _bytes(node: fx.Node) -> float:
    return float(prod(value(node).shape) * value(node).dtype.itemsize)
