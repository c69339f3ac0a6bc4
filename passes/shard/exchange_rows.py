"""Embeddings that send the rows of the batch's tokens instead of the table or its gradient.

Under FSDP the all-gather of a table and the reduce-scatter of its gradient send the whole table
twice, for the rows of a few tokens. A table sharded by columns (``f32[V,H@dp]``) is not gathered:
each rank looks up its columns for the tokens of all ranks, and one all-to-all gives every rank the
whole rows of its own tokens. The gradients of the rows go back by a second all-to-all. The gradient
of a replicated table is not all-reduced: ranks all-gather the gradients of the rows, and each
adds them up, as for sparse gradients (Horovod; Parallax, Kim et al. 2019). Both are chosen only
where their transfers take less time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from partc.cost.collective_cost import collective_seconds
from partc.graph import Graph, tensor_args, value
from partc.passes.shard.value_names import value_names
from partc.plan import Cuts, Plan
from partc.plan.mesh import MICROBATCH_AXIS, Mesh
from partc.plan.plan_values import PlannedLayout
from partc.plan.sharding import Layout, R, cut
from partc.rules import Strategy, strategies

aten = torch.ops.aten
COLUMNS = cut(1)


@dataclass(frozen=True)
class Lookup:
    """An embedding table with its look-up and the call that makes its gradient.

    ``batch`` is the layout of the tokens on the axis in question.
    """

    table: fx.Node
    call: fx.Node
    grad: fx.Node | None
    batch: Layout
    over: tuple[str, ...]  # the axes that cut the tokens

    @property
    def strategies(self) -> Iterator[tuple[fx.Node, Strategy]]:
        """The strategies of both calls where rows are exchanged: sharded by the columns."""
        columns = cut(len(value(self.call).shape) - 1)
        yield self.call, Strategy((COLUMNS, R), (columns,))
        if self.grad is not None:
            yield self.grad, Strategy((columns, R), (COLUMNS,))


def with_travelling_rows(
    plan: Plan, graph: Graph, mesh: Mesh, pinned: set[str], data: list[str], shard: list[str]
) -> Plan:
    """The plan in which rows of tables are sent where this takes less time.

    Tables that the user ``pinned`` stay as they are. ``data`` are the axes that shard the batch,
    ``shard`` the axes over which parameters are stored sharded.
    """
    params, values, notes = dict(plan.params), dict(plan.values), [*plan.notes]
    free = {name: cuts for name, cuts in params.items() if name not in pinned}
    exchanged = {}
    if len(shard) == 1 and plan.gather[shard[0]] == "use":
        exchanged = _exchanged(graph, free, plan.inputs, shard[0], mesh)
    for name, planned in exchanged.items():
        if all(plan.planned(each) is None for each in planned):
            params[name] = free[name] = {**free[name], shard[0]: COLUMNS}
            values |= {each: {shard[0]: one} for each, one in planned.items()}
            notes.append(f"{name}: its rows travel, which takes less time than the whole")
    axes = [axis for axis in reversed(data) if axis != MICROBATCH_AXIS]
    sums = (
        mesh.size(MICROBATCH_AXIS)
        if MICROBATCH_AXIS in mesh.names and plan.reduce == "microbatch"
        else 1
    )
    for name, gathered in _gathered(graph, free, plan.inputs, axes, mesh, sums).items():
        if plan.planned(name) is None:
            values[name] = {**values.get(name, {}), **gathered}
            notes.append(f"{name}: of gathered rows, which takes less time than to sum it")
    return plan.changed(params=params, values=values, notes=tuple(dict.fromkeys(notes)))


def _exchanged(
    graph: Graph, params: Mapping[str, Cuts], inputs: Mapping[str, Cuts], axis: str, mesh: Mesh
) -> dict[str, dict[str, PlannedLayout]]:
    """The tables among ``params`` whose rows an all-to-all over ``axis`` exchanges in less time.

    Per table the plan's entries, on this axis, for the table and its calls.
    """
    tables = graph.params
    found = {name: _lookup(graph, tables, name, inputs, axis) for name in params}
    better = {
        name: one
        for name, one in found.items()
        if one and all(test(one, params[name], axis, mesh) for test in (_cut_free, _faster))
    }
    names = value_names(graph) if better else {}
    return {name: dict(_values(one, name, names)) for name, one in better.items()}


def _gathered(
    graph: Graph,
    params: Mapping[str, Cuts],
    inputs: Mapping[str, Cuts],
    axes: Iterable[str],
    mesh: Mesh,
    sums: int,
) -> dict[str, dict[str, PlannedLayout]]:
    """The tables among ``params`` for which all-gathering the rows' gradients takes less time than
    reducing the table's gradient, over some of ``axes``.

    Per gradient the plan's entry by axis. ``sums``: how often per step the gradient is reduced.
    """
    found: dict[fx.Node, dict[str, PlannedLayout]] = {}
    tables = graph.params
    for name, cuts in params.items():
        for axis in (each for each in axes if cuts.get(each) != COLUMNS):
            one = _lookup(graph, tables, name, inputs, axis)
            if one is not None and one.grad is not None:
                over = found.get(one.grad, {})
                if _fewer(one, cuts, over, axis, mesh, sums):
                    found[one.grad] = {**over, axis: PlannedLayout(R, (R, R))}
    names = value_names(graph) if found else {}
    return {names[grad]: planned for grad, planned in found.items()}


def _values(
    lookup: Lookup, name: str, names: Mapping[fx.Node, str]
) -> Iterator[tuple[str, PlannedLayout]]:
    yield name, PlannedLayout(COLUMNS)
    for node, strategy in lookup.strategies:
        then = lookup.batch if node is lookup.call else None
        yield names[node], PlannedLayout(strategy.outs[0], strategy.ins, then)


def _lookup(
    graph: Graph, tables: Mapping[str, fx.Node], name: str, inputs: Mapping[str, Cuts], axis: str
) -> Lookup | None:
    """The look-up of a table, if it is the table's only reader and ``axis`` shards its tokens.

    None for any other parameter.
    """
    table, grad = tables[name], graph.grads.get(name)
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
    """The value behind reshapes and casts of ``tokens`` that keep the batch dim."""
    while tokens.op == "call_function" and len(made_of := tensor_args(tokens)) == 1:
        if value(made_of[0]).shape[:1] != value(tokens).shape[:1]:
            break
        tokens = made_of[0]
    return tokens


def _cut_free(lookup: Lookup, cuts: Cuts, axis: str, mesh: Mesh) -> bool:
    """Whether ``axis`` can shard the table's columns: no other axis does, and rules allow it."""
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
    """Whether the all-to-alls of rows take less time than the table's all-gather and its gradient's
    reduce-scatter. Tokens cost nothing: every rank is given the whole batch.
    """
    num, ways = mesh.size(axis), 1 if lookup.grad is None else 2
    turns = {each: mesh.size(each) for each in {*lookup.over, *(MICROBATCH_AXIS,)} & {*mesh.names}}
    pieces = prod(turns.values())
    table = _bytes(lookup.table) / prod(mesh.size(a) for a in cuts if a != axis)
    gather_s = collective_seconds("all_gather", table / num, mesh, axis)
    reduce_s = collective_seconds("reduce_scatter", table, mesh, axis) * (ways - 1)
    rows_s = collective_seconds("all_to_all", _bytes(lookup.call) / pieces, mesh, axis) * ways
    return rows_s < gather_s + reduce_s


def _fewer(
    lookup: Lookup, cuts: Cuts, whole: Iterable[str], axis: str, mesh: Mesh, sums: int
) -> bool:
    """Whether all-gathering the rows' gradients takes less time than reducing the table's gradient.

    The reduction's start is not counted: it shares a bucket with other gradients. Over the axes in
    ``whole`` the rows are gathered already.
    """
    turns = {MICROBATCH_AXIS} & {*mesh.names}
    pieces = prod(mesh.size(a) for a in {*lookup.over, *turns} - {*whole})
    gather_s = collective_seconds("all_gather", _bytes(lookup.call) / pieces, mesh, axis)
    num_bytes = _bytes(lookup.table) / prod(mesh.size(a) for a in cuts if a != axis)
    kind = "reduce_scatter" if axis in cuts else "all_reduce"
    start_s, sum_s = (collective_seconds(kind, size, mesh, axis) for size in (0.0, num_bytes))
    return gather_s * prod(mesh.size(a) for a in turns) < (sum_s - start_s) * sums


def _bytes(node: fx.Node) -> float:
    return float(prod(value(node).shape) * value(node).dtype.itemsize)
