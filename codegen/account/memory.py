"""Pieces of memory: each counts as live for as long as anything refers to it."""

from __future__ import annotations

from dataclasses import dataclass

Named = tuple[str, int]  # the call that allocated a piece, and its bytes


@dataclass
class Memory:
    """The bytes that are live, their highest number so far, and during which call that was."""

    total: int = 0
    peak: int = 0
    at: str = ""
    number: int = 0  # of the next piece

    def piece(self, num_bytes: int) -> Piece:
        """A new piece of memory."""
        return Piece(self, num_bytes)

    def meet(self, name: str, temporary_bytes: int = 0) -> None:
        """Note what is live while a call runs that needs so many bytes beside its results."""
        if self.total + temporary_bytes > self.peak:
            self.peak, self.at = self.total + temporary_bytes, name


class Piece:
    """A piece of memory; Python drops it, as a tensor, with the last reference to it."""

    __slots__ = ("memory", "num_bytes", "number")

    def __init__(self, memory: Memory, num_bytes: int) -> None:
        self.memory, self.num_bytes, self.number = memory, num_bytes, memory.number
        memory.number += 1
        memory.total += num_bytes

    def __del__(self) -> None:
        self.memory.total -= self.num_bytes


# What a variable refers to: memory (None: that of a parameter, buffer or input, which is not
# counted), what the handle of a transfer holds, or weights that are being gathered.
Held = Piece | None | list["Held"]
