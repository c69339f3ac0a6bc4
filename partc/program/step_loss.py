"""What a stage gives that has no backward, a step's loss or a forward's results, and says why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from partc.errors import RunError

# What scripts do to a loss before they call backward: the result is a loss of a step, too.
_SCALED = {
    Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__, Tensor.add,
    Tensor.__add__, Tensor.__radd__, Tensor.mean, Tensor.sum, torch.mul, torch.div, torch.add,
    torch.mean, torch.sum,
}  # fmt: skip


class _Told(Tensor):
    """A tensor that looks, prints and pickles as a plain one."""

    def __repr__(self, **named: Any) -> str:  # type: ignore[override]
        return repr(plain(self))

    def __format__(self, spec: str) -> str:
        return format(plain(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(plain(self), memo)


class StepLoss(_Told):
    """The loss of a step, ``f32[]``; ops give plain tensors, but for its sums and multiples."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func in _SCALED and type(result) is Tensor and not result.requires_grad:
                return result.as_subclass(cls)
            return plain(result) if isinstance(result, cls) else result

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """RunError: the gradients are there."""
        raise RunError(
            where="loss.backward()",
            what="the gradients are there already",
            why="stage.step computes them together with the loss, and adds them to .grad",
            do="Leave backward out, and multiply gradients by stage.step(..., scale=1 / 4); or "
            "call loss = stage(...) in the place of stage.step(...).",
        )


class Evaluated(_Told):
    """What a forward gives without gradients, and what was computed from it alone."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            trains = isinstance(result, Tensor) and result.requires_grad
            if type(result) is Tensor and result.is_floating_point() and not trains:
                return result.as_subclass(cls)
            return plain(result) if isinstance(result, cls) and trains else result

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """RunError where nothing is there to train."""
        if self.requires_grad:
            plain(self).backward(*args, **kwargs)
            return
        raise RunError(
            where="backward()",
            what="it was computed from what stage(...) gives in eval mode, without gradients",
            why="a program computes the gradients together with the loss that was compiled",
            do="Train by stage.train() and stage.step(...), or loss = stage(...) and "
            "loss.backward(), with the arguments of that loss.",
        )


def plain(loss: Tensor) -> Tensor:
    """The same tensor, without what its class adds."""
    with torch._C.DisableTorchFunctionSubclass():
        return loss.as_subclass(Tensor)


def of_step(loss: Any) -> Any:
    """What a step gives for a loss that its gradients were computed with."""
    return loss.as_subclass(StepLoss) if type(loss) is Tensor else loss


def evaluated(results: Any) -> Any:
    """A forward's results, one or several by name, that say why they have no backward.

    Under ``torch.no_grad()``, as evaluations run, they stay plain.
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return results
    if isinstance(results, dict):
        return {name: evaluated(each) for name, each in results.items()}
    return results.as_subclass(Evaluated) if type(results) is Tensor else results
