"""Stand-ins for ``torch.distributed`` refuse the arguments that c10d itself would refuse.

A stand-in that asks only whether ``async_op`` is true takes a function for ``True``, where the
real call ends in a raw ``TypeError`` on every rank. The kinds are read from the names of the
arguments, which are those of ``torch.distributed``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

StandIn = TypeVar("StandIn", bound=type)
Kinds = tuple[type, ...]

FILE = __file__  # whose frames stand between a program and a stand-in
_OPERATION: Kinds = (dist.ReduceOp, dist.ReduceOp.RedOpType)
_RANK: Kinds = (int, type(None))
KINDS: dict[str, Kinds] = {
    "tensor": (Tensor,), "input": (Tensor,), "output": (Tensor,),
    "input_tensor": (Tensor,), "output_tensor": (Tensor,),
    "op": _OPERATION, "async_op": (int, type(None)), "tag": (int,),
    "src": _RANK, "dst": _RANK, "group_src": _RANK, "group_dst": _RANK,
}  # fmt: skip


def as_c10d_takes(stand_in: StandIn) -> StandIn:
    """Let the methods of a class that stand for ``torch.distributed`` check their arguments."""
    for name, method in list(vars(stand_in).items()):
        if inspect.isfunction(method) and hasattr(dist, name):
            setattr(stand_in, name, _checked(method))
    return stand_in


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method; it raises ``TypeError`` where an argument is of no kind that c10d takes."""
    taken = inspect.signature(method)

    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        for wrong in _wrong(taken.bind(*args, **named).arguments):
            raise TypeError(f"torch.distributed.{method.__name__} takes no {wrong}")
        return method(*args, **named)

    return call


def _wrong(arguments: dict[str, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        if name in KINDS and not isinstance(value, KINDS[name]):
            yield f"{name}={value!r}"
