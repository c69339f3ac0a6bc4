"""A tensor from outside of a step as it was when traced, and whether it is another now.

A program has what it held as a constant. As a look at each step must cost next to nothing, values
are compared where somebody has written to the tensor, or has put another or other memory in its
place; and at the first looks and then now and then, as torch counts no writes through ``.data``, or
to memory that an array of numpy shares.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from partc.trace.contents import memory_of, value_digest

UNCOUNTED = -1  # writes to tensors of ``torch.inference_mode``
CLOSE = 5  # first looks that compare values; most scripts that write do so in their first steps
EVERY = 20  # and of later ones one in so many
SMALL = 1 << 12  # bytes on the CPU that every look compares


class HeldTensor:
    """What a tensor held: its own identity and version, and a digest of its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.digest, self.looks = value_digest(tensor), 0
        self._note(tensor)

    def _note(self, tensor: Tensor) -> None:
        self.tensor, self.version = weakref.ref(tensor), _version(tensor)
        self.memory = memory_of(tensor)

    def differs(self, now: Any) -> bool:
        """Whether what is there now is no tensor of the same values."""
        if not isinstance(now, Tensor):
            return True
        self.looks += 1
        is_small = now.device.type == "cpu" and now.numel() * now.element_size() <= SMALL
        close = is_small or self.looks <= CLOSE or self.looks % EVERY == 0
        if not close and now is self.tensor() and self._is_untouched(now):
            return False
        if value_digest(now) != self.digest:
            return True
        self._note(now)  # as after a move to another device; the next look is cheap again
        return False

    def _is_untouched(self, tensor: Tensor) -> bool:
        """Whether no write was counted, and it has the memory that it had."""
        return _version(tensor) == self.version != UNCOUNTED and memory_of(tensor) == self.memory


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to."""
    return UNCOUNTED if tensor.is_inference() else tensor._version
