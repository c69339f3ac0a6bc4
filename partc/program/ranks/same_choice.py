"""Agreement between ranks on what comes next: the program of a stage, by which numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from partc.program.tensors.holders import exchange_texts

_GROUPS = WeakKeyDictionary[Any, Any]()  # by a default group partc's own of the same ranks
LEAST = -(1 << 63) + 1  # of kinds that a rank is not


class SameChoice:
    """Compares what all ranks are about to run, by one sum of two numbers over their hosts.

    The numbers stay on the host, so that no GPU waits for them.
    """

    def __init__(
        self, kind: int = 0, num_kinds: int = 1, unlike: Callable[[], None] = lambda: None
    ) -> None:
        """``kind``: of this rank, of so many. ``unlike``: is called, on all ranks, where ranks of a
        kind differ in what they compare beside a text.
        """
        self._at, self._num, self._unlike = 2 + 2 * kind, 2 + 2 * num_kinds, unlike
        self.alone = dist.get_world_size() == 1
        self._group: Any = None if self.alone else _own_group()
        self._host = torch.device("cpu")

    def differing(self, text: str, beside: int = 0) -> list[str]:
        """Every rank's text if they differ, in rank order; empty if all ranks have this one.

        ``beside``: a number of 63 bits, which ranks of a kind compare on the way. All ranks call
        this together.
        """
        if self.alone:
            return []
        number = _number(text)
        told = [LEAST] * self._num
        told[:2], told[self._at : self._at + 2] = (number, -number), (beside, -beside)
        most = torch.tensor(told)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        high, low, *others = most.tolist()
        pairs = zip(others[::2], others[1::2], strict=True)
        if any(one != -other for one, other in pairs):
            self._unlike()
        return [] if high == -low == number else self.texts(text)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Of each of these numbers the largest of all ranks, which call this together."""
        most = torch.tensor(numbers, dtype=torch.float64)
        if not self.alone:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return most.tolist()

    def texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        return [text] if self.alone else exchange_texts(text, self._group, self._host)


def _own_group() -> Any:
    """A group of all ranks that no script sends over: what it sends while others compare, as one
    that has left its loop before them, waits, and is not taken for a comparison.
    """
    world = dist.group.WORLD
    if world not in _GROUPS:
        _GROUPS[world] = dist.new_group(backend="gloo")
    return _GROUPS[world]


@lru_cache(maxsize=1024)
def _number(text: str) -> int:
    """A number of 62 bits that stands for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2
