"""The strategy of a batch norm whose statistics each rank takes from its own samples.

This is DDP's behaviour, in contrast to SyncBatchNorm's statistics of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from partc.graph import results_of, tensor_args
from partc.plan.sharding import Layout, R, U, cut
from partc.rules.strategy import Strategy

aten = torch.ops.aten
VARIANT = "local"  # its running statistics, marked U, keep the first rank's value alone
FORWARD = aten._native_batch_norm_legit_functional.default
_PLAIN = aten.native_batch_norm.default  # the same where a module keeps no running statistics
BACKWARD = aten.native_batch_norm_backward.default


def takes_statistics(node: fx.Node) -> bool:
    """Whether a call is a batch norm that normalises with the statistics of its operand."""
    return node.target is FORWARD or (node.target is _PLAIN and bool(node.args[5]))


def local_batch_norm(node: fx.Node, arriving: Layout) -> Strategy | None:
    """The strategy of a batch norm whose operand is sharded by sample; None for other calls."""
    forward = takes_statistics(node)
    if not (forward or node.target is BACKWARD) or arriving != cut(0):
        return None
    images = 1 if forward else 2  # operands with a batch: x, or d_y and x
    ins = tuple(cut(0) if i < images else R for i in range(len(tensor_args(node))))
    # y, mean, rstd, new running mean and variance; or d_x, d_weight, d_bias
    outs = (cut(0), R, R, U, U) if forward else (cut(0), U, U)
    return Strategy(ins, outs[: len(results_of(node))], VARIANT)


def fits_locally(node: fx.Node, ins: Sequence[Layout], outs: Sequence[Layout | None]) -> bool:
    """Whether a call has the layouts of a batch norm with local statistics.

    ``outs`` has None for results that no node reads. The layout of a running statistic is R here,
    although each rank has a value of its own: `collectives.keep_first` zeroes all but the first
    rank's afterwards.
    """
    local = local_batch_norm(node, ins[0])
    if local is None or local.ins != tuple(ins):
        return False
    made = [R if keeps_first(node, local, i) else out for i, out in enumerate(local.outs)]
    return all(out in (None, mine) for out, mine in zip(outs, made, strict=True))


def keeps_first(node: fx.Node, strategy: Strategy | None, result: int) -> bool:
    """Whether a result is a running statistic, which is zeroed on all ranks but the first.

    The sum over the ranks then is the first rank's value, as DDP keeps the first rank's buffers.
    """
    return (
        strategy is not None
        and strategy.variant == VARIANT
        and node.target is FORWARD
        and strategy.outs[result] == U
    )
