"""Printed classes for sums of gradients that send less than their numbers: what all have in common.

``Int8Sum(...)`` starts a first transfer, ``pass_on`` waits for it and starts the second one, if
there is one, ``wait`` waits for that (``partc/plan/wires.py`` has the meaning). ``keep`` notes what
was not sent, at the end of the step. ``Reduced`` here stands for that of ``printed.py``.
"""
# mypy: disable-error-code="override, assignment, arg-type, call-overload"
# (what programs wait for, they wait for without a limit)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def joined(grads: dict[nn.Parameter, Tensor]) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
    """Copy gradients into one tensor, in which they leave together, and the part that each has."""
    flat = torch.cat([x.flatten() for x in grads.values()])
    parts = flat.split([x.numel() for x in grads.values()])
    pairs = zip(grads.items(), parts, strict=True)
    return flat, {param: part.view(x.shape) for (param, x), part in pairs}


class NarrowSum(dist.Work):
    """A sum over ranks that sends less than the numbers in `flat`, which it overwrites.

    What is not sent is added in the next step: `state` keeps it.
    """

    def __init__(self, flat: Tensor, state: list[Tensor], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.flat, self.state, self.group = flat, state, group
        self.lost: list[Tensor] = []  # what `state` gets, in its order
        self.passed = False

    def pass_on(self) -> None:
        """Wait for the first transfer, and start the second one."""
        self.passed = True

    def with_rest(self, x: Tensor) -> Tensor:
        """Numbers to be sent, and what earlier steps have not sent of them."""
        if not self.state:
            return x
        return x + self.state[len(self.lost)].to(torch.float32).view(x.shape)

    def write(self, total: Tensor) -> None:
        """Put the sum where the numbers were."""
        self.flat.copy_(total.flatten()[: self.flat.numel()].view(self.flat.shape))

    def keep(self, finite: Tensor) -> None:
        """Keep what was not sent, unless the step is one to be skipped."""
        for kept, lost in zip(self.state, self.lost, strict=False):
            kept.copy_(torch.where(finite, lost.view(kept.shape), kept))


class Reduced(list[tuple[dict[nn.Parameter, Tensor], dist.Work]]):
    """Sums of gradients under way; of those that `arrived` in this step, which are `finite`."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[NarrowSum] = []
        self.finite: list[Tensor] = []

    def pass_on(self, later: "Reduced") -> None:  # noqa: UP037
        """Start the second transfers of sums, which are left to `later`, and finish all others."""
        later.arrived += self.arrived
        later.finite += self.finite
        while self:
            grads, done = self.pop(0)
            if isinstance(done, NarrowSum) and not done.passed:
                done.pass_on()
                later.append((grads, done))
            else:
                later.add(grads, done)

    def add(self, grads: dict[nn.Parameter, Tensor], done: dist.Work) -> None:
        """Wait for a sum, and add it to the gradients of the parameters."""
        done.wait()
        self.arrived += [done] if isinstance(done, NarrowSum) else []
        for param, grad in grads.items():
            grad = grad.sum(0) if grad.dim() > param.dim() else grad  # all ranks' pieces
            self.finite.append(grad.isfinite().all())
            param.grad = grad if param.grad is None else param.grad.add_(grad)

    def finish(self, *others: dist.ProcessGroup) -> None:
        """Wait for gradients that ranks are summing, and add them to those of the parameters.

        Ranks that sum see the same sums, so that all of them keep what they have not sent, or none
        does; `others` are groups of ranks that see other sums of this step.
        """
        passed, ended = Reduced(), Reduced()
        self.pass_on(passed)
        passed.pass_on(ended)
        finite = torch.stack(ended.finite).all()
        for group in others:
            unfit = (~finite).to(torch.float32)
            dist.all_reduce(unfit, op=dist.ReduceOp.MAX, group=group)
            finite = unfit == 0
        for done in ended.arrived:
            done.keep(finite)
