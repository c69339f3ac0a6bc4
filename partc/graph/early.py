"""Gradients of a pipeline stage whose reduction starts during the stage's last backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EarlyReduction:
    """Reduce the gradients of a stage's blocks in the backward (or the W) of microbatch ``last``.

    It applies to gradients that are finished by one collective of this ``kind`` over this ``axis``,
    scattered along ``dim`` with the factor ``outer``, and have this ``dtype``. The collective
    starts block by block.
    """

    kind: str
    axis: str
    dim: int
    outer: int
    last: int
    dtype: torch.dtype
