"""Microbatches as a mesh axis in time: the rules that shard a batch over ranks also split it into
microbatches, which one rank computes one after the other.

Along the axis ``mb`` the inputs are sharded on their batch dim, parameters are replicated, and a
partial sum (``{U:mb}``) is accumulated. A value that depends on the inputs alone is also at hand
for the whole batch, as a rank has its whole batch from the start. Any other value that needs all
microbatches at once is refused.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from partc.errors import PlanError
from partc.graph import Graph, collectives, op_word, picked, shape_of, update, value
from partc.graph.graph_edits import call_before
from partc.passes.canonical.open_means import NLL
from partc.passes.shard.reshard import reshard_steps
from partc.plan.mesh import MICROBATCH_AXIS, Mesh
from partc.plan.sharding import R, Sharding, U

aten = torch.ops.aten


def check_microbatches(local: Graph) -> None:
    """PlanError if a call would need a collective over microbatches: all of them at once."""
    for node in local.calls():
        if node.target in collectives.COLLECTIVES and node.kwargs["axis"] == MICROBATCH_AXIS:
            known = value(node)
            line = known.source.partition(": ")[0]
            raise PlanError(
                where=f"{known.module or 'the step'} ({line})"
                if line
                else known.module or "the step",
                what=f"{known.name or node.name} needs the whole batch, not one microbatch",
                why=f"it would take an {node.target.__name__} over microbatches, which run one "
                "after the other",
                do="Use microbatches=1, or change this line to look at each sample by itself.",
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
