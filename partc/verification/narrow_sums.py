"""What sums in narrow numbers have to give, computed from all ranks' numbers by the definition.

In: a loaded role whose text sends sums in narrow numbers. Out: the same role with stand-ins for the
classes of these sums: exact ones, with which the rest of the text is compared with the model, and
those of the definition, with which the classes themselves are compared. Never: the printed classes,
or what prints them; both would share their mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from partc.plan import Plan
from partc.plan.wires import HELPERS, WIRES, Compress, is_residual
from partc.program.role import Role

STEPS = 3  # in which what is left over is sent twice
LARGEST = {"int8": 127, "fp8": 448}  # of what a byte stands for, of which as much is negative


def rounded(x: Tensor, how: Compress) -> Tensor:
    """Numbers ``[n]`` as they arrive when they are sent in a format; ``n`` is a multiple of the
    block.

    int8: a block is divided by its largest absolute value over 127, and each quotient becomes the
    nearest whole number, of two the larger one. A block of zeros arrives as zeros. fp8: the same
    with 448, and each quotient becomes the nearest float8_e4m3fn.
    """
    if how.wire == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    if how.wire == "fp16":
        return x.to(torch.float16).to(x.dtype)
    found, most = torch.zeros_like(x), LARGEST[how.wire]
    for at in range(0, x.numel(), how.block):
        block = x[at : at + how.block]
        scale = block.abs().max() / most
        if scale == 0:
            continue
        small = (block / scale).clamp(-most, most)
        small = small.to(torch.float8_e4m3fn) if how.wire == "fp8" else torch.floor(small + 0.5)
        found[at : at + how.block] = small.to(x.dtype) * scale
    return found


@dataclass
class Site:
    """One sum of a step: what rounding has lost so far, ``[num, n]`` of all ranks' numbers, and
    ``[n]`` of their sums.
    """

    of_ranks: Tensor
    of_sum: Tensor

    @classmethod
    def of(cls, parts: Tensor) -> Site:
        return cls(torch.zeros_like(parts), torch.zeros_like(parts[0]))

    def add(self, parts: Tensor, how: Compress) -> Tensor:
        """The sum ``[n]`` of all ranks' padded numbers ``[num, n]``, in one step.

        What is lost is kept unless the sum is not finite; without error feedback nothing is kept.
        """
        wanted = parts + self.of_ranks
        arrived = torch.stack([rounded(each, how) for each in wanted])
        of_all = arrived.sum(0) + self.of_sum
        total = rounded(of_all, how)
        if how.error_feedback and bool(total.isfinite().all()):
            self.of_ranks, self.of_sum = wanted - arrived, of_all - total
        return total


def padded(parts: Tensor, how: Compress) -> Tensor:
    """Rows of numbers with zeros behind them, up to whole pieces of whole blocks."""
    num, size = parts.shape
    whole = parts.new_zeros(num, how.padded(size, num))
    whole[:, :size] = parts
    return whole


class Arrived:
    """The handle of a sum that is complete already."""

    def wait(self) -> bool:
        return True


@dataclass
class Definition:
    """Stands for the classes of one rank's text: every sum is that of the definition.

    Sums are known by their order in a step, so that a text which takes the buffers of another sum,
    or none, differs. ``rank``: this rank's place among those that sum.
    """

    dist: Any
    how: Compress
    num: int
    rank: int
    sites: list[Site] = field(default_factory=list)
    at: int = 0

    def begin(self) -> None:
        """Begin a step."""
        self.at = 0

    def __call__(
        self, flat: Tensor, num: int, block: int, state: list[Tensor], group: Any
    ) -> Arrived:
        """The sum, written to ``flat``; ``state`` gets what is left over, to be compared."""
        mine = flat.reshape(1, -1).to(torch.float32)  # which raises to float64 where verify does
        every = mine.new_empty(self.num, mine.numel())
        self.dist.all_gather_single(every, mine, group=group)
        parts = padded(every, self.how)
        if self.at == len(self.sites):
            self.sites.append(Site.of(parts))
        site, self.at = self.sites[self.at], self.at + 1
        flat.copy_(site.add(parts, self.how)[: flat.numel()].view(flat.shape))
        left = (site.of_ranks[self.rank], site.of_sum.chunk(self.num)[self.rank])
        for kept, lost in zip(state, left, strict=False):
            kept.copy_(lost.view(kept.shape))
        return Arrived()


# the text of one rank ----------------------------------------------------------------------------
def classes_of(role: Role) -> dict[str, Any]:
    """The classes of a text that send sums in narrow numbers, by name."""
    module = role.module.__dict__
    return {name: module[name] for name in sorted(HELPERS) if name in module}


def sum_exactly(role: Role) -> None:
    """Let a role's text sum gradients in the numbers that it is given, in place of narrow ones."""
    module = role.module.__dict__

    def exact(flat: Tensor, num: int, block: int, state: list[Tensor], group: Any) -> Any:
        return module["dist"].all_reduce(flat, group=group, async_op=True)

    module.update(dict.fromkeys(classes_of(role), exact))


