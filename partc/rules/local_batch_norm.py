"""How a batch normalisation is cut where each rank takes the statistics of its own samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from partc.graph import results_of, tensor_args
from partc.plan.sharding import Layout, R, U, cut
from partc.rules.strategy import Strategy

aten = torch.ops.aten
VARIANT = "local"  # result sums marked U are this rank's own: only the first rank's count
FORWARD = aten._native_batch_norm_legit_functional.default
BACKWARD = aten.native_batch_norm_backward.default


def local_batch_norm(node: fx.Node, arriving: Layout) -> Strategy | None:
    """The strategy for a batch normalisation whose operand arrives cut along the batch; None for
    other calls.
    """
    if node.target not in (FORWARD, BACKWARD) or arriving != cut(0):
        return None
    images = 1 if node.target is FORWARD else 2  # operands with a batch: x, or d_y and x
    ins = tuple(cut(0) if i < images else R for i in range(len(tensor_args(node))))
    # y, mean, rstd, new running mean and variance; or d_x, d_weight, d_bias
    outs = (cut(0), R, R, U, U) if node.target is FORWARD else (cut(0), U, U)
    return Strategy(ins, outs[: len(results_of(node))], VARIANT)


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
        and node.target is FORWARD
        and strategy.outs[result] == U
    )
