"""The transfers of a running step with their times: when each begins and ends, and how long
computing waits for it.

Generated programs say ``dist.all_reduce(...)`` and so on; while a step is timed each of these names
is replaced by one that looks at the clock. Where a program would send messages in place of a
collective (``by_messages``) it calls the collective meanwhile, and the messages are sent here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from partc.codegen.helpers.messages import Messages, by_messages, gather_into, scatter_into

CALLS = {  # what each moves; the last three are calls that a printed function makes
    "all_gather_single": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "irecv": "recv",
    "isend": "send",
    "reduce_scatter_single": "reduce_scatter",
    "exchange of pieces": "reduce_scatter",
    "gather_into": "all_gather",
    "scatter_into": "reduce_scatter",
}
BY_MESSAGES: dict[str, Callable[..., dist.Work]] = {
    "gather_into": gather_into,
    "scatter_into": scatter_into,
}
MADE_BY = {  # what else a call is, by the printed function that makes it
    ("all_gather_single", "gather_into"): "gather_into",
    ("all_to_all_single", "scatter_grads"): "exchange of pieces",
    ("all_to_all_single", "scatter_sum"): "exchange of pieces",
    ("reduce_scatter_single", "scatter_into"): "scatter_into",
}
Function = Callable[..., Any]
Moment = Any  # seconds, or an event of a CUDA stream


class Arrival(dist.Work):
    """Messages that a thread waits for, as they do not tell when they have arrived."""

    def __init__(self, works: list[dist.Work], note_end: Callable[[], None]) -> None:
        super().__init__()
        self.thread = Thread(target=self._watch, args=(works, note_end), daemon=True)
        self.thread.start()

    def _watch(self, works: list[dist.Work], note_end: Callable[[], None]) -> None:
        for work in works:
            work.wait()
        note_end()

    def wait(self) -> bool:  # type: ignore[override]
        self.thread.join()
        return True


class HostClock:
    """Seconds of the processor that computes."""

    def now(self) -> Moment:
        return time.perf_counter()

    def note_end(self, work: dist.Work, note: Callable[[Moment], None]) -> None:
        """Note when a transfer is done; messages between two ranks do not tell."""
        if isinstance(work, Messages):
            work.works = [Arrival(work.works, lambda: note(self.now()))]
            return
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
        with replaced_calls(self._timed):
            yield

    def _timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> TimedWork | None:
            axis = self.axes.get(keywords["group"].group_name, "pp")
            transfer = Transfer(axis, CALLS[name], self.clock.now())
            self.transfers.append(transfer)
            work = original(*arguments, **keywords)
            if work is None:  # all of it was waited for
                end = self.clock.now()
                transfer.end, transfer.waits = end, [(transfer.begin, end)]
                return None
            self.clock.note_end(work, transfer.note_end)
            return TimedWork(work, transfer, self.clock)

        return call


@contextmanager
def replaced_calls(replace: Callable[[str, Function], Function]) -> Iterator[None]:
    """Replaces the functions that programs call by what ``replace`` makes of a name (``CALLS``) and
    of what a program does by it.

    Where a program would send messages it calls the collective meanwhile.
    """
    names = [name for name in CALLS if hasattr(dist, name)]
    originals = {name: getattr(dist, name) for name in (*names, "get_backend")}
    depth = 0  # of calls that are the program's own way

    def as_programs_do(name: str) -> Function:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return start_call(name, arguments, keywords)
            finally:
                depth -= 1

        return call

    def replaced(name: str) -> Function:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if depth:
                return originals[name](*arguments, **keywords)
            maker = sys._getframe(1).f_code.co_name
            return new[MADE_BY.get((name, maker), name)](*arguments, **keywords)

        return call

    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        sends = sys._getframe(1).f_code.co_name == by_messages.__name__ and not depth
        return "none of its own" if sends else str(originals["get_backend"](group))

    new = {name: replace(name, as_programs_do(name)) for name in CALLS}
    for name in names:
        setattr(dist, name, replaced(name))
    dist.get_backend = get_backend  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def start_call(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call a function of torch.distributed, or what programs do in its place."""
    if name in BY_MESSAGES:
        return BY_MESSAGES[name](*arguments, keywords["group"])
    called = "all_to_all_single" if name == "exchange of pieces" else name
    return getattr(dist, called)(*arguments, **keywords)
