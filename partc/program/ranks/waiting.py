"""What is said where a rank waits in a step in vain: which rank has not begun it, and where it is.

A rank that was given one batch less leaves its loop, and waits in ``dist.barrier()`` for the
others; these wait in a step for that rank, until torch gives up behind 30 minutes. A thread beside
each rank's own looks now and then how long it has stood still; as long as it comes on, nothing is
sent. Behind ``WAIT_S`` ranks say in torch's store where they stand, and the first of those that
wait in a step tells of those that do not. Where no rank can come on any more, all end, behind
``END_S``: a thread that waits inside of a transfer cannot be given an error. A launcher that
was killed takes the store with it: then each rank that waits in a transfer ends by itself.

Over NCCL a step returns before its transfers are done, so that the rank is not seen to wait in it.
"""

from __future__ import annotations

import atexit
import json
import linecache
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from partc.errors import RunError
from partc.program.ranks.meeting import NotMetError, answered

LOG = logging.getLogger("partc")
WAIT_S = 30.0  # behind which a rank that stands still says where
END_S = 300.0  # behind which ranks end that can come on no more; a transfer may take long, too
LOOK_S = 5.0
STEPS = 20  # of the last ones it is known how long they took
_ANSWER_S = 30.0  # so long the store may take, which torch would ask for many minutes
_TRANSFERS = "distributed_c10d.py"  # torch's file whose functions wait for other ranks
_HERE, _PYTHON = str(Path(__file__).parents[2]), str(Path(os.__file__).parent)


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    ``call``: its last call of a program, ``"step 7"``; ``inside``: whether it is in it still.
    ``line``: of the script. ``waits``: whether it is in a transfer of torch's. ``moves``: how often
    it has begun and ended calls; ``beat``: how often it has said so.
    """

    call: str
    inside: bool
    line: str
    waits: bool
    moves: int
    beat: int


class Waiting(threading.Thread):
    """Looks at one rank, which says by ``begin`` and ``end`` what it does."""

    def __init__(self, world: Any) -> None:
        super().__init__(daemon=True, name="partc waits")
        self.world, self.rank, self.size = world, dist.get_rank(), dist.get_world_size()
        self.of, self.over = threading.get_ident(), threading.Event()
        self.counts, self.call, self.inside = Counter[str](), "", False
        self.moves, self.beat, self.since = 0, 0, time.monotonic()
        self.begun_at, self.steps_s = 0.0, deque[float](maxlen=STEPS)
        self.told, self.alike_since, self.seen = -1, 0.0, dict[int, Place]()
        self.store: Any = None
        self.is_alone = False  # the store is gone

    def begin(self, kind: str) -> None:
        """The rank begins a call of a program."""
        self.counts[kind] += 1
        self.call, self.inside = f"{kind} {self.counts[kind]}", True
        self.moves, self.since = self.moves + 1, time.monotonic()
        if kind == "step":
            if self.counts[kind] > 2:  # the first one compiles, and loads what it needs
                self.steps_s.append(self.since - self.begun_at)
            self.begun_at = self.since

    def end(self) -> None:
        self.inside, self.moves, self.since = False, self.moves + 1, time.monotonic()

    def run(self) -> None:
        while not self.over.wait(LOOK_S) and dist.is_initialized():
            try:
                self._look_alone() if self.is_alone else self.look()
            except (RuntimeError, NotMetError):  # the job ends, or its launcher has
                self.is_alone = True

    def _look_alone(self) -> None:
        """End behind ``END_S`` of a transfer, if the store is gone still: nobody is left who would
        end this process, and torch waits for half an hour, again where a script caught an error.
        """
        frame = sys._current_frames().get(self.of)
        waits = frame is not None and (is_transfer(frame) or ".wait()" in _text_of(frame))
        if not waits or time.monotonic() - self.since < END_S:
            return
        try:
            self.store = answered(_own_store, _ANSWER_S)
            self.is_alone = False
        except (RuntimeError, NotMetError):
            if not self.over.is_set():
                _leave(str(_forsaken(self.rank, self.call, script_line(frame))))

    def stop(self) -> None:
        """The interpreter ends: no thread may be inside of torch then."""
        self.over.set()
        if self.is_alive():
            self.join(LOOK_S)

    # looks -----------------------------------------------------------------------------------
    def look(self) -> None:
        """Say where the rank is, if it stands still; or that it has come on since."""
        if time.monotonic() - self.since < WAIT_S:
            if self.beat:
                self._retract()
            return
        self.store = self.store or answered(_own_store, _ANSWER_S)
        self.beat += 1
        self.store.set(f"{self.rank}", json.dumps(asdict(self._place())))
        if self.store.check(["end"]):
            _leave(self.store.get("end").decode())
        if self.inside and self._reads():
            self._compare(self._others())

    def _retract(self) -> None:
        self.beat, self.seen = 0, {}
        self.store.set(f"{self.rank}", "")
        if self._reads():
            self.store.set("reader", "")

    def _reads(self) -> bool:
        """Whether this rank is the one that reads what all say, the first that waits in a step."""
        mine = str(self.rank).encode()
        return bool(self.store.compare_set("reader", "", str(self.rank)) == mine)

    def _place(self) -> Place:
        frame = sys._current_frames().get(self.of)
        line, waits = "", False
        if frame is not None:
            line, waits = script_line(frame), is_transfer(frame)
        return Place(self.call, self.inside, line, waits, self.moves, self.beat)

    def _others(self) -> dict[int, Place]:
        """Where the other ranks are, of those that stand still."""
        names = [str(rank) for rank in range(self.size) if rank != self.rank]
        said = {name: self.store.get(name) for name in names if self.store.check([name])}
        return {int(name): Place(**json.loads(text)) for name, text in said.items() if text}

    def _compare(self, others: Mapping[int, Place]) -> None:
        """Tell, once, of ranks that have not begun this step; end where none can come on."""
        before, self.seen = self.seen, dict(others)
        apart = _apart(self.call, others)
        if apart and self.told != self.moves:
            self.told = self.moves
            LOG.warning("partc: %s", _told(self.rank, self.call, apart, WAIT_S))
        if not apart or not _stands(before, others, self.size - 1):
            self.alike_since = time.monotonic()
        elif time.monotonic() - self.alike_since > END_S - WAIT_S:
            text = str(_told(self.rank, self.call, apart, END_S))
            self.store.set("end", text)
            _leave(text)


def _apart(call: str, others: Mapping[int, Place]) -> dict[int, Place]:
    """The ranks that have not begun a call; a pipeline's first may have ended it long before."""
    outside = {rank: place for rank, place in others.items() if not place.inside}
    return {rank: place for rank, place in outside.items() if place.call != call}


