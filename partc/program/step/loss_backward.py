"""``loss.backward()`` for a step that has computed its gradients together with the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partc.errors import RunError
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.tensors.shown import Shown, begin_all, end_all
from partc.wrong_calls import quoted

Run = Callable[[], Tensor]
T = TypeVar("T")
Compare = Callable[[float | Tensor, str], None]  # the factors of all ranks


def loss_with_backward(
    shown: Sequence[Shown], run: Run, compare: Compare, *, is_half: bool = False
) -> Tensor:
    """The loss of one step; its ``backward`` adds the gradients to those of the parameters.

    ``is_half``: the step computes in float16, so that ``backward`` refuses a scaled loss.
    ``compare`` looks whether all ranks scale alike.
    """
    trained = [each for each in shown if each.trained and not each.is_frozen]
    params: list[Tensor] = [each.param for each in trained] or [_no_parameter()]
    apply: Any = _LossOfStep.apply
    known = trained, is_half, compare
    loss: Tensor = apply(lambda: fresh_grads(shown, trained, run), *known, *params)
    return loss


def is_of_step(node: Any) -> bool:
    """Whether a node of autograd is the ``backward`` of a step's loss."""
    return "_LossOfStep" in type(node).__name__  # `name` may be what a function kept for itself


def scaled_step(
    shown: Sequence[Shown], run: Run, scale: float | Tensor, compare: Compare, *,
    is_half: bool = False,
) -> Tensor:  # fmt: skip
    """The loss of one step, whose gradients are added ``scale`` times.

    RunError for a scale other than 1 if the step computes in float16.
    """
    if is_half and float(scale) != 1.0:
        raise _scaled("step(scale=...)", float(scale))
    compare(scale, "step(scale=...)")
    trained = [each for each in shown if each.trained and not each.is_frozen]
    loss, grads = fresh_grads(shown, trained, run)
    for each, grad in zip(trained, grads, strict=True):
        if grad is not None:
            grad.mul_(scale if isinstance(scale, int | float) else scale.to(grad))
            old = each.piece.grad
            each.piece.grad = grad if old is None else old.add_(grad)
            each.show()
    return loss


def check_scale(given: Any) -> Any:
    """The ``scale`` of a step; RunError unless it is None, a finite number or ``f32[]``."""
    is_one = isinstance(given, Tensor) and given.numel() == 1 and not given.is_complex()
    if given is None or is_one or (isinstance(given, int | float) and math.isfinite(given)):
        return given
    raise RunError(
        where="step(scale=...)", what=f"it is {quoted(given)}",
        why="it multiplies the gradients of the step: a number, or a tensor f32[]",
        do="Pass 1 / 4 for the mean over 4 steps, or scaler.get_scale().",
    )  # fmt: skip


def _no_parameter() -> Tensor:
    """What a loss hangs on where this pipeline rank trains nothing, so that it has a backward."""
    return torch.zeros((), requires_grad=True)


def fresh_grads(
    shown: Sequence[Shown], trained: Sequence[Shown], run: Callable[[], T]
) -> tuple[T, list[Tensor | None]]:
    """The loss and the gradients of one step; every ``.grad`` keeps its value."""
    begin_all(shown)
    before = [each.piece.grad for each in trained]
    try:
        for each in trained:
            each.piece.grad = None
        return run(), [each.piece.grad for each in trained]
    finally:
        for each, grad in zip(trained, before, strict=True):
            each.piece.grad = grad
        end_all(shown)


class _LossOfStep(torch.autograd.Function):
    """Computes a step's gradients together with the loss, and returns them in ``backward``."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[], tuple[Tensor, list[Any]]], trained: Any, is_half: bool,
        compare: Compare, *params: Tensor,
    ) -> Tensor:  # fmt: skip
        loss, ctx.grads = run()
        ctx.trained, ctx.is_half, ctx.compare = trained, is_half, compare
        return loss

    @staticmethod
    @of_other_ranks("loss.backward()")
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise no_graph()
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RunError(
                where="loss.backward()",
                what="was called a second time",
                why="a step's gradients are handed out once, to save memory",
                do="Call the stage again.",
            )
        if isinstance(d_loss, DTensor):  # where the loss was added to what parameters have given
            d_loss = d_loss.full_tensor()
        if ctx.is_half and float(d_loss) != 1.0:
            raise _scaled("loss.backward()", float(d_loss))
        ctx.compare(d_loss, "loss.backward()")
        scaled = [None if g is None else g.mul_(d_loss.to(g.dtype)) for g in grads]
        pairs = zip(ctx.trained, scaled, strict=True)
        handed = [None if g is None else each.like_param(g) for each, g in pairs]
        return None, None, None, None, *(handed or [None])


def no_graph() -> RunError:
    return RunError(
        where="create_graph=True", what="it is asked of the gradients of a step",
        why="they are there, computed by a program, and nothing can be derived from them",
        do="Compute what is made of gradients, such as a penalty on their norm, inside of the loss "
        "that is compiled, by torch.autograd.grad(..., create_graph=True) there.",
    )  # fmt: skip


def _scaled(where: str, factor: float) -> RunError:
    return RunError(
        where=where,
        what=f"the loss was multiplied by {factor:g}, and the program computes in float16",
        why="the step has computed its gradients from the loss as it was compiled: what is too "
        "small for float16 is 0 by now, and what is too large infinite",
        do="Leave the GradScaler out, and compute in bfloat16, which needs no scale; or make the "
        "scale an input of the step and multiply inside of the compiled loss.",
    )
