"""Which gradients leave before a pipeline stage has finished its last backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EarlyReduction:
    """Gradients of blocks that one collective finishes, of this kind, over this axis and scattered
    along this dim, leave in the backward (or the weight gradients) of microbatch ``last``.
    """

    kind: str
    axis: str
    dim: int
    outer: int
    last: int
