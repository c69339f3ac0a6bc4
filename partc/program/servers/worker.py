"""What an island's script has of a server: it pulls parameters, computes, and pushes gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.errors import RunError, UsageError
from partc.plan import Plan
from partc.plan.servers import SERVERS
from partc.program.servers.flats import Flats, flat, parts
from partc.program.servers.link import Link, trained
from partc.program.servers.numbers import check_deadline, check_late
from partc.wrong_calls import check_whole_number

if TYPE_CHECKING:
    from partc.program.stage.runtime import Stage


class Worker:
    """An island of one process, with any model of torch.

    worker = Worker(model, store, max_steps_late=2)
    while worker.pull() < 1000:
        loss_of(model, batch(worker.step)).backward()
        worker.push()
    worker.leave()
    """

    def __init__(
        self, model: nn.Module, store: Any, *, max_steps_late: int = 0, deadline_s: float = 60.0
    ) -> None:
        """``store``: a TCPStore that all processes have. ``deadline_s``: how long it waits for the
        server; longer than a step takes.
        """
        check_late(max_steps_late, "Worker")
        check_deadline(deadline_s, "Worker")
        self.params = trained([*model.named_parameters()])
        self._link = Link(self.params, store, max_steps_late, deadline_s)

    @property
    def number(self) -> int:
        """Which worker this is, of all that ever joined."""
        return self._link.number

    @property
    def step(self) -> int:
        """The number of the step that it computes next."""
        return self._link.step

    @property
    def acknowledged(self) -> list[int]:
        """The steps whose pushes the server has acknowledged: its replica has them too."""
        return self._link.acknowledged

    @torch.no_grad()
    def pull(self) -> int:
        """Take the newest parameters, at most so many versions behind the step; the step's number.

        RunError if the server has ended and no replica takes over.
        """
        known, flats = self._link.read, self._link.pull()
        if self._link.read != known:
            params = [*self.params.values()]
            for param, part in zip(params, parts(flats, params), strict=True):
                param.copy_(part)
        return self.step

    def push(self) -> None:
        """Send the gradients to the server; there are none behind it."""
        self._link.push(_flat_gradients({name: p.grad for name, p in self.params.items()}))
        for param in self.params.values():
            param.grad = None

    def leave(self) -> None:
        """End, once all that was pushed is acknowledged."""
        self._link.leave()


class IslandWorker:
    """An island that runs a program of partc, on one rank or many; all ranks call it together.

        stage = program.module()
        worker = IslandWorker(stage, store)
        while worker.pull() < 1000:
            stage.step(*batch(worker.step))
            worker.push()
        worker.leave()

    The first rank speaks to the server. If a rank of an island dies, its island has died.

    Attributes:
        number: which worker this is, of all that ever joined.
        step: the number of the step that it computes next.
    """

    def __init__(
        self, stage: Stage, store: Any, *, seed: int = 0, deadline_s: float = 60.0
    ) -> None:
        """``store``: a TCPStore that all processes have, which the first rank asks. ``seed``: of
        random numbers, which follow from it, the worker's number and the step's.
        """
        check_whole_number(seed, "IslandWorker(seed=...)")
        check_deadline(deadline_s, "IslandWorker")
        how = Plan.parse(stage._program.plan).servers
        if how is None or how.max_steps_late is None:
            raise UsageError(
                where="IslandWorker(stage)", what="the program has no server beside its islands",
                why=f"its plan has no [{SERVERS}], or its mesh has the islands",
                do="Compile for a mesh without the axis island, with [servers] in the plan.",
            )  # fmt: skip
        self.stage, self.seed, self.number, self.step = stage, seed, -1, -1
        self._tensors, self._version = stage._tensors, -1
        self._like = {n: torch.empty(s.shape, dtype=s.dtype) for n, s in self._shards().items()}
        self._link = None
        if dist.get_rank() == 0:
            self._link = Link(self._like, store, how.max_steps_late, deadline_s)
        stage.is_served = True

    def pull(self) -> int:
        """Take the newest parameters, at most so many versions behind the step; the step's number.

        RunError if the server has ended and no replica takes over.
        """
        flats = self._link.pull() if self._link else flat(self._like.values())
        said = [0, 0, 0] if self._link is None else [
            self._link.number, self._link.step, self._link.read
        ]  # fmt: skip
        self.number, self.step, version = self._from_first(torch.tensor(said)).tolist()
        if version != self._version:
            flats = tuple(self._from_first(x) for x in flats)
            whole = parts(flats, [*self._like.values()])
            self._tensors.fill(dict(zip(self._like, whole, strict=True)))
        self._version = version
        self.stage.seed((self.seed << 32) + self.number, self.step)
        return self.step

    def push(self) -> None:
        """Send the gradients to the server; there are none behind it."""
        for shown in self.stage._shown.values():
            shown.read()  # what the script has made of its gradient
        held = self._tensors.held
        whole: dict[str, Tensor | None] = {}
        for name, shard in self._shards().items():
            grad = held[name].grad
            whole[name] = None if grad is None else self._tensors.join(shard, grad)
        grads = _flat_gradients(whole)
        self.stage.zero_grad()
        if self._link is not None:
            self._link.push(grads)

    def leave(self) -> None:
        """End, once all that was pushed is acknowledged."""
        if self._link is not None:
            self._link.leave()

    def _shards(self) -> dict[str, Any]:
        """The parameters that the program trains, in the model's order."""
        names = self._tensors.model_names()
        return {n: self._tensors.shards[n] for n in names if self.stage.trains(n)
                and n in self._tensors.shards}  # fmt: skip

    def _from_first(self, x: Tensor) -> Tensor:
        """The first rank's tensor, on all ranks of the island."""
        if dist.get_world_size() == 1:
            return x
        found = x.to(self._tensors.device)
        dist.broadcast(found, 0)
        return found.to(x.device)


def _flat_gradients(grads: dict[str, Tensor | None]) -> Flats:
    """Gradients, flat; RunError if a parameter has none."""
    lacking = [name for name, grad in grads.items() if grad is None]
    if lacking:
        raise RunError(
            where=f"push, {lacking[0]}", what="it has no gradient",
            why="an update of the server is one of all parameters that are trained",
            do="Push behind the backward of a step; freeze what no loss reads, on the server too.",
        )  # fmt: skip
    return flat(grad for grad in grads.values() if grad is not None)
