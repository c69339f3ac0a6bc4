"""Compare the gradients that islands apply late with their definition.

Every island takes steps with parameters that are moved before each, otherwise on each island. What
a step gives has to be the mean over islands of what each computes alone, so many steps before, with
delay compensation where the plan has it; and nothing in the first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from partc.plan.mesh import ISLAND
from partc.plan.stale import Stale
from partc.program.role import Role
from partc.verification.differences import difference, largest

LATE = "late gradient"
Compared = tuple[str, str, float]  # kind, name, error
Gradients = dict[str, Tensor]
Run = Callable[[], object]
BEHIND = 2  # steps that are compared, once gradients arrive


@dataclass
class LateGradients:
    """What one rank compares."""

    role: Role
    how: Stale
    rank: int

    def rows(self, step: Any, run: Run, alone: Run) -> Iterator[Compared]:
        """What was compared, of which tensor, and its relative error.

        ``run`` lets the rank's module take a step, ``alone`` one without other islands.
        """
        first = max(0, self.how.start_step - 1)
        sent: list[tuple[Gradients, Gradients]] = []  # what each step's mean is, and where
        for taken in range(first, self.how.start_step + self.how.steps + BEHIND):
            self._move(step)
            where = {name: p.detach().clone() for name, p in self._params(step).items()}
            mean = self._mean(step, gradients_of(self.role, step, alone, taken))
            at_once = taken < self.how.start_step
            late = mean if at_once else self._due(sent, where)
            found = gradients_of(self.role, step, run, taken)
            if not at_once:
                sent.append((mean, where))
            for name in mean:
                yield LATE, name, error_of(found.get(name), late.get(name))
        self.role.drain(step)

    def _due(self, sent: list[tuple[Gradients, Gradients]], now: Gradients) -> Gradients:
        """The gradients of so many steps ago, compensated; none in the first steps."""
        if len(sent) < self.how.steps:
            return {}
        mean, then = sent[-self.how.steps]
        weight = self.how.compensation
        return {n: g + weight * g * g * (now[n] - then[n]) for n, g in mean.items()}

    def _params(self, step: Any) -> Mapping[str, Tensor]:
        held = self.role.tensors(step)
        return {s.name: held[s.name] for s in self.role.params}

    @torch.no_grad()
    def _move(self, step: Any) -> None:
        """Change all parameters, by another factor on each island."""
        island = self.role.mesh.coords(self.rank)[ISLAND]
        for param in self._params(step).values():
            param.mul_(1 + (1 + island) / 32)

    def _mean(self, step: Any, own: Gradients) -> Gradients:
        for grad in own.values():
            self.role.module.__dict__["dist"].all_reduce(grad, group=step.island)
            grad /= self.role.mesh.islands
        return own


def gradients_of(role: Role, step: Any, run: Run, taken: int) -> Gradients:
    """A rank's gradients of a step behind so many, by name."""
    held = role.tensors(step)
    for x in held.values():
        x.grad = None
    step.taken = taken
    run()
    return {name: x.grad.clone() for name, x in held.items() if x.grad is not None}


def error_of(mine: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference over the largest value; infinite where only one of both is there."""
    if mine is None or wanted is None:
        return 0.0 if mine is wanted else inf
    return difference(mine, wanted) / (largest(wanted) or 1.0)
