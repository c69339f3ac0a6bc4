"""A tensor from outside of a step as it was when traced, and whether it is another now.

A program has what it held as a constant. As a look at each step must cost next to nothing, values
are compared only where somebody has written to the tensor, or has put another in its place.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from partc.trace.contents import value_digest

UNCOUNTED = -1  # writes to tensors of ``torch.inference_mode``


class HeldTensor:
    """What a tensor held: its own identity and version, and a digest of its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.digest = value_digest(tensor)
        self._note(tensor)

    def _note(self, tensor: Tensor) -> None:
        self.tensor, self.version = weakref.ref(tensor), _version(tensor)

    def differs(self, now: Any) -> bool:
        """Whether what is there now is no tensor of the same values."""
        if not isinstance(now, Tensor):
            return True
        if now is self.tensor() and _version(now) == self.version != UNCOUNTED:
            return False
        if value_digest(now) != self.digest:
            return True
        self._note(now)  # as after a move to another device; the next look is cheap again
        return False


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to."""
    return UNCOUNTED if tensor.is_inference() else tensor._version
