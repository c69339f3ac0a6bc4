"""The transfers of a running step with their times: when each begins and ends, and how long
computing waits for it.

Generated programs say ``dist.all_reduce(...)`` and so on; while a step is timed each of these names
is replaced by one that looks at the clock.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

CALLS = {
    "all_gather_single": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "irecv": "recv",
    "isend": "send",
    "reduce_scatter_single": "reduce_scatter",
}
SCATTERED_SUMS = ("scatter_sum", "scatter_grads")  # printed functions whose exchange is one
Moment = Any  # seconds, or an event of a CUDA stream


class HostClock:
    """Seconds of the processor that computes."""

    def now(self) -> Moment:
        return time.perf_counter()

    def note_end(self, work: dist.Work, note: Callable[[Moment], None]) -> None:
        """Note when a transfer is done; messages between two ranks do not tell."""
        try:
            future = work.get_future()
        except RuntimeError:
            return
        future.add_done_callback(lambda _: note(self.now()))

    def seconds(self, start: Moment, moment: Moment) -> float:
        """From one moment to another."""
        return float(moment - start)


class CudaClock:
    """Events of the stream that computes, and of one that waits for transfers in its place."""

    def __init__(self) -> None:
        self.beside = torch.cuda.Stream()

    def now(self) -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note_end(self, work: dist.Work, note: Callable[[Moment], None]) -> None:
        """Note when a transfer is done."""
        with torch.cuda.stream(self.beside):
            work.wait()
            note(self.now())

    def seconds(self, start: Moment, moment: Moment) -> float:
        """From one moment to another, once both are over."""
        moment.synchronize()
        return float(start.elapsed_time(moment)) * 1e-3


Clock = HostClock | CudaClock


@dataclass
class Transfer:
    """One transfer over an axis; computing stands still in ``waits``, each from when to when."""

    axis: str
    kind: str
    begin: Moment
    end: Moment | None = None
    waits: list[tuple[Moment, Moment]] = field(default_factory=list)

    def note_end(self, moment: Moment) -> None:
        self.end = moment


@dataclass
class TimedWork:
    """What a replaced call returns: waits for the transfer, and notes how long."""

    work: dist.Work
    transfer: Transfer
    clock: Clock

    def wait(self) -> bool:
        begin = self.clock.now()
        self.work.wait()
        self.transfer.waits.append((begin, self.clock.now()))
        return True


@dataclass
class TransferTimes:
    """The transfers of one step, in the order in which they began; ``axes`` names the groups."""

    clock: Clock
    axes: Mapping[str, str]
    transfers: list[Transfer] = field(default_factory=list)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Notes what is transferred meanwhile."""
        originals = {name: getattr(dist, name) for name in CALLS}
        for name, original in originals.items():
            setattr(dist, name, self._timed(name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    def _timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> TimedWork | None:
            kind = CALLS[name]
            if kind == "all_to_all" and sys._getframe(1).f_code.co_name in SCATTERED_SUMS:
                kind = "reduce_scatter"
            axis = self.axes.get(keywords["group"].group_name, "pp")
            transfer = Transfer(axis, kind, self.clock.now())
            self.transfers.append(transfer)
            work = original(*arguments, **keywords)
            if work is None:  # all of it was waited for
                end = self.clock.now()
                transfer.end, transfer.waits = end, [(transfer.begin, end)]
                return None
            self.clock.note_end(work, transfer.note_end)
            return TimedWork(work, transfer, self.clock)

        return call
