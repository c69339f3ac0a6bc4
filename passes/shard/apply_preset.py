"""Complete a preset (``fsdp+megatron``) or a partial plan to a full plan for one graph and mesh.

A preset joins words by ``+``: one of ``ddp zero1 zero2 fsdp hsdp`` for the data axes, one of
``megatron megatron-sp`` for the tensor axes. Without a word of its kind, data axes get ``ddp`` and
tensor axes ``megatron``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from torch import fx

from partc.amounts import counted
from partc.errors import PlanError, ShardingError
from partc.graph import Graph, value
from partc.passes.shard.cut_weights import cut_weights
from partc.passes.shard.exchange_rows import with_travelling_rows
from partc.passes.shard.idle_axes import idle_axes
from partc.passes.shard.preset_words import (
    axes_of,
    preset_words,
    said_of,
    sharded_axes,
    words_of_auto,
)
from partc.passes.shard.tied_entries import by_first_name
from partc.passes.shard.unknown_names import check_names, named
from partc.passes.shard.value_names import value_names
from partc.passes.shard.wrong_values import check_values
from partc.plan import Cuts, Plan, fits, fold_names, widest_pattern
from partc.plan.batch import DATA_AXES, is_pinned, spread_batch
from partc.plan.decided import check_decided
from partc.plan.mesh import ISLAND, MICROBATCH_AXIS, Mesh, named_axes
from partc.plan.sharding import DTYPE_NAMES, Layout, Sharding, cut

_AUTO_NOTE = (
    "auto: presets chosen by the names of the axes (fsdp, megatron-sp); nothing was searched"
)


def _check_axes(plan: Plan, mesh: Mesh) -> None:
    """PlanError for an entry that names an axis which the mesh does not have."""
    tables = {"params": plan.params, "inputs": plan.inputs, "values": plan.values}
    named = [(f"{word}, {name}", axis) for word, table in tables.items()
             for name, entry in table.items() for axis in entry]  # fmt: skip
    named += [("gather", axis) for axis in plan.gather] + [("scatter", a) for a in plan.scatter]
    for entry, axis in named:
        if axis == ISLAND:
            raise PlanError(
                where=f"plan, {entry}", what=f"nothing is cut over {axis!r}",
                why="each island has whole tensors of its own, and batches of its own",
                do="Leave the entry out; the inputs of compile are the batch of one island.",
            )  # fmt: skip
        if axis not in mesh.names:
            raise PlanError(
                where=f"plan, {entry}",
                what=f"there is no axis {axis!r}",
                why=f"the mesh has {', '.join(n for n in mesh.names if n != MICROBATCH_AXIS)}",
                do="Use one of these names, leave the entry out, or add the axis to the mesh.",
            )


def complete(plan: Plan, graph: Graph, mesh: Mesh, *, rows: bool = True) -> Plan:
    """Fill in the entries that ``plan`` leaves open.

    With ``rows``, embedding rows are exchanged instead of whole tables where this is faster on
    ``mesh``. PlanError for a name that the model does not have, ShardingError for a dim that an
    axis does not divide.
    """
    _check_mesh(plan, mesh)
    check_decided(plan, mesh)
    if plan.of_another:
        plan = _known_entries(plan, graph)
    check_names(plan, graph)
    plan = by_first_name(plan, graph)
    axes = named_axes(mesh, plan.microbatches)
    plan = plan.changed(inputs={n: spread_batch(c, axes) for n, c in plan.inputs.items()})
    _check_axes(plan, axes)
    full = plan.changed(mesh=mesh)
    if plan.preset:
        full = _fill(full, graph, axes, rows=rows)
    _check_cuts(full, graph, axes)
    check_values(full, graph, axes)
    return full.changed(
        params={n: full.stored(n) for n in graph.params},
        inputs={n: full.stored(n, full.inputs) for n in graph.inputs},
        apart=_apart(full, graph),
    )


def _apart(plan: Plan, graph: Graph) -> frozenset[str]:
    """The names that a pattern over the plan's names would fit although the plan does not mean
    them: if it names ``h.0:mul`` alone, then ``h.1:mul``, as ``h.*:mul`` fits both.
    """
    patterns = {widest_pattern(name) for name in plan.values if "*" not in name}
    names = [*value_names(graph).values(), *graph.params] if patterns else []
    return frozenset(n for n in names if widest_pattern(n) in patterns and plan.planned(n) is None)


def _fill(plan: Plan, graph: Graph, mesh: Mesh, *, rows: bool) -> Plan:
    """The plan with the preset's layouts, lifetimes and notes where it has no entries."""
    notes = list(plan.notes)
    if plan.preset == "auto":
        plan = plan.changed(preset=words_of_auto(mesh))
        notes.append(_AUTO_NOTE)
    words = preset_words(plan.preset)
    data, tensor = axes_of(mesh, words, plan)
    shard = sharded_axes(words, data, mesh)
    inputs = {
        name: plan.stored(name, plan.inputs)
        if is_pinned(name, plan)
        else _batch_cut(node, data, mesh)
        for name, node in graph.inputs.items()
    }
    params: dict[str, dict[str, Layout]] = {name: dict(plan.stored(name)) for name in graph.params}
    pinned = {name for name in params if any(fits(p, name) for p in plan.params)}
    said = said_of(words, shard, tensor)
    scatter = {**said["scatter"], **plan.scatter}
    for axis in tensor:
        cuts = cut_weights(graph, mesh, axis, params, pinned, scatter.get(axis))
        for name, layout in cuts.items():
            params[name][axis] = layout
    nodes = graph.params
    # After the tensor axes: a data axis shards the first dim that still divides.
    for axis in shard:
        free = {n: params[n] for n in params if n not in pinned}
        whole: dict[str, Cuts] = {
            n: {} for n, cuts in free.items() if not _shard(cuts, nodes[n], axis, mesh)
        }
        notes += [
            f"{name} stays whole: no dim is a multiple of {axis}={mesh.size(axis)}"
            for name in fold_names(whole, apart=params.keys() - whole.keys())
        ]
    notes += idle_axes(plan, graph, params, inputs, data, tensor, mesh)
    filled = plan.changed(
        params=params,
        inputs=inputs,
        reduce=said.get("reduce", plan.reduce),
        gather={**said["gather"], **plan.gather},
        scatter=scatter,
        notes=tuple(dict.fromkeys(notes)),
    )
    cutting = [axis for axis in data if mesh.size(axis) > 1]
    return with_travelling_rows(filled, graph, mesh, pinned, cutting, shard) if rows else filled