def _stands(before: Mapping[int, Place], now: Mapping[int, Place], num: int) -> bool:
    """Whether all others wait, in a step or in a transfer, and have since the last look."""
    return len(now) == num and all(
        (place.inside or place.waits)
        and (was := before.get(rank)) is not None
        and was.moves == place.moves
        and was.beat < place.beat
        for rank, place in now.items()
    )


def _told(rank: int, call: str, apart: Mapping[int, Place], seconds: float) -> RunError:
    each = [
        f"rank {other} has not begun it: its last was {place.call or 'none'}"
        + (f", and it is at {place.line}" if place.line else "")
        for other, place in [*apart.items()][:4]
    ]
    return RunError(
        where=f"rank {rank}, {call}", what=f"it has waited {seconds:g} s; {'; '.join(each)}",
        why="all ranks compute a step together, so that each of them takes as many",
        do="Give every rank as many batches: stage.loader(dataset) does, or a DistributedSampler "
        "over program.data_world with DataLoader(drop_last=True); or let all ranks leave the loop "
        "behind the shortest, for batch, _ in zip(loader, range(fewest)).",
    )  # fmt: skip


def _forsaken(rank: int, call: str, line: str) -> RunError:
    return RunError(
        where=f"rank {rank}" + (f", {line}" if line else ""),
        what=f"it has waited for other ranks for {END_S:g} s; its last call was {call or 'none'}",
        why="torch's store is gone: the launcher has ended, which else ends all ranks",
        do="Look at what the ranks printed before, and start the job again.",
    )


def _leave(text: str) -> None:
    """End this process, whose own thread never comes back from its transfer; also where nobody
    reads what it prints any more, which is an error.
    """
    try:
        sys.stdout.flush()
        print(f"partc, rank {os.environ.get('RANK', '')} ends: {text}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def is_transfer(frame: FrameType) -> bool:
    """Whether a thread is in a function of torch's that waits for other ranks."""
    return frame.f_code.co_filename.endswith(_TRANSFERS)


def _text_of(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def script_line(frame: FrameType | None) -> str:
    """``train.py:31: dist.barrier()``, the innermost line of the script."""
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith((_HERE, _PYTHON, "<")):
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{Path(file).name}:{frame.f_lineno}" + (f" ({text})" if text else "")
        frame = frame.f_back
    return ""


def _own_store() -> Any:
    """Torch's store by a connection of its own, as another may be busy waiting."""
    store: Any = dist.distributed_c10d._get_default_store()
    store = store.clone()
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    return PrefixStore("partc waits", store)


_NOW: dict[int, Waiting] = {}  # by the thread of a rank


def known_waiting(thread: int) -> Waiting | None:
    """What looks at the rank of a thread, if it has begun a step."""
    return _NOW.get(thread)


def waiting() -> Waiting:
    """What looks at this rank, from its first step in a process group on."""
    world, thread = dist.group.WORLD, threading.get_ident()
    known = _NOW.get(thread)
    if known is not None and known.world is world:
        return known
    if known is not None:
        known.over.set()
    else:
        atexit.register(lambda: _NOW[thread].stop())
    made = _NOW[thread] = Waiting(world)
    if made.size > 1:
        made.start()
    return made
