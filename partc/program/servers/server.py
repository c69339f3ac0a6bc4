"""A server beside programs that join and leave, and its replica, which takes over when it dies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from partc.errors import RunError
from partc.program.model.habits import LOG
from partc.program.servers.flats import Flats, flat, parts
from partc.program.servers.lead import Lead, Mean
from partc.program.servers.link import trained
from partc.program.servers.log import Update, line_of
from partc.program.servers.messages import END, FIRST, HELD, MEAN, REPLICA, Served, take_lead
from partc.program.servers.numbers import check_deadline, check_late, check_replicas
from partc.program.servers.pairs import Message, Pair, PairBrokenError
from partc.wrong_calls import check_whole_number

PATIENT = 3  # times the deadline of workers: a server waits for these, and its replica for both


class Server:
    """The process that owns the parameters and their optimizer.

        server = Server(model, store, max_steps_late=2, replicas=1)
        for version in server:
            optimizer.step()
            optimizer.zero_grad()

    The replica runs the same loop with ``is_replica=True``. A push is acknowledged once it is a
    part of an update that the replica has too: then workers are given the next version.

    Attributes:
        version: how many updates the parameters have behind them.
        log: the updates since this process began; behind them the version that was given last.
    """

    def __init__(
        self, model: nn.Module, store: Any, *, max_steps_late: int = 0, replicas: int = 0,
        is_replica: bool = False, deadline_s: float = 60.0, version: int = 0,
        log_file: str | Path | None = None,
    ) -> None:  # fmt: skip
        """``store``: a TCPStore that all processes have. ``deadline_s``: how long it waits for
        workers; longer than a step takes. ``version``: where a training goes on. ``log_file``: gets
        a line for each update.
        """
        check_late(max_steps_late, "Server")
        check_replicas(replicas, "Server")
        check_deadline(deadline_s, "Server")
        check_whole_number(version, "Server(version=...)")
        named, store = trained([*model.named_parameters()]), store.clone()
        self.params = [*named.values()]
        self.store, self.max_late, self.deadline_s = store, max_steps_late, deadline_s
        self.version, self.log_file = version, log_file
        self.log: list[Update] = []
        self._replica = self._other = None
        if replicas:
            other = Pair.meet(store, "replica", int(is_replica), PATIENT * deadline_s)
            self._replica, self._other = (None, other) if is_replica else (other, None)
        served = Served.of(named, max_steps_late)
        if is_replica:
            served.check(store, deadline_s)
        else:
            served.tell(store)
        self._lead = None if is_replica else self._leading(0)

    def __iter__(self) -> Iterator[int]:
        """The version that the parameters have, with the gradient of the next update, until all
        workers have left.
        """
        try:
            while (mean := self._mean()) is not None:
                self._note(Update(self.version, dict(mean.read), mean.given))
                for param, part in zip(self.params, parts(mean.flats, self.params), strict=True):
                    param.grad = part
                yield self.version
                self.version += 1
            if self._lead is not None:  # who was given the last version, which no update follows
                self._note(Update(self.version, {}, self._lead.given))
        finally:
            if self._lead is not None:
                self._lead.end()

    # inside --------------------------------------------------------------------------------------
    def _mean(self) -> Mean | None:
        if self._lead is None:
            found = self._from_server()
            if found is not None or self._lead is None:
                return found
        found = self._lead.mean(self.version, self._flats())
        self._tell_replica(found)
        return found

    def _flats(self) -> Flats:
        return flat(self.params)

    def _leading(self, epoch: int, awaited: Iterable[int] = ()) -> Lead:
        return Lead(
            self.store, self._flats(), epoch=epoch, max_late=self.max_late,
            deadline_s=self.deadline_s, taken=self._taken, awaited=[*awaited],
        )  # fmt: skip

    def _taken(self, worker: int) -> list[int]:
        """The last steps of a worker whose pushes are in updates, as many as it may wait for."""
        steps = (update.version for update in reversed(self.log) if worker in update.read)
        return [*islice(steps, self.max_late + 1)]

    def _tell_replica(self, mean: Mean | None) -> None:
        """Go on once the replica has what is about to be acknowledged."""
        if self._replica is None:
            return
        try:
            self._replica.send(_as_message(self.version, mean))
            if mean is not None:
                self._replica.receive(())
        except PairBrokenError as error:
            self._replica = None
            if not take_lead(self.store, FIRST):
                raise _replaced("the replica has not heard from this server") from None
            if mean is not None:
                LOG.warning("partc: the server goes on without its replica (%s)", error)

    def _from_server(self) -> Mean | None:
        """The next update as the server has it; where the server has died this replica leads."""
        assert self._other is not None
        found = None
        try:
            message = self._other.receive(self._flats())
            if message.kind == END:
                return None
            found = _as_mean(message)
            self._other.send(Message(HELD))
        except PairBrokenError as error:
            self._take_over(error, found)
        return found

    def _take_over(self, error: PairBrokenError, last: Mean | None) -> None:
        """Lead in place of the server. ``last``: the update that it sent and was not heard about:
        it may have acknowledged that one.
        """
        if not take_lead(self.store, REPLICA):
            raise _replaced("the server has not heard from this replica") from None
        LOG.warning("partc: the replica takes the place of its server (%s)", error)
        read = dict(last.read) if last else self.log[-1].read if self.log else {}
        self._lead = self._leading(1, read)

    def _note(self, update: Update) -> None:
        self.log.append(update)
        if self.log_file is not None:
            with Path(self.log_file).open("a", encoding="utf-8") as file:
                file.write(line_of(update))


def _as_mean(message: Message) -> Mean:
    numbers = message.numbers[1:]
    return Mean(message.tensors, tuple(zip(numbers[::2], numbers[1::2], strict=True)))


def _as_message(version: int, mean: Mean | None) -> Message:
    if mean is None:
        return Message(END)
    return Message(MEAN, (version, *(n for pair in mean.read for n in pair)), mean.flats)


def _replaced(why: str) -> RunError:
    return RunError(
        where="server", what="another process serves in its place", why=why,
        do="Let this process end; the other one has all that was acknowledged.",
    )  # fmt: skip
