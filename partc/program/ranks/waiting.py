"""What is said where a rank waits in a call of all ranks in vain: which rank has not begun it, and
where that one is.

A rank that was given one batch less leaves its loop, and waits in ``dist.barrier()`` for the
others; these wait in a step for that rank, until torch gives up behind 30 minutes. A rank that
alone calls ``state_dict()`` waits in it for others, which wait in the script's barrier. A thread
beside each rank's own looks now and then how long it has stood still; as long as it comes on,
nothing is sent. Behind ``WAIT_S`` ranks say in torch's store where they stand, and the first of
those that wait in such a call tells of those that do not, who say so too where they wait. Where no
rank can come on any more, all end, behind
``END_S``: a thread that waits inside of a transfer cannot be given an error. A launcher that
was killed takes the store with it: then each rank that waits in a transfer ends by itself.

Over NCCL a step returns before its transfers are done, so that the rank is not seen to wait in it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from partc.frames import seen
from partc.program.ranks.meeting import NotMetError, answered
from partc.program.ranks.places import (
    Place,
    Sight,
    apart,
    elsewhere,
    forsaken,
    stand,
    told_of,
)

LOG = logging.getLogger("partc")
WAIT_S = 30.0  # behind which a rank that stands still says where
END_S = 300.0  # behind which ranks end that can come on no more; a transfer may take long, too
LOOK_S = 5.0
STEPS = 20  # of the last ones it is known how long they took
_ANSWER_S = 30.0  # so long the store may take, which torch would ask for many minutes


class Waiting(threading.Thread):
    """Looks at one rank, which says by ``begin`` and ``end``, and by ``within``, what it does."""

    def __init__(self, world: Any) -> None:
        super().__init__(daemon=True, name="partc waits")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.world = ref(world)
        self.of, self.over = threading.get_ident(), threading.Event()
        self.counts, self.call, self.inside = Counter[str](), "", False
        self.around, self.last, self.entered = "", "", 0
        self.moves, self.beat, self.since = 0, 0, time.monotonic()
        self.spot, self.spot_since = 0, self.since
        self.begun_at, self.steps_s = 0.0, deque[float](maxlen=STEPS)
        self.told: tuple[float, ...] = ()
        self.alike_since, self.seen = 0.0, dict[int, Place]()
        self.store: Any = None
        self.is_alone = False  # the store is gone

    def begin(self, kind: str) -> None:
        """The rank begins a call of a program."""
        self.moves += 1
        self._enter(kind)
        if kind == "step":
            if self.counts[kind] > 2:  # the first one compiles, and loads what it needs
                self.steps_s.append(self.since - self.begun_at)
            self.begun_at = self.since

    def end(self) -> None:
        self.moves += 1
        self._leave()

    @contextmanager
    def within(self, kind: str) -> Iterator[None]:
        """The rank is in a call of all ranks that is none of a program, which may begin inside."""
        outer, self.entered = self.around, self.entered + 1
        self._enter(kind)
        self.around = self.call
        try:
            yield
        finally:
            self.around = outer
            self._leave()

    def _enter(self, kind: str) -> None:
        self.counts[kind] += 1
        self.call = self.last = f"{kind} {self.counts[kind]}"
        self.inside, self.since = True, time.monotonic()

    def _leave(self) -> None:
        self.inside, self.since = bool(self.around), time.monotonic()
        self.call = self.around or self.last

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
        sight = seen(self.of, Sight.of)
        if not sight.waits or time.monotonic() - self.since < END_S:
            return
        try:
            self.store = answered(_own_store, _ANSWER_S)
            self.is_alone = False
        except (RuntimeError, NotMetError):
            if not self.over.is_set():
                _end(str(forsaken(self.rank, self.call, sight.line, END_S)))

    def stop(self) -> None:
        """The interpreter ends: no thread may be inside of torch then."""
        self.over.set()
        if self.is_alive():
            self.join(LOOK_S)

    # looks -----------------------------------------------------------------------------------
    def look(self) -> None:
        """Say where the rank is, if it stands still; or that it has come on since."""
        sight = seen(self.of, Sight.of)
        if sight.spot != self.spot:
            self.spot, self.spot_since = sight.spot, time.monotonic()
        if time.monotonic() - self.since < WAIT_S:
            if self.beat:
                self._retract()
            return
        self.store = self.store or answered(_own_store, _ANSWER_S)
        self.beat += 1
        place = self._place(sight)
        self.store.set(f"{self.rank}", json.dumps(asdict(place)))
        if self.store.check(["end"]):
            _end(self.store.get("end").decode())
        self._hear()
        if (self.inside or self._sends(sight)) and self._reads():
            self._compare(place, self._others())

    def _sends(self, sight: Sight) -> bool:
        """Whether the rank has waited for long in a transfer of an op on tensors of all ranks."""
        return time.monotonic() - self.spot_since > WAIT_S and sight.sends

    def _hear(self) -> None:
        """Say on this rank, too, that another one waits for it."""
        mine = f"told {self.rank}"
        if self.store.check([mine]) and (text := self.store.get(mine).decode()):
            self.store.set(mine, "")
            LOG.warning("partc: rank %s is waited for: %s", self.rank, text)

    def _retract(self) -> None:
        self.beat, self.seen = 0, {}
        self.store.set(f"{self.rank}", "")
        if self._reads():
            self.store.set("reader", "")

    def _reads(self) -> bool:
        """Whether this rank is the one that reads what all say, the first that waits in a step."""
        mine = str(self.rank).encode()
        return bool(self.store.compare_set("reader", "", str(self.rank)) == mine)

    def _place(self, sight: Sight) -> Place:
        moves, begun = self.moves + self.entered, dict(self.counts)
        return Place(self.call, self.inside, sight.line, sight.waits, moves, self.beat, begun)

    def _others(self) -> dict[int, Place]:
        """Where the other ranks are, of those that stand still."""
        names = [str(rank) for rank in range(self.size) if rank != self.rank]
        said = {name: self.store.get(name) for name in names if self.store.check([name])}
        return {int(name): Place(**json.loads(text)) for name, text in said.items() if text}

    def _compare(self, mine: Place, others: Mapping[int, Place]) -> None:
        """Tell, once, of ranks that have not begun this call; end where none can come on."""
        before, self.seen = self.seen, dict(others)
        away = apart(mine.call, others) if mine.inside else elsewhere(mine.line, others)
        turn = (mine.moves,) if mine.inside else (mine.moves, self.spot_since)
        if away and self.told != turn:
            self.told = turn
            self._tell(str(told_of(self.rank, mine, away, WAIT_S)), away)
        if not away or not stand(before, others, self.size - 1):
            self.alike_since = time.monotonic()
        elif time.monotonic() - self.alike_since > END_S - WAIT_S:
            text = str(told_of(self.rank, mine, away, END_S))
            self.store.set("end", text)
            _end(text)

    def _tell(self, text: str, away: Mapping[int, Place]) -> None:
        """Say it here, and let the ranks say it that wait elsewhere, perhaps for this one."""
        LOG.warning("partc: %s", text)
        for rank in (rank for rank, place in away.items() if place.waits):
            self.store.set(f"told {rank}", text)


def _end(text: str) -> None:
    """End this process, whose own thread never comes back from its transfer; also where nobody
    reads what it prints any more, which is an error.
    """
    try:
        sys.stdout.flush()
        print(f"partc, rank {os.environ.get('RANK', '')} ends: {text}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


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
    if known is not None and known.world() is world:
        return known
    if known is not None:
        known.over.set()
    else:
        atexit.register(lambda: _NOW[thread].stop())
    made = _NOW[thread] = Waiting(world)
    if made.size > 1:
        made.start()
    return made
