"""A stage steps in one thread at a time: ranks make their transfers in one order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from partc.errors import RunError
from partc.trace.default_dtype import float32_default


class OneThread:
    """Lets one thread into a step; another one waits on one rank, and is refused on several."""

    def __init__(self, num_ranks: int) -> None:
        self._lock, self.num_ranks = RLock(), num_ranks

    @contextmanager
    def of(self, call: str) -> Iterator[None]:
        """The call of a thread; RunError while another thread is in one."""
        if not self._lock.acquire(blocking=self.num_ranks == 1):
            raise RunError(
                where=f"stage.{call}", what="another thread is in a step of this stage",
                why="ranks send each other tensors in one order, and threads come in any",
                do="Call the stage from one thread. Loaders that prepare batches may be threads.",
            )  # fmt: skip
        try:
            with float32_default():
                yield
        finally:
            self._lock.release()
