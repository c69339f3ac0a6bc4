"""A loss of the script's own that is a sum over rows: told once, as its gradients depend on ranks.

Each rank sums its own rows, and gradients are the mean over ranks, as under
DistributedDataParallel: with 4 ranks a quarter of what one process has that sums all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.autograd import graph

from partc.program.model.habits import TOLD, once, tell_first

_SUM, _ADDS = 2, ("AddBackward0", "SubBackward0")  # torch's number of reduction="sum"
_RUNS = graph._engine_run_backward.__code__
_WHAT = "a summed loss"


def tell_of_sum(results: Any, shares: int) -> None:
    """Tell of a sum over rows, unless something divides it.

    ``results``: autograd's node of a model's results, whose backward runs. ``shares``: how many
    ranks have rows of their own.
    """
    if shares < 2 or _WHAT in TOLD:
        return
    if any(_leads_to(results, each) for root in _roots() for each in _sums(root)) and once(_WHAT):
        tell_first(
            'partc: the loss is a sum over this rank\'s rows (reduction="sum", or .sum()), and '
            "gradients are the mean over ranks, as under DistributedDataParallel: 1/%d of those of "
            "one process that sums all rows. For the same, loss = loss * model.data_world before "
            "loss.backward(), or a mean over rows.",
            shares,
        )  # fmt: skip


def _roots() -> list[Any]:
    """The nodes from which the backward that runs in this thread began."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not _RUNS:
        frame = frame.f_back
    outputs = () if frame is None else frame.f_locals.get("t_outputs", ())
    return [each.grad_fn for each in outputs if getattr(each, "grad_fn", None) is not None]


def _sums(root: Any) -> Iterator[Any]:
    """The sums that a loss is, or that it is added up of; no factor has reached them."""
    left = [root]
    while left:
        node = left.pop()
        name = node.name()
        if name == "SumBackward0" or getattr(node, "_saved_reduction", None) == _SUM:
            yield node
        elif name in _ADDS:
            left += [each for each, _ in node.next_functions if each is not None]


def _leads_to(results: Any, node: Any) -> bool:
    """Whether a node's gradient reaches that of the results."""
    left, seen = [node], {node}
    while left:
        latest = left.pop()
        if latest is results:
            return True
        new = [each for each, _ in latest.next_functions if each is not None and each not in seen]
        seen.update(new)
        left += new
    return False
