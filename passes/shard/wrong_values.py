"""Entries of ``[values]`` that no tensor can have: dims that are not there, or do not divide."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from partc.amounts import counted
from partc.errors import PlanError
from partc.graph import Graph, results_of, tensor_args, value
from partc.passes.shard.value_names import value_names
from partc.plan import Plan, fits
from partc.plan.mesh import Mesh
from partc.plan.plan_values import PlannedLayout
from partc.plan.sharding import Layout, Sharding

Side = tuple[str, tuple[int, ...], Layout]  # what it is, its shape, and how it is to lie


def check_values(plan: Plan, graph: Graph, mesh: Mesh) -> None:
    """PlanError for an entry of ``[values]`` with a dim that its tensor has not, or that the axis
    does not divide, or with another number of operands than its call.
    """
    if not plan.values or plan.of_another:
        return  # entries of another program, whose batch may have other rows, are left out
    params = ((node, name) for name, node in graph.params.items())
    for node, name in (*value_names(graph).items(), *params):
        for axis, planned in (plan.planned(name) or {}).items():
            entry = _entry(plan, name)
            for side in _sides(node, entry, planned):
                _check(side, entry, axis, mesh)


def _entry(plan: Plan, name: str) -> str:
    """The entry that speaks of a name, as messages call it: a pattern, and what it fits."""
    if name in plan.values:
        return repr(name)
    pattern = next(each for each in plan.values if fits(each, name))
    return f"{pattern!r}, which fits {name!r}"


def _sides(node: fx.Node, entry: str, planned: PlannedLayout) -> Iterator[Side]:
    """The tensors of a call, or a parameter, of which an entry says how they lie."""
    operands = tensor_args(node)
    if planned.ins is not None and len(planned.ins) != len(operands):
        raise _wrong(
            entry, f"it names {counted(len(planned.ins), 'operand')}", f"it has {len(operands)}",
            "Write a layout for each of them before the arrow, or none and no arrow.",
        )  # fmt: skip
    for i, (operand, layout) in enumerate(zip(operands, planned.ins or (), strict=False)):
        yield f"operand {i}", value(operand).shape, layout
    fakes = results_of(node) if node.op == "call_function" else []
    shape = value(node).shape if not fakes or fakes[0] is None else tuple(fakes[0].shape)
    for layout in (planned.out, *([planned.then] if planned.then else [])):
        yield "it" if planned.ins is None else "the result", shape, layout


def _check(side: Side, entry: str, axis: str, mesh: Mesh) -> None:
    what, shape, layout = side
    if layout.kind != "cut":
        return
    if layout.dim >= len(shape):
        raise _wrong(
            entry, f"{what} has no dim {layout.dim}", f"its shape is {list(shape)}",
            f"Dims are counted from 0 to {len(shape) - 1}: write one of these, or drop the entry."
            if shape else 'Write "whole", or drop the entry.',
        )  # fmt: skip
    if Sharding.of({axis: layout}, mesh).local_shape(shape, mesh) is None:
        raise _wrong(
            entry, f"{what} cannot be cut along dim {layout.dim} by {axis}={mesh.size(axis)}",
            f"its shape is {list(shape)}, and {shape[layout.dim]} is not a multiple of "
            f"{mesh.size(axis) * layout.outer}",
            "Write another dim, or drop the entry.",
        )  # fmt: skip


def _wrong(entry: str, what: str, why: str, do: str) -> PlanError:
    return PlanError(where=f"plan, values, {entry}", what=what, why=why, do=do)