def store_cut(params: Mapping[str, Cuts], graph: Graph, mesh: Mesh, preset: str) -> dict[str, Cuts]:
    """Add to layouts of parameters the sharding along the data axes that ``preset`` stores."""
    data = [axis for axis in mesh.names if axis in DATA_AXES]
    stored, by_name = {name: dict(cuts) for name, cuts in params.items()}, graph.params
    for axis in sharded_axes(preset_words(preset), data, mesh):
        for name, cuts in stored.items():
            _shard(cuts, by_name[name], axis, mesh)
    return dict(stored)


def _batch_cut(node: fx.Node, axes: list[str], mesh: Mesh) -> dict[str, Layout]:
    """Shard dim 0 of an input over the data axes; ShardingError if they do not divide it.

    An input with a batch of 1, or without dims, stays whole.
    """
    known = value(node)
    cuts: dict[str, Layout] = {}
    for axis in axes:
        layouts = {**cuts, axis: cut(0)}
        if known.shape and Sharding.of(layouts, mesh).local_shape(known.shape, mesh):
            cuts = layouts
        elif known.shape and known.shape[0] > 1:
            raise ShardingError(
                where=f"input {known.name}",
                what=f"the batch of {known.shape[0]} cannot be cut by {_told(axis, mesh)}",
                why=f"{known.shape[0]} is not a multiple of the data ranks times the microbatches",
                do="Give a global batch that is (DataLoader(..., drop_last=True) leaves out a "
                "smaller last one), or change the mesh or the microbatches. The plan may say "
                f'otherwise: [inputs] "{known.name}" = {{}} computes it whole on every rank, and '
                "{ batch = 1 } takes dim 1 for the batch.",
            )
    return cuts


def _told(axis: str, mesh: Mesh) -> str:
    """An axis as a user says it: ``dp=2``, or ``microbatches=4``."""
    return f"{'microbatches' if axis == MICROBATCH_AXIS else axis}={mesh.size(axis)}"


