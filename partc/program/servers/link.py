"""One island's end of what it tells a server and hears from it: parameters in, gradients out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from partc.errors import RunError
from partc.program.model.habits import LOG
from partc.program.servers.flats import Flats, flat
from partc.program.servers.messages import (
    LEAVE,
    PARAMS,
    PUSH,
    Served,
    asks,
    epoch_of,
    is_answered,
    new_worker,
    pair_name,
)
from partc.program.servers.pairs import Message, Pair, PairBrokenError

LOOK_S = 0.05  # between two looks for who serves


class Link:
    """The link of one worker to the server, or to the replica that has taken over.

    ``number``: which worker this is, of all that ever joined. ``step``: the number of the step that
    it computes next; its push becomes a part of the update from the version of this number to the
    next. ``read``: the version that it computes with. ``acknowledged``: the steps whose pushes the
    server has acknowledged.
    """

    def __init__(
        self, named: dict[str, Tensor], store: Any, max_late: int, deadline_s: float
    ) -> None:
        store = store.clone()  # a client that waits lets nobody else ask through it
        self.store, self.max_late, self.deadline_s = store, max_late, deadline_s
        Served.of(named, max_late).check(store, deadline_s)
        self.like = flat(named.values())
        self.number = new_worker(store)
        self.step, self.read, self.epoch = -1, -1, epoch_of(store)
        self.acknowledged: list[int] = []
        self._kept: dict[int, Message] = {}  # pushes that are not acknowledged, by step
        self._arrived = threading.Condition()
        self._newest: tuple[int, Flats] = (-1, ())
        self._broken: list[Pair] = []
        self._pair = self._joined()

    def pull(self) -> Flats:
        """The newest parameters, at most so many versions behind the step."""
        self.read, flats = self._wait_for(lambda: self.step - self.max_late)
        return flats

    def push(self, grads: Flats) -> None:
        """Send the gradients of a step."""
        message = Message(PUSH, (self.step, self.read), grads)
        with self._arrived:
            self._kept[self.step] = message
        self.step += 1
        try:
            self._pair.send(message)
        except PairBrokenError:
            self._rejoin()

    def leave(self) -> None:
        """End, once all that was pushed is acknowledged."""
        self._wait_for(lambda: self.step)
        try:
            self._pair.send(Message(LEAVE))
        except PairBrokenError:
            return  # who is gone needs no word

    # inside --------------------------------------------------------------------------------------
    def _wait_for(self, least: Callable[[], int]) -> tuple[int, Flats]:
        """The newest parameters, once they are of a version that is late enough."""
        end = time.monotonic() + self.deadline_s
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._newest[0] >= least() or self._is_broken, 0.5)
                if self._newest[0] >= least():
                    return self._newest
            if self._is_broken:
                self._rejoin()
                end = time.monotonic() + self.deadline_s
            if time.monotonic() > end:
                raise self._alone("it has sent nothing")

    @property
    def _is_broken(self) -> bool:
        return self._pair in self._broken

    def _joined(self) -> Pair:
        """The pair with who serves, or with its replica where the server dies meanwhile."""
        while True:
            asks(self.store, self.epoch, self.number)
            if not self._is_soon(lambda: is_answered(self.store, self.epoch, self.number)):
                raise self._alone("it lets no worker join")
            why = "its replica serves"
            if epoch_of(self.store) == self.epoch:
                try:
                    return self._met()
                except PairBrokenError as error:
                    why = str(error)
            self._wait_for_replica(why)

    def _met(self) -> Pair:
        """The pair with who serves, whose first parameters have arrived."""
        pair = Pair.meet(self.store, pair_name(self.epoch, self.number), 1, self.deadline_s)
        first = pair.receive(self.like)
        version, *taken = first.numbers
        self.step = max(self.step, version)
        self._forget_lost(version, taken)
        self._take(first)
        threading.Thread(target=self._listen, args=(pair,), daemon=True).start()
        return pair

    def _rejoin(self) -> None:
        """Join the server's replica, and send it what was not acknowledged."""
        self._wait_for_replica("no replica has taken over")
        self._pair = self._joined()
        with self._arrived:
            kept = [message for _, message in sorted(self._kept.items())]
        try:
            for message in kept:
                self._pair.send(message)
        except PairBrokenError as error:
            raise self._alone(str(error)) from None

    def _wait_for_replica(self, why: str) -> None:
        """RunError, which says why, if no replica takes over."""
        if not self._is_soon(lambda: epoch_of(self.store) > self.epoch):
            raise self._alone(why)
        self.epoch = epoch_of(self.store)

    def _is_soon(self, is_so: Callable[[], bool]) -> bool:
        """Whether something is so before the deadline."""
        end = time.monotonic() + self.deadline_s
        while not (so := is_so()) and time.monotonic() < end:
            time.sleep(LOOK_S)
        return so

    def _listen(self, pair: Pair) -> None:
        """Take the parameters that come, until the pair breaks."""
        try:
            while True:
                self._take(pair.receive(self.like))
        except PairBrokenError:
            with self._arrived:
                self._broken.append(pair)
                self._arrived.notify_all()

    def _forget_lost(self, version: int, taken: Sequence[int]) -> None:
        """Forget pushes that only a server that died had, and whose updates are made without."""
        with self._arrived:
            lost = [step for step in self._kept if step < version and step not in taken]
            for step in lost:
                del self._kept[step]
        if lost:
            LOG.warning(
                "partc: worker %d: the server died with its gradients of step %s, which are in no "
                "update", self.number, ", ".join(map(str, lost)),
            )  # fmt: skip

    def _take(self, message: Message) -> None:
        assert message.kind == PARAMS
        version = message.numbers[0]
        with self._arrived:  # all updates before have been made, and of what this worker pushed
            if version >= self._newest[0]:  # else it came from the server that died
                self._newest = version, message.tensors
            for step in [step for step in self._kept if step < version]:
                del self._kept[step]
                self.acknowledged.append(step)
            self._arrived.notify_all()

    def _alone(self, why: str) -> RunError:
        return RunError(
            where=f"worker {self.number}",
            what=f"the server has not answered for {self.deadline_s:g} s", why=why,
            do="Look at what the server raised; with replicas = 1 in the plan's [servers] another "
            "process takes its place.",
        )  # fmt: skip


def trained(named: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The parameters that are trained, by name."""
    return {name: param for name, param in named if param.requires_grad}
