"""What sums with fewer bytes have to give, by the definitions of their schemes.

In: the numbers of all ranks, ``[num, n]``. Out: their sum ``[n]`` as a scheme makes it, or the
piece of it that a rank keeps, and what each rank has not sent. Never: the printed classes, or what
prints them, whose mistakes it would share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, prod

import torch
from torch import Tensor

from partc.plan.compress import Compress

# The largest number that a byte stands for; the smallest one is as large.
LARGEST = {"int8": 127, "int8-stochastic": 127, "fp8": 448}
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


Key = Callable[[int], torch.Generator] | None


@dataclass
class Site:
    """One sum of a step: what earlier steps have left over, and what this step will have.

    ``shapes``: of the gradients in it. ``key``: the generator of a rank that draws in this step.
    ``kept``: for each buffer a tensor ``[num, ...]`` with that of each rank. ``after``: the same
    behind the step, if it is not skipped.
    """

    how: Compress
    shapes: Sequence[torch.Size]
    key: Key = None
    kept: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)

    def add(self, parts: Tensor) -> Tensor:
        """The sum ``[n]`` of all ranks' numbers ``[num, n]``, in one step."""
        if self.how.wire == "top-k":
            return self._add_largest(parts)
        if self.how.wire == "threshold":
            return self._add_large(parts)
        if self.how.wire == "random-k":
            return self._add_at_random(parts)
        if self.how.wire == "power-sgd":
            return self._add_products(parts)
        if self.how.wire == "majority-sign":
            return _voted(parts)
        return self._add_rounded(parts)

    def add_piece(self, parts: Tensor, index: int) -> Tensor:
        """Of the sum of numbers ``[num, num * n]`` the piece ``[n]`` of the rank ``index``: ranks
        round each of the pieces apart, from whole blocks, and the piece's own rank adds them up.
        """
        num, block = len(parts), 1 if self.how.wire in CASTS else self.how.block
        pieces = parts.view(num, num, -1)
        size = pieces.shape[2]
        whole = torch.cat([pieces, pieces.new_zeros(num, num, -size % block)], 2)
        total = parts.new_zeros(size)
        for rank, own in enumerate(whole.flatten(1)):
            up = self._drawn(rank, own) if self.key else torch.full_like(own, 0.5)
            arrived = rounded(own, self.how, own.numel(), up)
            total += arrived.view(num, -1)[index, :size]
        return total

    def _drawn(self, rank: int, like: Tensor) -> Tensor:
        """A random number for each of a rank's, as the rank draws them."""
        assert self.key is not None
        drawn: Tensor = torch.rand(
            like.numel(), generator=self.key(rank), dtype=like.dtype, device=like.device
        )
        return drawn

    def keep(self) -> None:
        """The step is not skipped; without error feedback nothing is left over."""
        if self.how.keeps_rest:
            self.kept = self.after

    def _left(self, index: int, like: Tensor) -> Tensor:
        return self.kept[index] if self.kept else torch.zeros_like(like)

    def _add_rounded(self, parts: Tensor) -> Tensor:
        """Pieces are rounded, added up where they belong, and their sums are rounded again."""
        num, size = parts.shape
        unit = num * (1 if self.how.wire in CASTS else self.how.block)
        whole = torch.cat([parts, parts.new_zeros(num, -size % unit)], 1)
        wanted = whole + self._left(0, whole)
        draws = [self.key(rank) for rank in range(num)] if self.key else []
        halves = torch.full_like(whole, 0.5)
        ups = [
            torch.rand(whole.shape[1], generator=g, dtype=parts.dtype, device=parts.device)
            for g in draws
        ]
        each = zip(wanted, ups or halves, strict=True)
        arrived = torch.stack([rounded(x, self.how, size, up) for x, up in each])
        pieces = arrived.sum(0).view(num, -1)
        of_sum = (pieces + self._left(1, pieces)).flatten()
        ups = [
            torch.rand(pieces.shape[1], generator=g, dtype=parts.dtype, device=parts.device)
            for g in draws
        ]
        total = rounded(of_sum, self.how, size, torch.cat(ups) if ups else halves[0])
        self.after = [wanted - arrived, (of_sum - total).view(num, -1)]
        return total[:size]

    def _add_largest(self, parts: Tensor) -> Tensor:
        """Of every rank the k numbers with the largest size, of equal ones the first; what is no
        number is larger than any.
        """
        wanted = parts + self._left(0, parts)
        arrived = torch.zeros_like(wanted)
        for numbers, each in zip(wanted, arrived, strict=True):
            order = torch.sort(-numbers.abs().nan_to_num(inf, inf), stable=True).indices
            taken = order[: self.how.size(len(numbers))]
            each[taken] = numbers[taken]
        self.after = [wanted - arrived]
        return arrived.sum(0)

    def _add_large(self, parts: Tensor) -> Tensor:
        """Of every rank the numbers that are no smaller than the threshold, and those that are no
        number.
        """
        wanted = parts + self._left(0, parts)
        large = (wanted >= self.how.threshold) | (wanted <= -self.how.threshold) | wanted.isnan()
        arrived = torch.where(large, wanted, torch.zeros_like(wanted))
        self.after = [wanted - arrived]
        return arrived.sum(0)

    def _add_at_random(self, parts: Tensor) -> Tensor:
        """Of every rank the numbers in the same k places; NaN if any of all is not finite."""
        assert self.key is not None
        wanted, size = parts + self._left(0, parts), parts.shape[1]
        order = torch.randperm(size, generator=self.key(0), device=parts.device)
        at = order[: self.how.size(size)]
        arrived = torch.zeros_like(wanted)
        arrived[:, at] = wanted[:, at] if bool(wanted.isfinite().all()) else torch.nan
        self.after = [wanted - arrived]
        return arrived.sum(0)

    def _add_products(self, parts: Tensor) -> Tensor:
        """The sum of every large matrix is P Qᵀ (PowerSGD, algorithm 1); others are exact."""
        wanted = parts + self._left(0, parts)
        total, unsent = wanted.sum(0), torch.zeros_like(wanted)
        last, columns, at = self._columns(parts), [], 0
        for shape in self.shapes:
            rows, size = shape[0] if len(shape) > 1 else 1, prod(shape)
            if 2 * self.how.rank * (rows + size // rows) < size:
                matrices = wanted[:, at : at + size].view(len(parts), rows, -1)
                q, last = last[: size // rows], last[size // rows :]
                p = _orthonormal(matrices.sum(0) @ _orthonormal(q))
                own = matrices.transpose(1, 2) @ p
                unsent[:, at : at + size] = (matrices - p @ own.transpose(1, 2)).flatten(1)
                columns.append(own.sum(0))
                total[at : at + size] = (p @ columns[-1].T).flatten()
            at += size
        self.after = [unsent, torch.cat(columns).expand(len(parts), -1, -1)]
        return total

    def _columns(self, parts: Tensor) -> Tensor:
        """The last step's Q of all matrices, one behind the other; zeros in the first one."""
        size = sum(prod(shape) // (shape[0] if len(shape) > 1 else 1) for shape in self.shapes)
        return self.kept[1][0] if self.kept else parts.new_zeros(size, self.how.rank)


def _voted(parts: Tensor) -> Tensor:
    """Of every number -1 if more ranks have it below zero than not, else +1; NaN everywhere if any
    number of all ranks is not finite.
    """
    below = (parts < 0).sum(0)
    found: Tensor = torch.where(below > len(parts) - below, -1.0, 1.0).to(parts)
    return found if bool(parts.isfinite().all()) else torch.full_like(found, torch.nan)


def _orthonormal(columns: Tensor) -> Tensor:
    """The Q of the one QR decomposition whose R has no negative number on its diagonal."""
    q, r = torch.linalg.qr(columns)
    found: Tensor = q * torch.where(r.diagonal() < 0, -1, 1)
    return found


def rounded(x: Tensor, how: Compress, size: int, up: Tensor) -> Tensor:
    """Numbers ``[n]`` as they arrive when they are sent in a format; ``n`` is a multiple of the
    block, and ``size`` of them are gradients.

    int8: a block is divided by its largest absolute value over 127, and each quotient becomes the
    largest whole number that is not above its sum with ``up``: a half, so that it is the nearest
    one, or a random number from 0 to 1. A block of zeros arrives as zeros. fp8: the same with 448,
    and each quotient becomes the nearest float8_e4m3fn. sign: each number becomes the mean absolute
    value of its block's gradients, negative if it is.
    """
    if how.wire in CASTS:
        return x.to(CASTS[how.wire]).to(x.dtype)
    blocks = x.reshape(-1, how.block)
    if how.wire == "sign":
        real = torch.arange(len(x), device=x.device).view(blocks.shape) < size
        mean = blocks.abs().where(real, 0).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(1)
        return torch.where(blocks >= 0, mean, -mean).flatten()
    most = LARGEST[how.wire]
    scale = blocks.abs().amax(1, keepdim=True) / most
    small = blocks / torch.where(scale == 0, 1, scale)
    if how.wire == "fp8":
        whole = small.clamp(-most, most).to(torch.float8_e4m3fn).to(x.dtype)
    else:
        whole = torch.floor(small + up.view(blocks.shape)).clamp(-most, most)
    return (whole * scale).flatten()