def _shard(cuts: dict[str, Layout], node: fx.Node, axis: str, mesh: Mesh) -> bool:
    """Shard a parameter on the first dim that the axis divides; False if there is none."""
    shape = value(node).shape
    for dim in range(len(shape)):
        outer = max((layout.outer for layout in cuts.values() if layout.dim == dim), default=1)
        layouts = {**cuts, axis: cut(dim, outer)}
        if shape[dim] > 1 and Sharding.of(layouts, mesh).local_shape(shape, mesh) is not None:
            cuts[axis] = layouts[axis]
            return True
    return False


def _check_mesh(plan: Plan, mesh: Mesh) -> None:
    if plan.mesh is not None and plan.mesh != mesh:
        raise PlanError(
            where="plan",
            what=f"the plan is for mesh {plan.mesh}, not {mesh}",
            why="its cuts were chosen for those sizes",
            do="Compile for that mesh, or drop [mesh] from the plan.",
        )


def _known_entries(plan: Plan, graph: Graph) -> Plan:
    """The plan of another program of the model, without entries for what this graph lacks."""
    params, inputs, values = (
        {p: entry for p, entry in table.items() if any(fits(p, n) for n in names)}
        for _, table, names in named(plan, graph)
    )
    return plan.changed(params=params, inputs=inputs, values=values)


def _check_cuts(plan: Plan, graph: Graph, mesh: Mesh) -> None:
    inputs = {*graph.inputs.values()}
    for node, cuts in _all_cuts(plan, graph):
        _check_divides(node, cuts, mesh, is_input=node in inputs)


def _all_cuts(plan: Plan, graph: Graph) -> Iterator[tuple[fx.Node, Cuts]]:
    for name, node in graph.params.items():
        yield node, plan.stored(name)
    for name, node in graph.inputs.items():
        yield node, plan.stored(name, plan.inputs)


def _check_divides(node: fx.Node, cuts: Cuts, mesh: Mesh, *, is_input: bool) -> None:
    """ShardingError, with the sizes that would do, where an axis does not divide its dim."""
    known, taken = value(node), {}
    for axis, layout in cuts.items():
        do = "Pad it, or leave it out of the plan."
        if axis == MICROBATCH_AXIS:
            do = "Take as many microbatches as divide the rows of each rank, or other rows."
        num = mesh.size(axis)
        taken[axis] = layout
        typed = f"{DTYPE_NAMES.get(known.dtype, known.dtype)}{list(known.shape)}".replace(" ", "")
        check_has_dim(known.name, typed, len(known.shape), layout)
        if Sharding.of(taken, mesh).local_shape(known.shape, mesh) is None:
            size = known.shape[layout.dim]
            what = f"dim {layout.dim} of {typed} cannot be cut by {axis}={num}"
            if axis == MICROBATCH_AXIS:
                what = f"dim {layout.dim} of {typed}, the batch of all ranks, makes no {num} "
                what += "microbatches on each"
            pieces = prod(mesh.size(a) for a, each in taken.items() if each.dim == layout.dim)
            why = f"{size} is not a multiple of {pieces * layout.outer}"
            could = "microbatches" if axis == MICROBATCH_AXIS else axis
            if layout.outer > 1:
                why += f": {layout.outer} blocks, each in {pieces} pieces"
            else:
                why += f"; {could} could be {_divisors(size * num // pieces)}"
            if is_input:
                do = _for_input(known.name, size, layout) or do
        else:
            continue
        raise ShardingError(where=known.name, what=what, why=why, do=do)


def check_has_dim(name: str, typed: str, num: int, layout: Layout) -> None:
    """ShardingError where a plan cuts a tensor of ``num`` dims along one that it has not."""
    if layout.dim >= num:
        within = f"Write a dim from 0 to {num - 1}, or leave" if num else "Leave"
        raise ShardingError(
            where=name, what=f"{typed} has no dim {layout.dim}",
            why=f"it has {counted(num, 'dim')}", do=f"{within} it out of the plan.",
        )  # fmt: skip


def _for_input(name: str, size: int, layout: Layout) -> str:
    """What helps with an input that is no longer cut as the plan says; empty: what always does."""
    if layout.outer > 1:
        return "Leave the entry out of the plan: the blocks of this shape are then found."
    if size == 1:
        return (
            "Leave the entry out of the plan, so that every rank has it whole; or give a row for "
            f"each sample: {name}.expand(...)."
        )
    return ""


def _divisors(size: int) -> str:
    fits = [str(n) for n in range(2, min(size, 128) + 1) if size % n == 0]
    return ", ".join(fits[:8]) or "nothing above 1"
