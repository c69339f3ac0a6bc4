"""Class weights of a loss that are not as many as there are classes, told by the loss.

Torch names the two numbers, and not the loss: ``nn.CrossEntropyLoss(weight=torch.ones(3))``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from traceback import walk_tb

from torch import Tensor

_OF_TORCH = "torch.nn.functional"
_NAMES = ("weight", "pos_weight")
_SIZES = re.compile(r"\[([\d, ]+)\]")  # in words of torch


def of_class_weights(error: Exception, reason: str) -> tuple[str, str] | None:
    """What happened, and what to do, where torch refuses the weights of a loss; else None."""
    for loss, name, weight in _given(error):
        sizes = [
            [int(n) for n in found.split(",") if n.strip()] for found in _SIZES.findall(reason)
        ]
        own = [1] * max(map(len, sizes), default=0) + [*weight.shape]
        if weight.dim() == 1 and any(each and each == own[-len(each) :] for each in sizes):
            return (
                f"the {name} of the loss {loss} has {len(weight)} numbers, and there are not as "
                "many classes",
                f"Give {name}= one number for each class, as many as the model gives scores for; "
                "or correct the model's last layer.",
            )
    return None


def _given(error: Exception) -> Iterator[tuple[str, str, Tensor]]:
    """The losses of torch in which an error was raised, with the weights that they were given."""
    for frame, _ in walk_tb(error.__traceback__):
        called = frame.f_code.co_name
        if frame.f_globals.get("__name__") == _OF_TORCH and re.search("loss|entropy", called):
            for name in _NAMES:
                if isinstance(weight := frame.f_locals.get(name), Tensor):
                    yield called, name, weight
