"""Two processes that send each other tensors, in a gloo group of their own.

A dead peer breaks its gloo group: so each pair has one, and what is broken is this pair alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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
        wait = timedelta(seconds=deadline_s)
        own.set_timeout(wait)
        met = _in_time(lambda: dist.ProcessGroupGloo(own, here, 2, wait), deadline_s)
        return cls(met, here)

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


def _in_time(make: Callable[[], Any], deadline_s: float) -> Any:
    """What is made, in a thread: gloo tries several times, and each takes as long as the deadline.

    PairBrokenError behind the deadline, or where it cannot be made.
    """
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except RuntimeError as error:  # DistStoreError too
            made.set_exception(PairBrokenError(error))

    threading.Thread(target=run, daemon=True).start()
    try:
        return made.result(deadline_s)
    except TimeoutError:
        raise PairBrokenError(TimeoutError("the other process did not connect")) from None
