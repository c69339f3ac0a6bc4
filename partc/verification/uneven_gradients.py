"""Compare the step of islands that compute unequal numbers of microbatches with its definition.

Each microbatch has other rows of the batch. What a step gives has to be the mean over the
microbatches of all islands of what each gives alone, loss and gradients, and has to be added to the
gradients that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        turns = [self._turn(inputs, number) for number in range(self._own)]
        whole, wanted = self._defined(step, turns, alone)
        self._clear(held.values())
        for times in (1, 2):  # the second step adds to what the first one leaves
            given = run(self._joined(turns))
            if given is not None:
                yield UNEVEN_LOSS, "loss", error_of(given.double(), whole)
            for name, grad in wanted.items():
                yield UNEVEN_GRADIENT, name, error_of(held[name].grad, times * grad)

    def _defined(
        self, step: Any, turns: Sequence[Inputs], alone: Alone
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The mean loss and gradients of all microbatches, from what each gives alone."""
        held = self.role.tensors(step)
        self._clear(held.values())
        losses = [alone(turn, number) for number, turn in enumerate(turns)]
        known = [each.double() for each in losses if each is not None]
        loss = torch.stack(known).sum() if known else torch.zeros((), dtype=torch.float64)
        grads = {name: x.grad.clone() for name, x in held.items() if x.grad is not None}
        for each in (loss, *grads.values()):
            self.role.module.__dict__["dist"].all_reduce(each, group=step.island)
            each /= self.how.whole
        return loss, grads

    @property
    def _island(self) -> int:
        return self.role.mesh.coords(self.rank)[ISLAND]

    @property
    def _own(self) -> int:
        """The microbatches of this rank's island."""
        return self.how.of_each[self._island]

    @staticmethod
    def _clear(tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            x.grad = None

    def _turn(self, inputs: Inputs, number: int) -> Inputs:
        """The rows of one microbatch: some of those of the batch, the same of all inputs."""
        generator = torch.Generator().manual_seed(1_000 * self._island + number)
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
