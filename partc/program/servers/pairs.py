"""Two processes that send each other tensors, in a gloo group of their own.

A dead peer breaks its gloo group: so each pair has one, and what is broken is this pair alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

HEAD = 3  # numbers of a message's head: its kind, how many numbers, and how many tensors follow


class PairBrokenError(Exception):
    """The other process has ended, stands still for longer than the deadline, or never came."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error).partition(". ")[0])  # gloo says more than once is needed


@dataclass(frozen=True)
class Message:
    """What one process tells the other: a kind, whole numbers, tensors of known sizes."""

    kind: int
    numbers: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()


class Pair:
    """One end of a pair.

    ``sent_bytes``: of tensors that this end has sent.
    """

    def __init__(self, group: Any, here: int) -> None:
        self.group, self.here, self.sent_bytes = group, here, 0

    @classmethod
    def meet(cls, store: Any, name: str, here: int, deadline_s: float) -> Pair:
        """The pair of this name, once both ends, 0 and 1, are there; PairBrokenError behind the
        deadline.
        """
        own = PrefixStore(f"{name}/", store.clone())  # a client that waits lets no other ask
        try:
            own.set_timeout(timedelta(seconds=deadline_s))
            group = dist.ProcessGroupGloo(own, here, 2, timedelta(seconds=deadline_s))
        except RuntimeError as error:  # DistStoreError too
            raise PairBrokenError(error) from error
        return cls(group, here)

    def send(self, message: Message) -> None:
        """Send a message, once the other end reads it."""
        head = torch.tensor([message.kind, len(message.numbers), len(message.tensors)])
        self._send(head)
        if message.numbers:
            self._send(torch.tensor(message.numbers))
        for x in message.tensors:
            self._send(x)
            self.sent_bytes += x.nbytes

    def receive(self, like: Sequence[Tensor]) -> Message:
        """The next message, whose tensors have the sizes of these."""
        kind, num, tensors = self._receive(torch.empty(HEAD, dtype=torch.int64)).tolist()
        numbers = self._receive(torch.empty(num, dtype=torch.int64)).tolist() if num else []
        found = [self._receive(torch.empty_like(x)) for x in like[:tensors]]
        return Message(kind, tuple(numbers), tuple(found))

    def _send(self, x: Tensor) -> None:
        try:
            self.group.send([x], 1 - self.here, 0).wait()
        except RuntimeError as error:
            raise PairBrokenError(error) from error

    def _receive(self, x: Tensor) -> Tensor:
        try:
            self.group.recv([x], 1 - self.here, 0).wait()
        except RuntimeError as error:
            raise PairBrokenError(error) from error
        return x
