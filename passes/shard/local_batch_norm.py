"""``batch_norm="local"``: each rank normalises with the statistics of its own shard of the batch,
as DDP does.

The running statistics of the axis's first rank are kept, as DDP broadcasts buffers from rank 0.
"""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from partc.errors import PlanError
from partc.graph import Graph, tensor_args, value
from partc.graph.ancestors import ancestors
from partc.plan.sharding import Layout, R, cut
from partc.rules import Strategy
from partc.rules.local_batch_norm import (
    BACKWARD,
    FORWARD,
    VARIANT,
    local_batch_norm,
    takes_statistics,
)

# Places of the running mean and variance among the operands of a batch norm, and of the new ones
# among its results.
NEW_MEAN, NEW_VAR = 3, 4
COUNT = "num_batches_tracked"  # torch's name for the buffer that counts how often a batch norm ran


def of_each_microbatch(node: fx.Node, arriving: Layout) -> Strategy | None:
    """The strategy of ``local_batch_norm`` on the microbatch axis: each microbatch in turn updates
    the running statistics.
    """
    local = local_batch_norm(node, arriving)
    if local is None or node.target is not FORWARD:
        return local
    return Strategy(local.ins, (cut(0), R, R, R, R)[: len(local.outs)], VARIANT)


def check_statistics(graph: Graph, ranks: int, microbatches: int) -> None:
    """PlanError if each of the ``ranks`` that share a microbatch has one value per channel only.

    torch refuses to train a batch norm on one value per channel.
    """
    if microbatches > 1:
        check_readers(graph)
    pieces = ranks * microbatches
    of = f"{ranks} pieces of each of " if ranks > 1 else ""
    for node in graph.calls():
        if not takes_statistics(node):
            continue
        known, shape = value(node), value(tensor_args(node)[0]).shape
        if prod(shape) // shape[1] // pieces < 2:
            raise PlanError(
                where=" ".join(filter(None, [known.module, f"({known.source})"])),
                what="BatchNorm has one value per channel, and so no variance",
                why=f"{of}{microbatches} microbatches of {list(shape)} have "
                f"{shape[0] // pieces} sample each",
                do="Take fewer microbatches or data ranks, or a larger batch.",
            )


def check_readers(graph: Graph) -> None:
    """PlanError if anything but batch norms reads what each microbatch in turn updates."""
    counts = [name for name in graph.outputs.buffers if name.rpartition(".")[2] == COUNT]
    norms = [node for node in graph.calls() if node.target is FORWARD]
    modules = {value(node).module for node in norms}
    updated = [o for node in norms for o in node.args[NEW_MEAN : NEW_VAR + 1]]
    updated += [u for node in norms for u in node.users if u.args[1] in (NEW_MEAN, NEW_VAR)]
    for name in counts:
        new, old = graph.outputs.buffers[name], graph.buffers[name]
        if value(new).module in modules:
            updated += [old, *ancestors(new)]
    for statistic in updated:
        assert isinstance(statistic, fx.Node)
        for reader in statistic.users:
            if reader.target is torch.ops.aten._to_copy.default:
                updated.append(reader)  # to the dtype of the buffer
            allowed = reader.op == "output" or reader.target in (FORWARD, BACKWARD)
            if not allowed and reader not in updated:
                raise _read_between(reader)


def _read_between(reader: fx.Node) -> PlanError:
    known = value(reader)
    return PlanError(
        where=f"{known.module or 'the step'} ({known.source})",
        what="it reads what a batch norm keeps: its running statistics, or how often it ran",
        why="each microbatch in turn updates that, so that the step has no one value of it",
        do="Use microbatches=1, or a buffer of your own.",
    )


def has_batch_norm(graph: Graph) -> bool:
    """Whether a graph has a batch norm in training mode."""
    return any(takes_statistics(node) for node in graph.calls())
