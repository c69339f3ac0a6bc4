"""Microbatches as a mesh axis in time: the rules that shard a batch over ranks also split it into
microbatches, which one rank computes one after the other.

Along the axis ``mb`` the inputs are sharded on their batch dim, parameters are replicated, and a
partial sum (``{U:mb}``) is accumulated. A value that depends on the inputs alone is also at hand
for the whole batch, as a rank has its whole batch from the start. Any other value that needs all
microbatches at once is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from partc.errors import PlanError
from partc.graph import (
    Graph,
    collectives,
    is_backward,
    op_word,
    picked,
    results_of,
    shape_of,
    tensor_args,
    update,
    value,
)
from partc.graph.graph_edits import call_before
from partc.passes.canonical.open_means import NLL
from partc.passes.shard.reshard import reshard_steps
from partc.plan.mesh import MICROBATCH_AXIS, Mesh
from partc.plan.sharding import Layout, R, Sharding, U
from partc.rules import Strategy, strategies_for

aten = torch.ops.aten


class WholeBatchError(PlanError):
    """The step needs the whole batch at once, so that it cannot be computed in microbatches."""


def check_microbatches(local: Graph) -> None:
    """PlanError if a call would need a collective over microbatches: all of them at once."""
    for node in local.calls():
        if node.target in collectives.COLLECTIVES and node.kwargs["axis"] == MICROBATCH_AXIS:
            name = value(node).name or node.name
            if is_backward(node) and node.target is collectives.all_reduce:
                raise _no_sum(_place(node), name)
            buffers = [n for n, new in local.outputs.buffers.items() if new is node]
            if buffers:
                raise _whole_buffer(_place(node), buffers[0])
            raise _whole_batch(node, _reader(node), name)


def _place(node: fx.Node) -> str:
    """The module and the line of a call."""
    known = value(node)
    line = known.source.partition(": ")[0]
    return f"{known.module or 'the step'} ({line})" if line else known.module or "the step"


def _reader(node: fx.Node) -> fx.Node:
    """The first call of the forward that reads what a collective gives; itself if none does."""
    found = [node]
    for each in found:
        if (
            not is_backward(each)
            and each.target not in collectives.COLLECTIVES
            and value(each).source
        ):
            return each
        found += [user for user in each.users if user.op == "call_function" and user not in found]
    return node


def _whole_batch(node: fx.Node, reader: fx.Node, name: str) -> WholeBatchError:
    """The error for a line that reads ``name`` of all microbatches, by the collective ``node``."""
    what, made = "this line", f"{name}, of {_place(node)},"
    if reader is node:
        what = name
    if _place(reader) == _place(node):
        made = name
    return WholeBatchError(
        where=_place(reader),
        what=f"{what} needs the whole batch, not one microbatch",
        why=f"it would take an {node.target.__name__} of {made} over microbatches, which "  # type: ignore[union-attr]
        "run one after the other",
        do="Use microbatches=1, or change this line to look at each sample by itself; of "
        "what is only returned beside the loss, return its sums and go on with these "
        "behind the step.",
    )


def _whole_buffer(where: str, buffer: str) -> WholeBatchError:
    """The error for a buffer that gets what all microbatches give together."""
    return WholeBatchError(
        where=where,
        what=f"the new value of buffer {buffer} needs the whole batch, not one microbatch",
        why="microbatches run one after the other, and programs update no buffer behind the last",
        do="Use microbatches=1, or return beside the loss what the buffer is made of and update "
        "the buffer behind the step.",
    )


def _no_sum(where: str, name: str) -> PlanError:
    """The error for a backward that needs the gradient of all microbatches, as no sum of parts.

    A value that is made of weights alone is the same in each microbatch, so its gradient is a sum
    over them. Most ops pass parts of a sum on as they come; some do not.
    """
    return WholeBatchError(
        where=where,
        what=f"the backward of this line ({name}) needs the gradient of all microbatches at once",
        why="it computes with the sum over microbatches, not with the part that each of them "
        "brings, and programs have no backward behind the last microbatch",
        do="Use microbatches=1, or another form of this line: torch's orthogonal parametrization, "
        "for example, has orthogonal_map='householder' and 'cayley'.",
    )


def count_targets(graph: Graph) -> None:
    """Compute the number of targets that a mean loss divides by from the targets alone, in place.

    ``nll_loss_forward`` returns that number beside the loss, too late: each microbatch's gradient
    is divided by the count of the whole batch.
    """
    for node in list(graph.calls()):
        if node.target is operator.getitem and picked(node)[1] == 1:
            call = picked(node)[0]
            if call.target in NLL:
                # ``value_names`` numbers the calls of one name: the new calls have a name of their
                # own, so that a plan's names for the other calls stay valid.
                update(node, decomposed_from=op_word(call.target))
                node.replace_all_uses_with(_count(call, node))
                graph.fx.erase_node(node)


def _count(call: fx.Node, known: fx.Node) -> fx.Node:
    """The number of targets that are not ignored, or the sum of their classes' weights."""
    _, targets, weight, _, ignored = call.args
    valid = call_before(call, aten.ne.Scalar, targets, ignored)
    if weight is None:
        each = call_before(call, aten._to_copy.default, valid, dtype=value(known).dtype)
    else:
        safe = call_before(call, aten.mul.Tensor, targets, valid)
        chosen = call_before(call, aten.index.Tensor, weight, [safe])
        each = call_before(call, aten.mul.Tensor, chosen, valid)
    dims = list(range(len(shape_of(each))))
    return call_before(call, aten.sum.dim_IntList, each, dims)


