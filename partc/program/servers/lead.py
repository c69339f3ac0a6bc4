"""Who serves: it lets workers join, and makes the mean of their gradients for each version."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from partc.errors import RunError
from partc.program.servers.flats import Flats
from partc.program.servers.messages import LEAVE, PARAMS, answers, asked, pair_name
from partc.program.servers.pairs import Message, Pair, PairBrokenError

LOOK_S = 0.02  # between two looks for workers that want to join


@dataclass(frozen=True)
class Mean:
    """The mean gradient of a version's update, and who computed it: workers, and the versions of
    the parameters that they read. ``given``: to how many the version was sent.
    """

    flats: Flats
    read: tuple[tuple[int, int], ...]
    given: int = 0


class Lead:
    """The workers of one server, or of the replica that took over.

    ``epoch``: 0 or 1 of these. ``taken``: the last steps of a worker whose pushes are in updates.
    ``awaited``: workers that the server had, which are given time to come.
    """

    def __init__(
        self, store: Any, like: Flats, *, epoch: int, max_late: int, deadline_s: float,
        taken: Callable[[int], Sequence[int]], awaited: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.store, self.like, self.epoch = store.clone(), like, epoch
        self.max_late, self.deadline_s, self.taken = max_late, deadline_s, taken
        self.live: dict[int, Pair] = {}
        self.pushed: dict[int, dict[int, Message]] = {}  # by step and worker
        self.left: list[int] = []
        self.given = 0  # how often the parameters of the version were sent
        self.awaited, self._until = {*awaited}, time.monotonic() + deadline_s
        self._events: queue.Queue[tuple[int, Pair, Message | None]] = queue.Queue()
        self._over = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def mean(self, version: int, params: Flats) -> Mean | None:
        """Give workers the parameters of a version; the mean of their gradients for the next one.

        None where all workers have left. RunError if none comes.
        """
        self.given = 0
        for worker in [*self.live]:
            self._give(worker, version, params)
        end = time.monotonic() + self.deadline_s
        while not self._is_complete(version):
            if self.left and not self.live and not self.awaited and self._events.empty():
                return None
            self._next_event(version, params)
            end = max(end, time.monotonic() + self.deadline_s * bool(self.live))
            if time.monotonic() > end:
                raise _none_comes(self.deadline_s)
        return self._mean_of(version)

    def end(self) -> None:
        """Let nobody join any more."""
        self._over.set()

    def _is_complete(self, version: int) -> bool:
        """Whether all workers have pushed their gradients of a version's update."""
        if time.monotonic() > self._until:
            self.awaited.clear()
        done = self.pushed.get(version, {})
        return bool(done) and not self.awaited and not self.live.keys() - done.keys()

    def _mean_of(self, version: int) -> Mean:
        pushed = dict(sorted(self.pushed.pop(version).items()))
        each = [message.tensors for message in pushed.values()]
        flats = tuple(sum(same[1:], same[0]) / len(each) for same in zip(*each, strict=True))
        read = tuple((worker, message.numbers[1]) for worker, message in pushed.items())
        return Mean(flats, read, self.given)

    # workers -------------------------------------------------------------------------------------
    def _next_event(self, version: int, params: Flats) -> None:
        """Take what a worker says, if it says something soon."""
        try:
            worker, pair, message = self._events.get(timeout=LOOK_S)
        except queue.Empty:
            return
        if message is None:
            self._gone(worker, pair)
        elif message.kind == PARAMS:  # it asks for them: it joins
            self.live[worker] = pair
            self.awaited.discard(worker)
            self._give(worker, version, params, self.taken(worker))
        elif message.kind == LEAVE:
            self.left.append(worker)
            self._gone(worker, pair)
        else:
            self._take(worker, message, version)

    def _take(self, worker: int, message: Message, version: int) -> None:
        step, read = message.numbers
        if step - read > self.max_late:
            raise RunError(
                where=f"server, worker {worker}", what=f"step {step} read version {read}",
                why=f"the plan's [servers] has max_steps_late = {self.max_late}",
                do="Give server and workers the same number.",
            )  # fmt: skip
        if step >= version:  # an update that is made stays as it is
            self.pushed.setdefault(step, {})[worker] = message

    def _gone(self, worker: int, pair: Pair) -> None:
        """Forget a worker; what it has pushed counts."""
        if self.live.get(worker) is pair:
            del self.live[worker]

    def _give(
        self, worker: int, version: int, params: Flats, taken: Sequence[int] = ()
    ) -> None:  # fmt: skip
        pair = self.live[worker]
        try:
            self.given += 1
            pair.send(Message(PARAMS, (version, *taken), params))
        except PairBrokenError:
            self._gone(worker, pair)

    # threads -------------------------------------------------------------------------------------
    def _look(self) -> None:
        """Let workers join that ask for it, for as long as there is a store."""
        known, store = set[int](), self.store.clone()
        while not self._over.wait(LOOK_S):
            try:
                new = asked(store, self.epoch, known)
            except RuntimeError:
                return
            known.update(new)
            for worker in new:
                threading.Thread(target=self._hear, args=(worker,), daemon=True).start()

    def _hear(self, worker: int) -> None:
        """Meet a worker, and tell the main thread what it says."""
        try:
            answers(self.store, self.epoch, worker)
            pair = Pair.meet(self.store, pair_name(self.epoch, worker), 0, self.deadline_s)
        except PairBrokenError:
            return
        self._events.put((worker, pair, Message(PARAMS)))
        try:
            while True:
                self._events.put((worker, pair, pair.receive(self.like)))
        except PairBrokenError:
            self._events.put((worker, pair, None))


def _none_comes(deadline_s: float) -> RunError:
    return RunError(
        where="server", what=f"there was no worker for {deadline_s:g} s",
        why="a server takes gradients that workers push",
        do="Start workers with the store of this server, or give it a longer deadline_s.",
    )  # fmt: skip