@dataclass(frozen=True)
class Narrow:
    """The narrow sums of one rank's text: its classes by name, and how the plan wants them.

    ``place``, ``num``: this rank among those that sum, and how many these are.
    """

    role: Role
    classes: Mapping[str, Any]
    how: Compress
    place: int
    num: int

    @classmethod
    def of(cls, role: Role, plan: str, rank: int) -> Narrow | None:
        """None where the plan, given as text, compresses nothing."""
        how = Plan.parse(plan).compress
        if how is None:
            return None
        axes = [axis for axis, size in role.mesh.axes if size > 1]  # one, as others are refused
        place, num = role.mesh.coords(rank)[axes[0]], role.mesh.size(axes[0])
        return cls(role, classes_of(role), how, place, num)

    @property
    def rounds_in_float64(self) -> bool:
        """Whether the format rounds too where all narrower floats have become float64: casts to
        them are none there.
        """
        return WIRES[self.how.wire].blocks

    def _put(self, stand_ins: Mapping[str, Any]) -> None:
        self.role.module.__dict__.update(stand_ins)

    def rows(self, step: nn.Module, run: Callable[[], object]) -> Iterator[tuple[str, str, float]]:
        """What was compared, of which tensor, and its relative error, after STEPS steps of the
        classes and of the definition. ``run`` takes a step from the same weights on the same batch.
        """
        self._put(self.classes)
        mine = self._after(step, run, lambda: None)
        defined = Definition(self.role.module.__dict__["dist"], self.how, self.num, self.place)
        self._put(dict.fromkeys(self.classes, defined))
        wanted = self._after(step, run, defined.begin)
        for (kind, name), tensor in wanted.items():
            yield kind, name, _error(mine[kind, name], tensor)

    def _after(
        self, step: nn.Module, run: Callable[[], object], begin: Callable[[], None]
    ) -> dict[tuple[str, str], Tensor]:
        """The gradients that STEPS steps have added up, and what is left over behind them, and
        behind a step more whose gradients are not finite.
        """
        held = self.role.tensors(step)
        left = {name: x for name, x in held.items() if is_residual(name)}
        for tensor in held.values():
            tensor.grad = None
        for tensor in left.values():
            tensor.zero_()
        for _ in range(STEPS):
            begin()
            run()
        grads = {n: x.grad.clone() for n, x in held.items() if x.grad is not None}
        found = {("rounded gradient", name): x for name, x in grads.items()}
        found |= {("left over", name): x.clone() for name, x in left.items()}
        begin()
        self._spoiled(held, run)
        return found | {("left over behind inf", name): x.clone() for name, x in left.items()}

    def _spoiled(self, held: Mapping[str, Tensor], run: Callable[[], object]) -> None:
        """A step from weights of which all are infinite; they are put back behind it."""
        params = [held[shard.name] for shard in self.role.params]
        before = [param.detach().clone() for param in params]
        for param in params:
            param.data.fill_(inf)
        run()
        for param, values in zip(params, before, strict=True):
            param.data.copy_(values)


def _error(mine: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value; infinite where one is not finite."""
    most = float((mine - wanted).abs().max())
    largest = float(wanted.abs().max()) or 1.0
    return most / largest if isfinite(most) else inf
