"""Time the transfers of a running step: when each begins and ends, and how long computing waits.

Generated programs call ``dist.all_reduce(...)`` and alike. While a step is timed, each of these
functions is replaced by one that also reads the clock. Some programs send messages in place of a
collective (``by_messages``). They are then made to call the collective, whose replacement here
sends the messages, so that the whole is timed as one transfer.
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

CALLS = {  # function -> kind of transfer; the last three are done by a function of the program
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
MADE_BY = {  # (function, the program's function that calls it) -> the name in CALLS
    ("all_gather_single", "gather_into"): "gather_into",
    ("all_to_all_single", "scatter_grads"): "exchange of pieces",
    ("all_to_all_single", "scatter_sum"): "exchange of pieces",
    ("reduce_scatter_single", "scatter_into"): "scatter_into",
}
Function = Callable[..., Any]
Moment = Any  # seconds, or an event of a CUDA stream


class Arrival(dist.Work):
    """Waits for messages in a thread, as gloo's sends and receives give no signal at their end."""

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
    """The clock for ranks on a CPU; moments are seconds."""

    def now(self) -> Moment:
        return time.perf_counter()

    def note_end(self, work: dist.Work, note: Callable[[Moment], None]) -> None:
        """Call ``note`` when a transfer ends; never for a send or receive, which has no future."""
        if isinstance(work, Messages):
            work.works = [Arrival(work.works, lambda: note(self.now()))]
            return
        try:
            future = work.get_future()
        except RuntimeError:
            return
        future.add_done_callback(lambda _: note(self.now()))

    def seconds(self, start: Moment, moment: Moment) -> float:
        """Seconds from one moment to another."""
        return float(moment - start)


class CudaClock:
    """The clock for ranks on a GPU; moments are CUDA events.

    A second stream waits for transfers, so that the computing stream does not have to.
    """

    def __init__(self) -> None:
        self.beside = torch.cuda.Stream()

    def now(self) -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note_end(self, work: dist.Work, note: Callable[[Moment], None]) -> None:
        """Call ``note`` with the moment at which a transfer ends."""
        with torch.cuda.stream(self.beside):
            work.wait()
            note(self.now())

    def seconds(self, start: Moment, moment: Moment) -> float:
        """Seconds from one moment to another; waits until the second has passed."""
        moment.synchronize()
        return float(start.elapsed_time(moment)) * 1e-3


Clock = HostClock | CudaClock


@dataclass
class Transfer:
    """One transfer over an axis; ``waits``: the spans in which computing waits for it."""

    axis: str
    kind: str
    begin: Moment
    end: Moment | None = None
    waits: list[tuple[Moment, Moment]] = field(default_factory=list)

    def note_end(self, moment: Moment) -> None:
        self.end = moment


@dataclass
class TimedWork:
    """The handle that a replaced function returns; its ``wait`` also notes how long it took.

    ``held`` keeps what is sent and received until computing has waited. A transfer holds its
    tensors itself only up to the first wait, and on a GPU that is the wait of the clock's stream,
    behind which computing may still run ahead of the transfer.
    """

    work: dist.Work
    transfer: Transfer
    clock: Clock
    held: tuple[Any, ...] = ()

    def wait(self) -> bool:
        begin = self.clock.now()
        self.work.wait()
        self.held = ()
        self.transfer.waits.append((begin, self.clock.now()))
        return True


@dataclass
class TransferTimes:
    """The transfers of one step in the order of their starts.

    ``axes``: the name of a process group -> its mesh axis.
    """

    clock: Clock
    axes: Mapping[str, str]
    transfers: list[Transfer] = field(default_factory=list)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record all transfers that start inside of the ``with``."""
        with replaced_calls(self._timed):
            yield

    def _timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> TimedWork | None:
            group = keywords.get("group")  # a stage's checks speak in the world's, without a name
            axis = self.axes.get(group.group_name if group else "", "pp")
            transfer = Transfer(axis, CALLS[name], self.clock.now())
            self.transfers.append(transfer)
            work = original(*arguments, **keywords)
            if work is None:  # a blocking call has returned, so its transfer is over
                end = self.clock.now()
                transfer.end, transfer.waits = end, [(transfer.begin, end)]
                return None
            self.clock.note_end(work, transfer.note_end)
            return TimedWork(work, transfer, self.clock, (arguments, keywords))

        return call


@contextmanager
def replaced_calls(replace: Callable[[str, Function], Function]) -> Iterator[None]:
    """Replace the functions of torch.distributed that programs call.

    ``replace(name, original)`` makes the replacement of a name in ``CALLS``; ``original`` does what
    a program does under that name. Programs that send messages in place of a collective are made to
    call the collective.
    """
    names = [name for name in CALLS if hasattr(dist, name)]
    originals = {name: getattr(dist, name) for name in (*names, "get_backend_config")}
    depth = 0  # above 0 inside of an original, whose own calls are not replaced

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

    def get_backend_config(group: dist.ProcessGroup | None = None) -> str:
        sends = sys._getframe(1).f_code.co_name == by_messages.__name__ and not depth
        return "none of its own" if sends else str(originals["get_backend_config"](group))

    new = {name: replace(name, as_programs_do(name)) for name in CALLS}
    for name in names:
        setattr(dist, name, replaced(name))
    dist.get_backend_config = get_backend_config
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def start_call(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call a function of torch.distributed, or the program's function in its place."""
    if name in BY_MESSAGES:
        return BY_MESSAGES[name](*arguments, keywords["group"])
    called = "all_to_all_single" if name == "exchange of pieces" else name
    return getattr(dist, called)(*arguments, **keywords)
