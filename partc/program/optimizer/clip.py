"""Clip sharded gradients by the norm of the whole model, which counts every element once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partc.errors import RunError, UsageError
from partc.wrong_calls import quoted

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def clip_gradients(
    held: Sequence[tuple[Tensor, bool]], groups: Sequence[Any], max_norm: float,
    norm_type: float = 2.0, error_if_nonfinite: bool = False, *, zero: Tensor,
) -> Tensor:  # fmt: skip
    """Scale this rank's gradients so that the model's norm is at most ``max_norm``.

    Returns the norm before. ``held``: each parameter, and whether this rank's copy of the shard is
    the first (of a tied parameter, the one on its first stage). ``groups``: the process groups of
    all mesh axes, which together span all ranks. ``zero``: 0 on this rank's device and in the dtype
    of the norm, the same on all ranks. RunError if the norm must be finite and is not.
    """
    norm = total_norm(held, groups, float(norm_type), zero)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RunError(
            where="clip_grad_norm_",
            what=f"the norm of all gradients is {norm.item()}",
            why="some gradient is not finite",
            do="Skip this step, or lower the learning rate.",
        )
    scale = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for param, _ in held:
        if param.grad is not None:
            param.grad.mul_(scale.to(param.grad.dtype))
    return norm


def check_clip(max_norm: object, norm_type: object, has_directions: bool) -> None:
    """UsageError unless the arguments of ``clip_grad_norm_`` are numbers that mean something."""
    _check_norm("max_norm", max_norm)
    _check_norm("norm_type", norm_type)
    check_directions(max_norm, has_directions)


def check_directions(max_norm: Any, has_directions: bool) -> None:
    """UsageError for a limit to the norm of gradients that are +1 and -1, if they are."""
    if not has_directions or math.isinf(max_norm):
        return
    raise UsageError(
        where="clip_grad_norm_",
        what="by the plan's [compress] gradients arrive as directions, +1 and -1",
        why="their norm says how many they are, and not how large gradients were: clipping would "
        "divide every step by it",
        do="Leave clipping out (max_grad_norm=0 of a Trainer, gradient_clip_val=None of Lightning),"
        " and choose the learning rate for steps of one size; max_norm=math.inf gives the norm.",
    )


def _check_norm(name: str, given: object) -> None:
    """UsageError unless an argument of ``clip_grad_norm_`` is a number."""
    numbers = isinstance(given, int | float) or (isinstance(given, Tensor) and given.dim() == 0)
    if not numbers or isinstance(given, bool):
        why = "it is a number"
    elif name == "max_norm" and not float(given) >= 0:  # type: ignore[arg-type]
        why = "it is 0 or more: gradients times a number below zero would lead uphill"
    else:
        return
    do = f"Write {name}=1.0, or max_norm=math.inf for the norm alone."
    if isinstance(given, Iterable) and not isinstance(given, Tensor | str):
        do = "Leave the parameters out, a stage knows its own: stage.clip_grad_norm_(1.0)."
    raise UsageError(
        where="clip_grad_norm_", what=f"{name} is {quoted(given)}", why=why, do=do
    )  # fmt: skip


def total_norm(
    held: Sequence[tuple[Tensor, bool]], groups: Sequence[Any], norm_type: float, zero: Tensor
) -> Tensor:
    """The norm of all ranks' gradients, first copies only; UsageError unless ``norm_type`` > 0."""
    if not norm_type > 0:
        raise UsageError(
            where="clip_grad_norm_",
            what=f"norm_type={norm_type} is not a norm",
            why="it is a positive number or infinity",
            do="Use 2.0, 1.0 or math.inf.",
        )
    norms = [
        torch.linalg.vector_norm(param.grad, norm_type, dtype=zero.dtype)
        for param, first in held
        if param.grad is not None and first and param.grad.numel()
    ]
    stacked = torch.stack([zero, *norms])
    if math.isinf(norm_type):
        return _reduce(stacked.amax(), groups, dist.ReduceOp.MAX)
    return _reduce(stacked.pow(norm_type).sum(), groups, dist.ReduceOp.SUM) ** (1 / norm_type)


def _reduce(value: Tensor, groups: Sequence[Any], op: Any) -> Tensor:
    for group in groups:
        dist.all_reduce(value, op, group=group)
    return value
