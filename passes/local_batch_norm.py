"""``batch_norm="local"``: each rank normalises with the statistics of its own piece of the batch,
as DDP does.

The running statistics kept are those of the first rank of the axis (DDP broadcasts them from
there).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from partc.errors import PlanError
from partc.graph import Graph, results_of, tensor_args, value
from partc.rules import Strategy
from partc.sharding import Layout, R, U, cut

aten = torch.ops.aten
VARIANT = "local"  # result sums marked U are this rank's own: only the first rank's count
_FORWARD = aten._native_batch_norm_legit_functional.default
_BACKWARD = aten.native_batch_norm_backward.default


def local_batch_norm(node: fx.Node, arriving: Layout) -> Strategy | None:
    """The strategy for a batch normalisation whose operand arrives cut along the batch; None for
    other calls.
    """
    if node.target not in (_FORWARD, _BACKWARD) or arriving != cut(0):
        return None
    images = 1 if node.target is _FORWARD else 2  # operands with a batch: x, or d_y and x
    ins = tuple(cut(0) if i < images else R for i in range(len(tensor_args(node))))
    # y, mean, rstd, new running mean and variance; or d_x, d_weight, d_bias
    outs = (cut(0), R, R, U, U) if node.target is _FORWARD else (cut(0), U, U)
    return Strategy(ins, outs[: len(results_of(node))], VARIANT)


def of_each_microbatch(node: fx.Node, arriving: Layout) -> Strategy | None:
    """As ``local_batch_norm`` along microbatches: each updates the running statistics in turn."""
    local = local_batch_norm(node, arriving)
    if local is None or node.target is not _FORWARD:
        return local
    return Strategy(local.ins, (cut(0), R, R, R, R)[: len(local.outs)], VARIANT)


def check_statistics(graph: Graph, ranks: int, microbatches: int) -> None:
    """PlanError where one of the ``ranks`` that share a microbatch has one value per channel, which
    torch refuses to train with.
    """
    pieces = ranks * microbatches
    of = f"{ranks} pieces of each of " if ranks > 1 else ""
    for node in graph.calls():
        if node.target is not _FORWARD:
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
    return any(node.target is _FORWARD for node in graph.calls())


def fits_locally(node: fx.Node, ins: Sequence[Layout], outs: Sequence[Layout | None]) -> bool:
    """Whether a call lies as local statistics have it; None for results that nothing reads.

    The running statistics are each rank's own until all but the first rank's are zeroed.
    """
    local = local_batch_norm(node, ins[0])
    if local is None or local.ins != tuple(ins):
        return False
    made = [R if keeps_first(node, local, i) else out for i, out in enumerate(local.outs)]
    return all(out in (None, mine) for out, mine in zip(outs, made, strict=True))


def keeps_first(node: fx.Node, strategy: Strategy | None, result: int) -> bool:
    """Whether this result has to be zeroed on all ranks but the first, so that the sum is the
    first rank's.
    """
    return (
        strategy is not None
        and strategy.variant == VARIANT
        and node.target is _FORWARD
        and strategy.outs[result] == U
    )
