"""Compare the step of islands that compute unequal numbers of microbatches with its definition.

Each microbatch has other rows of the batch. What a step gives has to be the mean over the
microbatches of all islands of what each gives alone, loss and gradients, and has to be added to the
gradients that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partc.plan.mesh import ISLAND
from partc.plan.uneven import Uneven
from partc.program.role import Role
from partc.verification.late_gradients import error_of

UNEVEN_GRADIENT, UNEVEN_LOSS = "gradient of all islands", "loss of all islands"
Compared = tuple[str, str, float]  # kind, name, error
Inputs = list[Tensor]
Run = Callable[[Inputs], Tensor | None]
Alone = Callable[[Inputs, int], Tensor | None]


@dataclass(frozen=True)
class UnevenGradients:
    """What one rank compares."""

    role: Role
    how: Uneven
    rank: int

    def rows(self, step: Any, inputs: Inputs, run: Run, alone: Alone) -> Iterator[Compared]:
        """What was compared, of which tensor, and its relative error.

        ``run`` lets the rank's module take a step of several microbatches, ``alone`` one of a
        single one, which draws what the one of this number draws.
        """
        held = self.role.tensors(step)
        island = self.role.mesh.coords(self.rank)[ISLAND]
        turns = [self._turn(inputs, island, i) for i in range(self.how.of_each[island])]
        loss = torch.zeros((), dtype=torch.float64)
        self._clear(held.values())
        for number, turn in enumerate(turns):
            found = alone(turn, number)
            loss += 0.0 if found is None else found.cpu()
        wanted = {name: x.grad.clone() for name, x in held.items() if x.grad is not None}
        wanted[""] = loss.to(device=step_device(step))
        for each in wanted.values():
            self.role.module.__dict__["dist"].all_reduce(each, group=step.island)
            each /= self.how.whole
        whole = wanted.pop("")
        for times in (1, 2):
            if times == 1:
                self._clear(held.values())
            given = run(self._joined(turns))
            if given is not None:
                yield UNEVEN_LOSS, "loss", error_of(given.double(), whole)
            for name, grad in wanted.items():
                yield UNEVEN_GRADIENT, name, error_of(held[name].grad, times * grad)

    @staticmethod
    def _clear(tensors: Any) -> None:
        for x in tensors:
            x.grad = None

    def _turn(self, inputs: Inputs, island: int, number: int) -> Inputs:
        """The rows of one microbatch: some of those of the batch, the same of all inputs."""
        generator = torch.Generator().manual_seed(1_000 * island + number)
        order = torch.rand(1 + max(map(Tensor.numel, inputs)), generator=generator)
        return [
            x if dim is None else x.index_select(dim, (order[: x.shape[dim]] * x.shape[dim]).long())
            for x, dim in zip(inputs, self._dims, strict=True)
        ]

    def _joined(self, turns: Sequence[Inputs]) -> Inputs:
        """All microbatches as the step is given them."""
        every = zip(*turns, strict=True)
        return [
            xs[0] if dim is None else torch.cat(xs, dim)
            for xs, dim in zip(every, self._dims, strict=True)
        ]

    @property
    def _dims(self) -> list[int | None]:
        return [self.how.dim_of(shard.name) for shard in self.role.batch]


def step_device(step: Any) -> torch.device:
    """Where a rank's module has its parameters."""
    device: torch.device = next(step.parameters()).device
    return device
