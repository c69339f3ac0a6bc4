"""Write the gradient of a cross entropy by its logits as one call, which may overwrite the
log-probabilities: of three tensors as large as the logits one is left.

    nll_loss_backward(d, log_p, target) -> g; _log_softmax_backward_data(g, log_p)
    = d exp(log_p), less d at each row's target; nothing in rows that do not count

Of a vocabulary that is cut each rank has some columns, and knows this of them without the others:
what torch's two calls would sum over a row is -d, or 0 where the row does not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partc.graph import Graph, fake_of, ops, set_fake, set_value, value

aten = torch.ops.aten
SUM = 2  # torch's code for a loss's reduction; means are open by now


def fuse_loss(graph: Graph) -> None:
    """Join the two backward calls."""
    for node in list(graph.calls()):
        if node.target is aten._log_softmax_backward_data.default:
            _fuse(graph, node)


def _fuse(graph: Graph, node: fx.Node) -> None:
    scores, log_p, dim, dtype = node.args
    assert isinstance(scores, fx.Node)
    assert isinstance(log_p, fx.Node)
    if not _is_picked(scores, log_p) or len(scores.users) > 1:
        return
    if fake_of(log_p).dim() != 2 or dim not in (1, -1) or fake_of(log_p).dtype != dtype:
        return
    d_loss, _, target, _, _, ignored, _ = scores.args
    operands = (d_loss, log_p, target, target, ignored)
    with graph.fx.inserting_before(node):
        joined = graph.fx.call_function(ops.cross_entropy_grad, operands)
    set_value(joined, value(node))
    set_fake(joined, fake_of(node))
    node.replace_all_uses_with(joined)
    graph.fx.erase_node(node)
    graph.fx.erase_node(scores)


def _is_picked(scores: fx.Node, log_p: Any) -> bool:
    """Whether a gradient has something at one place of each row only."""
    if scores.target is not aten.nll_loss_backward.default:
        return False
    _, picked_from, _, weight, reduction, *_ = scores.args
    return bool(picked_from is log_p and weight is None and reduction == SUM)
