"""Microbatches as a mesh axis that runs in time: the same rules that cut a batch over ranks cut it
over turns.

Along the axis ``mb`` inputs are cut on their batch, parameters are whole, and what is summed over
it is accumulated. Values that follow from the inputs alone exist whole as well, since a rank has
its whole batch from the start; any other value that would need all microbatches at once is
refused.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from partc.errors import PlanError
from partc.graph import Graph, collectives, op_word, picked, shape_of, update, value
from partc.graph.graph_edits import call_before
from partc.passes.canonical.open_means import NLL
from partc.plan.mesh import MICROBATCH_AXIS

aten = torch.ops.aten


def check_microbatches(local: Graph) -> None:
    """PlanError if a value in the middle of the step needs all microbatches at once."""
    for node in local.calls():
        if node.target in collectives.COLLECTIVES and node.kwargs["axis"] == MICROBATCH_AXIS:
            known = value(node)
            line = known.source.partition(": ")[0]
            raise PlanError(
                where=f"{known.module or 'loss'} ({line})" if line else known.module or "loss",
                what=f"{known.name or node.name} needs the whole batch, not one microbatch",
                why=f"it would take an {node.target.__name__} over microbatches, which run one "
                "after the other",
                do="Use microbatches=1, or change this line to look at each sample by itself.",
            )


def count_targets(graph: Graph) -> None:
    """Count what a loss averages over from its targets alone, so that it is known from the start.

    ``nll_loss_forward`` gives the weight of its targets beside the loss, and so only once the
    scores are there.
    """
    for node in list(graph.calls()):
        if node.target is operator.getitem and picked(node)[1] == 1:
            call = picked(node)[0]
            if call.target in NLL:
                # names of other calls, by which plans know them, must not be counted on
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
