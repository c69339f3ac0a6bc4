"""A loss whose ``backward`` trains what no prepared model has: nothing would sum it over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from partc.errors import RunError
from partc.plan.sharding import dtype_name
from partc.program.step.loss_backward import is_of_step


def trained_beside(loss: Tensor, models: Iterable[nn.Module]) -> Tensor | None:
    """A parameter that the loss trains and none of the models has, where no step gave the loss."""
    known = {id(p) for model in models for p in model.parameters()}
    found: Tensor | None = None
    for node in _nodes(loss):
        if is_of_step(node):
            return None
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            found = leaf
    return found


def _nodes(loss: Tensor) -> Iterator[Any]:
    """The nodes of autograd behind a loss."""
    left: list[Any] = [loss.grad_fn]
    seen = {None, *left}
    while left:
        node = left.pop()
        if node is None:
            continue
        yield node
        new = [each for each in dict(node.next_functions) if each not in seen]
        seen.update(new)
        left += new


def not_prepared(param: Tensor) -> RunError:
    return RunError(
        where="accelerator.backward(loss)",
        what=f"the loss trains a parameter {dtype_name(param.dtype)}{list(param.shape)} of a model "
        "that was not prepared",
        why="no plan shards such a model, and nothing sums its gradients over ranks",
        do="Write model, optimizer, loader = accelerator.prepare(model, optimizer, loader), and "
        "compute the loss with the model that this returns.",
    )