def for_all_microbatches(
    node: fx.Node, chosen: Mapping[str, Strategy], mesh: Mesh
) -> dict[str, Strategy]:
    """The strategies by axis of a call of input-only values for all microbatches at once.

    Operands lie as a rank has its rows of all microbatches: ``f32[(2 4@dp)]`` where one microbatch
    has ``f32[8@mb+dp]``. Where the call's rule does not allow that, every rank makes the whole.
    """
    found: dict[str, Strategy] = {}
    for axis, usual in chosen.items():
        operands = zip(tensor_args(node), usual.ins, strict=True)
        ins = tuple(_of_all(operand, axis, layout, mesh) for operand, layout in operands)
        seen = [(i, layout) for i, layout in enumerate(ins) if layout.kind == "cut"]
        options = [usual, *strategies_for(node, mesh.size(axis), seen)]
        fitting = [s for s in options if (s.ins, s.variant) == (ins, usual.variant)]
        if axis != MICROBATCH_AXIS and not fitting:
            return {}
        if axis != MICROBATCH_AXIS:
            found[axis] = fitting[0]
    return found if _divide(node, found, mesh) else {}


def _of_all(operand: fx.Node, axis: str, layout: Layout, mesh: Mesh) -> Layout:
    """The layout on an axis of a rank's rows of all microbatches; ``layout``: of one."""
    own = value(operand).sharding
    in_all = own.without([MICROBATCH_AXIS], mesh)
    return in_all.on(axis) if own.on(axis) == layout else layout


def _divide(node: fx.Node, chosen: Mapping[str, Strategy], mesh: Mesh) -> bool:
    """Whether the axes divide all operands and results."""
    results = [fake for fake in results_of(node) if fake is not None]
    shapes = [value(operand).shape for operand in tensor_args(node)]
    shapes += [tuple(fake.shape) for fake in results]
    sides = {axis: (*s.ins, *s.outs) for axis, s in chosen.items()}
    for number, shape in enumerate(shapes):
        layouts = {axis: side[number] for axis, side in sides.items()}
        if Sharding.of(layouts, mesh).local_shape(shape, mesh) is None:
            return False
    return True


_SUMS = (collectives.all_reduce, collectives.reduce_scatter, collectives.all_to_all)


def until_last(have: Sharding, want: Sharding, mesh: Mesh) -> Sharding:
    """The sharding in which a gradient accumulates if ranks reduce once, after the last microbatch.

    If resharding to ``want`` takes other collectives than sums, each microbatch does those.
    """
    sums = have.with_(MICROBATCH_AXIS, R, mesh)
    if all(step.target in _SUMS for step in reshard_steps(sums, want, mesh)):
        return have
    waits = [axis for axis in mesh.names if have.on(axis) == U]
    return Sharding.of({**dict(want.layouts), **dict.fromkeys(waits, U)}, mesh)


def in_pieces(have: Sharding, want: Sharding, mesh: Mesh) -> Sharding:
    """The sharding in which a gradient accumulates if each microbatch reduce-scatters it (ZeRO-2).

    Axes that store the gradient replicated still all-reduce after the last microbatch only.
    """
    waits = [axis for axis in mesh.names if have.on(axis) == U and want.on(axis) == R]
    return Sharding.of({**dict(want.layouts), **dict.fromkeys(waits, U)}, mesh)
