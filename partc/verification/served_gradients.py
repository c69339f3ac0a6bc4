"""Compare the step of islands, some of which own parameters, with its definition.

Before the step every island has other parameters, and its batch has other rows. Then every island
that computes has to have the owner's parameters, and the owner alone the mean over these islands of
the gradients that each gives alone, added to what was there. The loss has to be the mean of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from partc.plan.mesh import ISLAND
from partc.plan.servers import Servers
from partc.program.role import Role
from partc.verification.late_gradients import error_of

SERVED_GRADIENT, SERVED_LOSS = "gradient on its server", "loss of all islands"
SERVED_PARAMETER = "parameter of a server"
Compared = tuple[str, str, float]  # kind, name, error
Inputs = list[Tensor]
Run = Callable[[Inputs], Tensor | None]
Alone = Callable[[Inputs, int], Tensor | None]


@dataclass(frozen=True)
class ServedGradients:
    """What one rank compares."""

    role: Role
    how: Servers
    rank: int

    def rows(self, step: Any, inputs: Inputs, run: Run, alone: Alone) -> Iterator[Compared]:
        """What was compared, of which tensor, and its relative error.

        ``run`` lets the rank's module take a step, ``alone`` one without other islands.
        """
        held = self.role.tensors(step)
        trained = {name: x for name, x in held.items() if x.requires_grad}
        before = {name: self._moved(x).clone() for name, x in trained.items()}
        own = self._rows(inputs)
        given = run(own)
        found = {name: x.grad for name, x in trained.items()}
        owners = {name: self._owner(step, grad) for name, grad in found.items()}
        for name, owner in owners.items():
            yield SERVED_GRADIENT, name, inf if owner is None else 0.0
        for name, x in trained.items():
            if self._computes or owners[name] == self._island:
                whole = self._of(step, before[name], owners[name] == self._island)
                yield SERVED_PARAMETER, name, error_of(x, whole)
            else:
                self._of(step, before[name], False)
        yield from self._compare(step, given, found, lambda: run(own), lambda: alone(own, 0))

    def _compare(
        self, step: Any, given: Tensor | None, found: dict[str, Tensor | None],
        again: Callable[[], Tensor | None], alone: Callable[[], Tensor | None],
    ) -> Iterator[Compared]:  # fmt: skip
        """Loss and gradients of the step, and of another one that adds to these."""
        held = self.role.tensors(step)
        once = {name: None if grad is None else grad.clone() for name, grad in found.items()}
        again()
        twice = {name: held[name].grad for name in found}
        for name in found:
            held[name].grad = None
        loss = alone()
        num = len(self.how.workers(self.role.mesh))
        if given is not None and loss is not None:
            whole = self._of(step, loss.double(), self._computes) / num
            yield SERVED_LOSS, "loss", error_of(given.double(), whole)
        for name in found:
            grad = held[name].grad
            mean = self._of(step, torch.zeros_like(held[name]) if grad is None else grad,
                            self._computes) / num  # fmt: skip
            if once[name] is not None:
                yield SERVED_GRADIENT, name, error_of(once[name], mean)
                yield SERVED_GRADIENT, name, error_of(twice[name], 2 * mean)
            held[name].grad = None

    def _owner(self, step: Any, grad: Tensor | None) -> int | None:
        """The island that has the gradient of a parameter; None unless one server alone has it."""
        mesh = self.role.mesh
        has = torch.zeros(mesh.islands, dtype=torch.float64)
        has[self._island] = grad is not None
        self._sum(step, has)
        found = has.nonzero().flatten().tolist()
        return found[0] if len(found) == 1 and found[0] in self.how.serving(mesh) else None

    def _of(self, step: Any, x: Tensor, counts: bool) -> Tensor:
        """The sum over the islands that count."""
        whole = x.detach().clone() if counts else torch.zeros_like(x)
        self._sum(step, whole)
        return whole

    def _sum(self, step: Any, x: Tensor) -> None:
        self.role.module.__dict__["dist"].all_reduce(x, group=step.island)

    def _moved(self, param: Tensor) -> Tensor:
        """A parameter, changed by another factor on each island, and without gradient."""
        param.grad = None
        with torch.no_grad():
            return param.mul_(1 + (1 + self._island) / 32)

    def _rows(self, inputs: Inputs) -> Inputs:
        """This island's batch: some rows of the batch, the same of all inputs."""
        numbers = torch.Generator().manual_seed(1_000 + self._island)
        rows = max((x.shape[0] for x in inputs if x.dim()), default=0)
        order = torch.randint(max(1, rows), (rows,), generator=numbers)
        return [x[order.to(x.device)] if x.dim() and x.shape[0] == rows else x for x in inputs]

    @property
    def _island(self) -> int:
        return self.role.mesh.coords(self.rank)[ISLAND]

    @property
    def _computes(self) -> bool:
        return self._island in self.how.workers(self.role.mesh)
