"""What a rank's steps take: seconds, waits for transfers, bytes; and what gloo adds to these."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import written_bytes
from partc.codegen.helpers.messages import scatter_into
from partc.cost.bytes import sent_share
from partc.measure.timed_calls import CALLS, Function, HostClock, TransferTimes

FEW, SMALL = (
    (1, 2),
    64,
)  # elements of calls that show what gloo adds: it sends fewer messages of few
Kind = tuple[str, int]  # of a transfer; its elements if they are few, else 0


@dataclass
class SizedTimes(TransferTimes):
    """Counts transfers by kind besides, those of few numbers apart."""

    kinds: Counter[Kind] = field(default_factory=Counter)

    def _timed(self, name: str, original: Function) -> Function:
        timed = super()._timed(name, original)

        def call(*arguments: Any, **keywords: Any) -> Any:
            num = arguments[0].numel()
            few = CALLS[name] == "all_reduce" and num in FEW
            self.kinds[CALLS[name], num if few else 0] += 1
            return timed(*arguments, **keywords)

        return call


@dataclass
class Meter:
    """What the steps of one run have taken on this rank so far."""

    seconds: float = 0.0
    exposed_s: float = 0.0
    written: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter)
    logged: float = 0.0  # bytes of sums whose size is not known before
    counted: int | None = None  # bytes written until the step before ended; None behind a pause

    def pause(self) -> None:
        """What is written from here to the next step is none of the training's."""
        self.counted = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count what happens inside of the ``with`` as part of the steps; bytes also since the one
        before, as transfers go on between steps.
        """
        times = SizedTimes(HostClock(), {})
        before = (written_bytes() or 0) if self.counted is None else self.counted
        start = time.perf_counter()
        with times.on():
            yield
        self.seconds += time.perf_counter() - start
        self.counted = written_bytes() or 0
        self.written += self.counted - before
        self.exposed_s += sum(end - begin for t in times.transfers for begin, end in t.waits)
        self.kinds.update(times.kinds)

    def sent(self, added: dict[Kind, float]) -> float:
        """The bytes of numbers among those written: without what gloo adds."""
        return self.written - sum(added[kind] * count for kind, count in self.kinds.items())


def added_bytes() -> dict[Kind, float]:
    """What gloo writes for one call of each kind beside the numbers: the heads of its messages."""
    num = dist.get_world_size()
    x, whole = torch.zeros(SMALL * num), torch.zeros(SMALL * num * num)
    few = {("all_reduce", num): _added_to_few(torch.zeros(num)) for num in FEW}
    return few | {
        ("all_reduce", 0): _added("all_reduce", x, lambda: dist.all_reduce(x)),
        ("all_gather", 0): _added("all_gather", x, lambda: dist.all_gather_single(whole, x)),
        ("all_to_all", 0): _added(
            "all_to_all", x, lambda: dist.all_to_all_single(torch.empty_like(x), x)
        ),
        ("reduce_scatter", 0): _added(
            "reduce_scatter", x, lambda: scatter_into(x[:SMALL].clone(), x, _world()).wait()
        ),
        ("send", 0): _added("send", x, lambda: _send_on(x)),
        ("recv", 0): 0.0,
    }


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _added_to_few(x: Tensor) -> float:
    return _added("all_reduce", x, lambda: dist.all_reduce(x))


def _send_on(x: Tensor) -> None:
    """Send to the next rank what the one before sends as well."""
    here, num = dist.get_rank(), dist.get_world_size()
    works = [dist.irecv(torch.empty_like(x), (here - 1) % num), dist.isend(x, (here + 1) % num)]
    for work in works:
        assert work is not None  # this rank is in the group
        work.wait()


def _added(kind: str, x: Tensor, call: Callable[[], object]) -> float:
    call()
    dist.barrier()
    before = written_bytes() or 0
    call()
    written = (written_bytes() or 0) - before
    dist.barrier()
    top, bottom = (1, 1) if kind == "send" else sent_share(kind, dist.get_world_size())
    found = torch.tensor(written - x.nbytes * top / bottom, dtype=torch.float64)
    dist.all_reduce(found)
    return found.item() / dist.get_world_size()
