"""Targets that do not fit the scores that a loss of torch compares them with, told by the loss.

Torch names two shapes or dtypes of such a pair, and not what a target of that loss looks like.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from traceback import walk_tb

import torch
from torch import Tensor

from partc.plan.sharding import dtype_name

_OF_TORCH = "torch.nn.functional"
_OF_CLASSES = ("cross_entropy", "nll_loss")
_OF_NUMBERS = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss",
)  # fmt: skip
_SAYS = r"(?i)target|size|shape|dtype|Float|Long|batch"  # words of torch where these do not fit
_ONE_HOT = (
    "its target has the shape of the scores, and whole numbers",
    "Give the class numbers, y.argmax(1) of a one-hot y; or probabilities, y.float().",
)
Told = tuple[str, str]


def of_targets(error: Exception, reason: str) -> Told | None:
    """What happened, and what to do, where torch refuses the target of a loss; else None."""
    if not re.search(_SAYS, reason) or "weight" in reason:
        return None
    for loss, scores, target in [*_given(error), *_of_backward(reason)]:
        found = (_of_classes if loss in _OF_CLASSES else _of_numbers)(loss, scores, target)
        if found is not None:
            what, do = found
            return f"{loss} of scores {_told(scores)} and a target {_told(target)}: {what}", do
    return None


def _given(error: Exception) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The losses of torch in which an error was raised, with what they were given."""
    for frame, _ in walk_tb(error.__traceback__):
        named, called = frame.f_locals, frame.f_code.co_name
        scores, target = named.get("input"), named.get("target")
        is_known = called in (*_OF_CLASSES, *_OF_NUMBERS)
        if not is_known or frame.f_globals.get("__name__") != _OF_TORCH:
            continue
        if isinstance(scores, Tensor) and isinstance(target, Tensor):
            yield called, scores, target


def _of_backward(reason: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The same of an error that the backward alone finds, as it has no frame of the loss."""
    sizes = r"torch\.Size\(\[([\d, ]*)\]\)"
    if found := re.search(rf"size mismatch \(got input: {sizes}, target: {sizes}", reason):
        scores, target = ([int(n) for n in each.split(",")] for each in found.groups())
        fake = torch.empty(target, dtype=torch.int64, device="meta")
        yield "cross_entropy", torch.empty(scores, device="meta"), fake


def _of_classes(loss: str, scores: Tensor, target: Tensor) -> Told | None:
    """Of scores for classes, which stand along dim 1."""
    if scores.dim() < 2:
        return None
    wanted = scores.shape[:1] + scores.shape[2:]
    if scores.shape == target.shape and not target.is_floating_point():
        do = "Give the class numbers, y.argmax(1)." if loss == "nll_loss" else _ONE_HOT[1]
        return _ONE_HOT[0], do
    if scores.dim() > 2 and target.shape == scores.shape[:-1]:
        moved = "transpose(1, 2)" if scores.dim() == 3 else "movedim(-1, 1)"
        flat = f"flatten(0, {target.dim() - 1})"
        return (
            "the classes stand along the last dim, and are read along dim 1",
            f"Give logits.{flat} and y.flatten(), or logits.{moved} and y as it is.",
        )
    if target.dim() == len(wanted) + 1 and target.shape == (*wanted, 1):
        return "its target has a dim of size 1 too many", "Give it without that: y.squeeze(-1)."
    if target.shape != wanted and target.shape != scores.shape:
        return (
            "there has to be one class number for each row of scores",
            f"Give a target of the shape {[*wanted]}, or scores for as many rows as y has.",
        )
    if target.is_floating_point() and target.shape == wanted:
        return (
            "class numbers are whole numbers",
            f"Give y.long(); of probabilities, a target of the shape {[*scores.shape]}.",
        )
    return None


def _of_numbers(loss: str, scores: Tensor, target: Tensor) -> Told | None:
    """Of numbers that are compared one by one."""
    if scores.shape != target.shape:
        one = [n for n, x in (("the scores", scores), ("y", target)) if 1 in x.shape]
        few = scores.numel() == target.numel() and len(one) == 1
        name = "logits" if one == ["the scores"] else "y"
        return (
            "each number of the one is compared with a number of the other",
            f"Give both one shape: {name}.squeeze(-1) takes a last dim of size 1 away, and "
            "unsqueeze(-1) adds it." if few
            else f"Give a target of the shape {[*scores.shape]}; of class numbers y that is "
            "F.one_hot(y, classes).float().",
        )  # fmt: skip
    if not target.is_floating_point():
        return "its target has whole numbers", f"Give the target as numbers: y.to({scores.dtype})."
    return None


def _told(x: Tensor) -> str:
    return f"{dtype_name(x.dtype)}[{', '.join(map(str, x.shape))}]"
