"""What a step gives out whose loss the script computes, and how its backward goes on from there.

As with DistributedDataParallel each rank computes a loss of its own rows, and the gradients are the
mean over the ranks that have rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from partc.errors import RunError
from partc.program.model.old_weights import stage_backward
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.ranks.waiting import waiting
from partc.program.step.given_out import end
from partc.program.step.loss_backward import fresh_grads, no_graph
from partc.program.step.summed_loss import tell_of_sum
from partc.program.tensors.shown import Shown
from partc.trace.default_dtype import float32_default
from partc.trace.returns import gradient_of


class Dealt(Protocol):
    """How the gradients that ranks give back become what the program takes.

    ``shares``: into how many pieces ranks divide the batch.
    """

    @property
    def shares(self) -> int:
        """Of how many losses the mean is meant."""

    def whole(self, name: str, grad: Tensor) -> Tensor:
        """The gradient of a result, given this rank's; all ranks call this together."""

    def mine(self, name: str, grad: Tensor) -> Tensor:
        """What this rank's script is given of an input's gradient."""


@dataclass(frozen=True)
class Evenly:
    """Ranks have as many rows each, and results lie as the program gives them.

    ``own``: by result, or gradient of an input, the data axes along which each rank has its own
    rows. ``groups``: of all data axes, by axis.
    """

    own: Mapping[str, frozenset[str]]
    groups: Mapping[str, Any]

    @property
    def shares(self) -> int:
        return prod(dist.get_world_size(group) for group in self.groups.values())

    def whole(self, name: str, grad: Tensor) -> Tensor:
        """Of a result that several data ranks have alike, the sum of what each of them says."""
        for axis, group in self.groups.items():
            if axis not in self.own.get(name, ()):
                grad = grad.clone()
                dist.all_reduce(grad, group=group)
        return grad

    def mine(self, name: str, grad: Tensor) -> Tensor:
        """That of its rows; of an input that data ranks have alike, the mean over these."""
        own = self.own.get(name, ())
        alike = [group for axis, group in self.groups.items() if axis not in own]
        return grad / prod(map(dist.get_world_size, alike)) if alike else grad


@dataclass
class Halfway:
    """A step that has given out its results, and waits for their gradients.

    ``run`` is the rank's module. ``meet``: RunError on all ranks if some do not go on as this one.
    ``shown`` are the results as the script has them: its own rows. ``inputs``: what the step was
    given, which it may have kept.
    """

    running: Any
    run: Any
    results: Mapping[str, Tensor]
    dealt: Dealt
    check: Callable[[Sequence[Tensor]], None]
    meet: Callable[[], None]
    inputs: Mapping[str, Tensor]
    shown: Mapping[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.shown = self.results
        self._versions = [x._version for x in self.results.values()]
        self._given_versions = {name: _version(x) for name, x in self.inputs.items()}
        # which other steps that run meanwhile change
        self._drawn = dict(vars(self.run.rng)) if hasattr(self.run, "rng") else {}

    def finish(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Go on to the end of the step; the parameters get ``dealt.shares`` times the mean.

        Gives the gradients of inputs by name.
        """
        for (name, x), version in zip(self.results.items(), self._versions, strict=True):
            if x._version != version:
                raise _changed(name)
        for name, version in self._given_versions.items():
            if _version(self.inputs[name]) != version:
                raise _input_changed(name)
        self.meet()
        given = [self._given(*each) for each in zip(self.shown.items(), grads, strict=True)]
        self.check(given)
        with float32_default(), self._own_draws(), torch.no_grad():
            found = end(self.running, given)
        return {name: self.dealt.mine(name, grad) for name, grad in found.items()}

    def _given(self, shown: tuple[str, Tensor], grad: Tensor | None) -> Tensor:
        name, x = shown
        if not x.is_floating_point():
            return torch.zeros_like(self.results[name])
        return self.dealt.whole(name, torch.zeros_like(x) if grad is None else grad.contiguous())

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Let the program's generator count as it did in the first half of the step."""
        if not self._drawn:
            yield
            return
        counts = vars(self.run.rng)
        before = dict(counts)
        counts.update(self._drawn)
        try:
            yield
        finally:
            counts.update(before)


def results_with_backward(
    shown: Sequence[Shown], half: Halfway, inputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """The results by name; what a script computes from them has a ``backward``, which adds the
    gradients to those of the parameters, and hands on those of ``inputs``.
    """
    trained = [each for each in shown if each.trained and not each.is_frozen]
    if not trained and not inputs:
        return {name: x.detach() for name, x in half.shown.items()}
    apply: Any = _GivenOut.apply
    leaves = *(each.param for each in trained), *inputs.values()
    found = apply(half, shown, trained, [*inputs], *leaves)
    return dict(zip(half.shown, found, strict=True))


class _GivenOut(torch.autograd.Function):
    """Gives the results of a step out, and in ``backward`` runs the rest of the step."""

    @staticmethod
    def forward(
        ctx: Any, half: Halfway, shown: Any, trained: Any, inputs: Any, *leaves: Tensor
    ) -> Any:
        ctx.half, ctx.shown, ctx.trained, ctx.inputs = half, shown, trained, inputs
        ctx.versions = [each.piece._version for each in shown]
        ctx.set_materialize_grads(False)
        results = [x.detach() for x in half.shown.values()]  # one may be an input, or a weight
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        return tuple(results)

    @staticmethod
    @of_other_ranks("loss.backward()")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise no_graph()
        stage_backward()
        half, ctx.half = ctx.half, None
        if half is None:
            raise _twice()
        for each, version in zip(ctx.shown, ctx.versions, strict=True):
            if each.piece._version != version:
                raise _weight_changed(each.shard.name)
        if isinstance(half.dealt, Evenly) and any(half.dealt.own.values()):
            tell_of_sum(ctx, half.dealt.shares)
        waiting().begin("backward")
        try:
            given, found = fresh_grads(ctx.shown, ctx.trained, lambda: half.finish(grads))
        finally:
            waiting().end()
        part = 1 / half.dealt.shares
        scaled = [None if g is None else g.mul_(part) for g in found]
        pairs = zip(ctx.trained, scaled, strict=True)
        handed = [None if g is None else each.like_param(g) for each, g in pairs]
        return None, None, None, None, *handed, *(given[gradient_of(x)] for x in ctx.inputs)


def _twice() -> RunError:
    return RunError(
        where="loss.backward()", what="was called a second time for one call of the model",
        why="a program's backward frees what its forward has kept, to save memory",
        do="Call the model again; or add the losses, and call backward once for their sum.",
    )  # fmt: skip


def _weight_changed(name: str) -> RunError:
    return RunError(
        where=name, what="was changed between the call of the model and backward",
        why="the backward computes with the weights of the call, as autograd does, which refuses "
        "this too",
        do="Call backward before optimizer.step(), and the model again behind it.",
    )  # fmt: skip


def _version(given: Tensor) -> int:
    """How often an input was written to; of tensors of inference mode torch does not count it."""
    return 0 if given.is_inference() else given._version


def _input_changed(name: str) -> RunError:
    return RunError(
        where=f"the input {name}", what="was written to between the call of the model and backward",
        why="the backward computes with what the call was given, as autograd does",
        do="Call backward before the next batch is copied into this tensor; or give the model "
        f"{name}.clone().",
    )  # fmt: skip


def _changed(name: str) -> RunError:
    return RunError(
        where=f"the result {name}", what="was changed in place before backward",
        why="the program may need it in its backward, as autograd may",
        do=f"Write {name} = {name} * 2 in place of {name} *= 2, or clone it first.",
    )  # fmt: skip
