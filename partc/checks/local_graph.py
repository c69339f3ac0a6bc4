"""The static checks of a local graph, which ``compile`` runs on every program that it returns.

The checks do not trust the passes that made the graph. Shapes are derived again on fake tensors,
layouts are checked against the rules call by call, collectives against their definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from partc.checks.layouts import check_layouts
from partc.checks.narrow_sums import check_narrow_sums
from partc.checks.pieces import check_turns
from partc.cost.storage import replay
from partc.errors import CheckError
from partc.graph import Graph, collectives, fake_of, typed, value
from partc.graph.places import named_place
from partc.plan.mesh import Mesh
from partc.plan.sharding import REPLICATED
from partc.rules.table import name_of


def check(graph: Graph, *, scheduled: bool = True) -> None:
    """Run all checks of a local graph of one stage; CheckError at the first that fails.

    ``scheduled``: collectives already have their waits, which are then checked too.
    """
    check_order(graph)
    check_shapes(graph)
    check_layouts(graph)
    check_narrow_sums(graph)
    check_turns(graph)
    check_outputs(graph)
    if scheduled:
        check_waits(graph)


def check_order(graph: Graph) -> None:
    """Every value is defined before it is used, and no call writes into its operands."""
    seen: set[fx.Node] = set()
    for node in graph.fx.nodes:
        for operand in node.all_input_nodes:
            if operand not in seen:
                raise CheckError(
                    where=named_place(node) if node.op != "output" else "output",
                    what=f"it reads {operand.name}, which is not there yet",
                    why="a value must be defined before it is used",
                    do="Move the reader behind the definition.",
                )
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise CheckError(
                where=named_place(node),
                what=f"{name_of(node.target)} writes into an operand",
                why="that memory may be in flight or saved for the backward",
                do="Use the op without the trailing underscore.",
            )
        seen.add(node)


def check_shapes(graph: Graph) -> None:
    """Check every tensor's shape and dtype.

    Three must agree: derived again on fakes, of the node's own fake, and the shard of the noted
    whole shape.
    """
    ran = replay(graph)
    for node in graph.fx.nodes:
        if node.op in ("placeholder", "call_function") and isinstance(fake_of(node), Tensor):
            _check_shape(node, ran.results[node], graph.mesh)


def _check_shape(node: fx.Node, result: Tensor, mesh: Mesh) -> None:
    """Check one tensor; ``result`` is derived again on fakes."""
    known = value(node)
    promised = known.sharding.local_shape(known.shape, mesh)
    shapes = {"promises": promised, "is noted as": tuple(fake_of(node).shape)}
    for word, shape in shapes.items():
        if shape != tuple(result.shape):
            raise CheckError(
                where=named_place(node),
                what=f"one rank gets {list(result.shape)}, but {typed(node)} {word} {_text(shape)}",
                why=f"mesh {mesh}",
                do="Correct the sharding, or the call's sizes.",
            )
    if not result.dtype == known.dtype == fake_of(node).dtype:
        raise CheckError(
            where=named_place(node),
            what=f"it gives {result.dtype}, but is noted as {known.dtype}",
            why="dtypes of operands decide that of the result",
            do="Cast an operand, or correct the note.",
        )


def _text(shape: tuple[int, ...] | None) -> str:
    return "no even pieces" if shape is None else str(list(shape))


def check_outputs(graph: Graph) -> None:
    """Check that the loss is replicated, and that gradients and buffers lie as their tensors do."""
    if graph.loss is not None and value(graph.loss).sharding != REPLICATED:
        raise CheckError(
            where=named_place(graph.loss),
            what=f"the loss is {typed(graph.loss)}",
            why="every rank must see the whole loss",
            do="Reduce it over the axes named in the type.",
        )
    _check_same("gradient", graph.grads, graph.params)
    _check_same("new value", graph.outputs.buffers, graph.buffers)


def _check_same(what: str, made: Mapping[str, fx.Node], stored: Mapping[str, fx.Node]) -> None:
    """Check that a result has the type and sharding of the parameter or buffer of its name."""
    for name, node in made.items():
        if name not in stored:
            raise CheckError(
                where=name, what=f"there is a {what} but no such tensor", why="", do="Rename it."
            )
        if typed(node) != typed(stored[name]):
            raise CheckError(
                where=f"{name}, {node.name}",
                what=f"its {what} is {typed(node)}, it is stored as {typed(stored[name])}",
                why="the optimizer works on this rank's piece",
                do="Reduce over exactly the axes in braces, and cut along the stored ones.",
            )


def check_waits(graph: Graph) -> None:
    """Check that every collective has one wait, and that its result is read from that wait only."""
    for node in graph.calls():
        starts = node.target in collectives.COLLECTIVES
        waits = [u for u in node.users if u.target is collectives.wait]
        if starts and len(waits) != 1:
            raise CheckError(
                where=named_place(node),
                what=f"{_name(node)} over {node.kwargs['axis']} is waited for {len(waits)} times",
                why="its result is ready after one wait, and not before",
                do="Place one wait before the first reader.",
            )
        early = [u.name for u in node.users if u not in waits]
        if starts and early:
            raise CheckError(
                where=named_place(node),
                what=f"{early[0]} reads the result of {_name(node)} without a wait",
                why="the transfer may still be under way",
                do="Let it read the wait's result.",
            )
        if node.target is collectives.wait and not _starts(node.args[0]):
            raise CheckError(
                where=named_place(node),
                what=f"it waits for {node.args[0]}, which starts nothing",
                why="only collectives are waited for",
                do="Drop the wait.",
            )


def _starts(operand: Any) -> bool:
    return isinstance(operand, fx.Node) and operand.target in collectives.COLLECTIVES


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
