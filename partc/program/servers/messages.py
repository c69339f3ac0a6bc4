"""Kinds of messages between a server, its replica and workers, and what they say in the store."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import Any

from torch import Tensor

from partc.errors import RunError

PARAMS, PUSH, LEAVE, MEAN, HELD, END = range(6)
_POLL_S = 0.02  # between two looks for a server
LEAD = "lead"  # who serves once the server and its replica no longer hear each other
FIRST, REPLICA = "first", "replica"
SERVED = "served"  # what the server owns


@dataclass(frozen=True)
class Served:
    """What server and workers have alike: dtype and shape of each parameter, and the bound."""

    params: dict[str, str]
    max_steps_late: int

    @classmethod
    def of(cls, named: Mapping[str, Tensor], max_late: int) -> Served:
        shapes = {name: f"{x.dtype} {[*x.shape]}" for name, x in named.items()}
        return cls(shapes, max_late)

    def tell(self, store: Any) -> None:
        store.set(SERVED, json.dumps(asdict(self)))

    def check(self, store: Any, deadline_s: float) -> None:
        """RunError unless the server has the same; waits until there is one."""
        end = monotonic() + deadline_s
        while not store.check([SERVED]):  # store.wait would print warnings of its own at the end
            if monotonic() > end:
                raise _no_server(deadline_s)
            sleep(_POLL_S)
        there = Served(**json.loads(store.get(SERVED)))
        if there.max_steps_late != self.max_steps_late:
            raise _refused(
                f"the server has max_steps_late = {there.max_steps_late}, and this worker "
                f"{self.max_steps_late}", "one bound holds for all pushes",
            )  # fmt: skip
        why = "an update is one of the same parameters on all processes"
        for name in [*self.params, *there.params]:
            mine, its = self.params.get(name, "none"), there.params.get(name, "none")
            if mine != its:
                raise _refused(f"{name} is {mine} here, and {its} on the server", why)
        if [*self.params] != [*there.params]:
            raise _refused("the server has the parameters in another order", why)


def _no_server(deadline_s: float) -> RunError:
    return RunError(
        where="server and worker", what=f"there was no server for {deadline_s:g} s",
        why="a server writes to the store what it serves, and workers wait for that",
        do="Start the process of Server(model, store, ...) first, on this store; or wait longer, "
        "deadline_s=...",
    )  # fmt: skip


def _refused(what: str, why: str) -> RunError:
    return RunError(
        where="server and worker", what=what, why=why,
        do="Give both the same model, with the same parameters frozen, and the same plan.",
    )  # fmt: skip


def pair_name(epoch: int, worker: int) -> str:
    """Of a worker and who serves: the server (epoch 0), or the replica that took over (1)."""
    return f"pair {epoch} {worker}"


def asks(store: Any, epoch: int, worker: int) -> None:
    """Ask who serves to let a worker join."""
    store.set(f"ask {epoch} {worker}", "")


def answers(store: Any, epoch: int, worker: int) -> None:
    """Say that who serves is about to meet a worker."""
    store.set(f"answer {epoch} {worker}", "")


def is_answered(store: Any, epoch: int, worker: int) -> bool:
    """Whether who serves is about to meet a worker, or has another in its place that will."""
    return bool(store.check([f"answer {epoch} {worker}"])) or epoch_of(store) > epoch


def new_worker(store: Any) -> int:
    """The number of a worker that joins for the first time."""
    return int(store.add("workers", 1)) - 1


def asked(store: Any, epoch: int, known: Collection[int]) -> list[int]:
    """The workers that have asked, but for those that are known."""
    every = range(int(store.add("workers", 0)))
    return [n for n in every if n not in known and store.check([f"ask {epoch} {n}"])]


def epoch_of(store: Any) -> int:
    """0, or 1 once the replica serves."""
    return int(store.check([LEAD]) and store.get(LEAD).decode() == REPLICA)


def take_lead(store: Any, who: str) -> bool:
    """Whether this process, the first server or its replica, serves from now on: the first of both
    to ask.
    """
    return bool(store.compare_set(LEAD, "", who).decode() == who)
