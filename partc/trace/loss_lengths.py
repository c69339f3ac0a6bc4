"""The lengths of a CTC loss as tensors, of which each rank takes those of its samples.

torch takes them as lists of numbers too, which it writes into new memory: fakes have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

Lengths = Tensor | Sequence[int]


def lengths_as_tensors() -> AbstractContextManager[Any]:
    """Lets ``ctc_loss`` have tensors of the lengths that a script gives it as numbers."""
    own: Any = torch.ctc_loss

    def ctc_loss(
        log_probs: Tensor, targets: Tensor, input_lengths: Lengths, target_lengths: Lengths,
        *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        given = (_as_tensor(each, targets) for each in (input_lengths, target_lengths))
        loss: Tensor = own(log_probs, targets, *given, *args, **kwargs)
        return loss

    return patch.object(torch, "ctc_loss", ctc_loss)


def _as_tensor(lengths: Lengths, like: Tensor) -> Tensor:
    """Equal lengths as a fill: any part of the batch has the same."""
    if isinstance(lengths, Tensor):
        return lengths
    if len({*lengths}) == 1:
        return torch.full((len(lengths),), lengths[0], device=like.device)
    return torch.tensor(lengths, dtype=torch.int64, device=like.device)
