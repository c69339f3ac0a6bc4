"""Copies of a rank's tensors in host memory, made beside the next step where that is right.

Nothing but an optimizer changes parameters and moments. So these are copied in a thread, while the
next forward and backward run, and every optimizer's step waits until that is done. Buffers, and
parameters that steps write, are copied at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partc.errors import RunError
from partc.program.checkpoints.snapshot import Snapshot


class Copy(NamedTuple):
    """A tensor, the memory that it is copied to, and how often it had been written before."""

    key: str
    tensor: Tensor
    to: Tensor
    version: int

    @property
    def is_torn(self) -> bool:
        """Whether something has written to the tensor since: the copy may be of two steps."""
        return self.tensor._version != self.version


class Staging:
    """Host memory for one save at a time, which the next save uses again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._later: list[Copy] = []
        self._done = threading.Event()
        self._done.set()
        self._ready: Any = None  # on a GPU: the work before the save

    def begin(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot over host memory, which is whole when ``finish`` has run in a thread."""
        copies = [self._copy_of(key, x) for key, (_, x) in snapshot.tensors.items()]
        self._later = [copy for copy in copies if copy.key in snapshot.steady]
        _copy_all([copy for copy in copies if copy.key not in snapshot.steady], None)
        self._ready = _event([copy.tensor for copy in self._later])
        self._done.clear()
        shards = {key: shard for key, (shard, _) in snapshot.tensors.items()}
        return replace(snapshot, tensors={c.key: (shards[c.key], c.to) for c in copies})

    def finish(self) -> None:
        """Copy what was left; RunError if something wrote to it meanwhile."""
        try:
            _copy_all(self._later, self._ready)
            torn = [copy.key for copy in self._later if copy.is_torn]
        finally:
            self._later, self._ready = [], None
            self._done.set()
        if torn:
            raise _written(torn[0])

    def wait(self) -> None:
        """Wait until nothing reads the stage's tensors any more."""
        self._done.wait()

    def _copy_of(self, key: str, tensor: Tensor) -> Copy:
        tensor, old = tensor.detach(), self._buffers.get(key)
        if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            old = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[key] = old
        return Copy(key, tensor, old, tensor._version)


@torch.no_grad()
def _copy_all(copies: list[Copy], ready: Any) -> None:
    with _beside([copy.tensor for copy in copies], ready):
        for copy in copies:
            copy.to.copy_(copy.tensor, non_blocking=True)


def _event(tensors: list[Tensor]) -> Any:
    """On a GPU: behind what a copy in another stream has to come."""
    of = _on_gpu(tensors)
    return None if of is None else torch.cuda.current_stream(of.device).record_event()


@contextmanager
def _beside(tensors: list[Tensor], ready: Any) -> Iterator[None]:
    """On a GPU: copy in a stream of its own, and wait for it."""
    of = _on_gpu(tensors)
    if of is None:
        yield
        return
    stream = torch.cuda.Stream(of.device)
    stream.wait_event(ready or torch.cuda.current_stream(of.device).record_event())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _on_gpu(tensors: list[Tensor]) -> Tensor | None:
    return next((x for x in tensors if x.device.type == "cuda"), None)


def _written(key: str) -> RunError:
    return RunError(
        where=key.partition("/")[2],
        what="was written to while it was copied for a checkpoint",
        why="the copy would be of two steps; only the steps of torch's optimizers wait for it",
        do="Call checkpoints.wait_for_staging() before you write to parameters or optimizer states "
        "yourself. Nothing was saved of this step.",
    )
