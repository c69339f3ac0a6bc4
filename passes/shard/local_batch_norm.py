"""``batch_norm="local"``: each rank normalises with the statistics of its own shard of the batch,
as DDP does.

The running statistics of the axis's first rank are kept, as DDP broadcasts buffers from rank 0.
"""

from __future__ import annotations

from math import prod

from torch import fx

from partc.errors import PlanError
from partc.graph import Graph, tensor_args, value
from partc.plan.sharding import Layout, R, cut
from partc.rules import Strategy
from partc.rules.local_batch_norm import FORWARD, VARIANT, local_batch_norm


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
    pieces = ranks * microbatches
    of = f"{ranks} pieces of each of " if ranks > 1 else ""
    for node in graph.calls():
        if node.target is not FORWARD:
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


def has_batch_norm(graph: Graph) -> bool:
    """Whether a graph has a batch norm in training mode."""
    return any(node.target is FORWARD for node in graph.calls())
