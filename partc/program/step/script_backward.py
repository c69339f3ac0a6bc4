"""What a step gives out whose loss the script computes, and how its backward goes on from there.

As with DistributedDataParallel each rank computes a loss of its own rows, and the gradients are the
mean over the ranks that have rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partc.errors import RunError
from partc.program.ranks.waiting import waiting
from partc.program.step.given_out import end
from partc.program.step.loss_backward import fresh_grads, no_graph, no_parameter
from partc.program.tensors.shown import Shown


@dataclass
class Halfway:
    """A step that has given out its results, and waits for their gradients.

    ``own``: by result the data axes along which each rank has its own rows. ``groups``: of all data
    axes, by axis. ``draws``: what the program's generator counts, which other steps change.
    """

    running: Any
    results: Mapping[str, Tensor]
    own: Mapping[str, frozenset[str]]
    groups: Mapping[str, Any]
    run: Any
    check: Callable[[Sequence[Tensor]], None]
    versions: dict[str, int] = field(init=False)
    draws: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = {name: x._version for name, x in self.results.items()}
        self.draws = dict(vars(self.run.rng)) if hasattr(self.run, "rng") else {}

    @property
    def shares(self) -> int:
        """Into how many pieces ranks divide the batch."""
        return prod(dist.get_world_size(group) for group in self.groups.values())

    def finish(self, grads: Sequence[Tensor | None]) -> None:
        """Go on to the end of the step; the gradients are this rank's, ``shares`` times the mean's
        part.
        """
        for name, x in self.results.items():
            if x._version != self.versions[name]:
                raise _changed(name)
        given = [self._summed(*each) for each in zip(self.results.items(), grads, strict=True)]
        self.check(given)
        before = dict(vars(self.run.rng)) if self.draws else {}
        try:
            if self.draws:
                vars(self.run.rng).update(self.draws)
            with torch.no_grad():
                end(self.running, given)
        finally:
            if before:
                vars(self.run.rng).update(before)

    def _summed(self, result: tuple[str, Tensor], grad: Tensor | None) -> Tensor:
        """A gradient as the program takes it: of a result that several data ranks have alike, the
        sum of what each of them says.
        """
        name, x = result
        if grad is None:
            return torch.zeros_like(x)
        grad = grad.contiguous()
        for axis, group in self.groups.items():
            if axis not in self.own[name]:
                grad = grad.clone()
                dist.all_reduce(grad, group=group)
        return grad


def results_with_backward(shown: Sequence[Shown], half: Halfway) -> Mapping[str, Tensor]:
    """The results by name; what a script computes from them has a ``backward``, which adds the
    gradients to those of the parameters.
    """
    trained = [each for each in shown if each.trained and not each.is_frozen]
    params: list[Tensor] = [each.param for each in trained] or [no_parameter()]
    apply: Any = _GivenOut.apply
    found = apply(half, shown, trained, *params)
    return dict(zip(half.results, found, strict=True))


class _GivenOut(torch.autograd.Function):
    """Gives the results of a step out, and in ``backward`` runs the rest of the step."""

    @staticmethod
    def forward(ctx: Any, half: Halfway, shown: Any, trained: Any, *params: Tensor) -> Any:
        ctx.half, ctx.shown, ctx.trained = half, shown, trained
        ctx.set_materialize_grads(False)
        results = [x.detach() for x in half.results.values()]  # one may be an input, or a weight
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise no_graph()
        half, ctx.half = ctx.half, None
        if half is None:
            raise _twice()
        waiting().begin("backward")
        try:
            _, found = fresh_grads(ctx.shown, ctx.trained, lambda: half.finish(grads))
        finally:
            waiting().end()
        part = 1 / half.shares
        scaled = [None if g is None else g.mul_(part) for g in found]
        pairs = zip(ctx.trained, scaled, strict=True)
        handed = [None if g is None else each.like_param(g) for each, g in pairs]
        return None, None, None, *(handed or [None])


def _twice() -> RunError:
    return RunError(
        where="loss.backward()", what="was called a second time for one call of the model",
        why="a program's backward frees what its forward has kept, to save memory",
        do="Call the model again; or add the losses, and call backward once for their sum.",
    )  # fmt: skip


def _changed(name: str) -> RunError:
    return RunError(
        where=f"the result {name}", what="was changed in place before backward",
        why="the program may need it in its backward, as autograd may",
        do=f"Write {name} = {name} * 2 in place of {name} *= 2, or clone it first.",
    )  # fmt: skip
