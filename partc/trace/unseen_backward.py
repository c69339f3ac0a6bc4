"""Notice in a run of the forward alone what its backward does that no call of the forward shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode


class Unequal(Exception):
    """Blocks may differ in something that a run of the forward does not show."""


class NoHooks(TorchFunctionMode):
    """Raises Unequal where a hook is put on a tensor, as the forward does not show its effect."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "hook" in getattr(func, "__name__", ""):
            raise Unequal
        return func(*args, **(kwargs or {}))


def check_backward(results: Iterator[Tensor] | Any) -> None:
    """Raise Unequal at an autograd Function of the user's, as its backward is unknown."""
    left = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if isinstance(node, BackwardCFunction):
            raise Unequal
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                left.append(before)
