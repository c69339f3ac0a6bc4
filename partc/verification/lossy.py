"""How far sums with fewer bytes are from exact ones, beside the bound that each scheme promises.

In: a loaded role whose text has such classes, and a step to run. Out: for each sum its error and
the bound, both beside the norm of the exact sum. The step is the first one with such sums, to which
nothing is left over from before: so the error is that of the scheme, before error feedback gives it
back. Never: the printed classes' own idea of what they lose.

Errors are L2 norms. A bound follows from the numbers ``x_r`` of all ranks and the definition alone
(Higham 2002, 2.2, for rounding; Stich et al. 2018, lemma A.1, for k numbers of n; Karimireddy et
al. 2019, lemma 8, for signs; a projection shortens what it is given, for low rank).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from partc.plan.compress import Compress
from partc.plan.wires import SCATTERS, elements, thick
from partc.verification.narrow_sums import Narrow, begin_anew, of_all_ranks, shapes_of

GATHERED = ", as it is gathered"  # behind the name of a weight
SLACK = 1e-5  # of all norms: schemes compute in float32
Bound = Callable[[Tensor, Compress, Sequence[Sequence[int]]], float]


@dataclass
class Sum:
    """One sum of a step: the numbers of all ranks, ``f32[num, n]``, and what it makes of them.

    ``arrived``: that, as it was when it came, where later microbatches add to it.
    """

    every: Tensor
    shapes: Sequence[Sequence[int]]
    found: Tensor
    arrived: Tensor | None = None
    bounds: Mapping[str, Bound] = field(default_factory=lambda: BOUNDS)

    @property
    def error(self) -> float:
        """Of the sum, beside the norm of the exact one; beside zeros as it is."""
        exact = self.every.sum(0)
        found = self.found if self.arrived is None else self.arrived
        off = found.detach().flatten().double() - exact
        return _relative(float(off.norm()), float(exact.norm()))

    def bound(self, how: Compress) -> float:
        """What the error may be at most."""
        norms = float(self.every.norm(dim=1).sum())
        most = self.bounds[how.wire](self.every, how, self.shapes) + SLACK * norms
        return _relative(most, float(self.every.sum(0).norm()))

    def name(self, params: Mapping[str, Tensor]) -> str:
        """The parameters whose gradients it has, which are views of it."""
        own = self.found.untyped_storage().data_ptr()
        names = [
            name for name, param in params.items()
            if param.grad is not None and param.grad.untyped_storage().data_ptr() == own
        ]  # fmt: skip
        first = names[0] if names else "gradients added up"
        return f"{first} and {len(names) - 1} more" if len(names) > 1 else first


@dataclass
class Measuring:
    """A class of sums that notes what all ranks put in, and where the sum will be.

    ``scatters``: whether ranks keep pieces of it, this one that of ``place``.
    """

    dist: Any
    made: Callable[..., Any]
    num: int
    place: int
    scatters: bool
    sums: list[Sum] = field(default_factory=list)

    def __call__(
        self, flat: Tensor, among: Any, size: int, state: list[Tensor], group: Any, *rng: Any
    ) -> Any:
        mine = flat.detach().flatten().double()
        every = of_all_ranks(self.dist, mine, self.num, group)
        done = self.made(flat, among, size, state, group, *rng)
        if self.scatters:
            piece = every.view(self.num, self.num, -1)[:, self.place]
            made = Sum(piece, [piece.shape[1:]], done.total, bounds=BOUNDS_OF_PIECES)
            self.sums.append(made)
            _note_arrival(done, made)
        else:
            self.sums.append(Sum(every, shapes_of(flat, among), flat))
        return done


def _note_arrival(done: Any, made: Sum) -> None:
    """Let a sum keep what has arrived when the step waits for it."""
    arrive = done.wait

    def wait() -> bool:
        arrive()
        made.arrived = done.total.clone()
        return True

    done.wait = wait


def sent_errors(
    narrow: Narrow, step: nn.Module, run: Callable[[int], object]
) -> Iterator[SentError]:
    """The errors of one rank's sums in the first step that has any; ``run`` takes it."""
    module, held = narrow.role.module.__dict__, narrow.role.tensors(step)
    measuring = {
        n: Measuring(module["dist"], each, narrow.num, narrow.place, n in SCATTERS)
        for n, each in narrow.classes.items()
    }
    module.update(measuring)
    begin_anew(held)
    run(narrow.how.start_step + 1)
    for each in (each for one in measuring.values() for each in one.sums):
        yield SentError(each.name(held), each.found.numel(), each.error, each.bound(narrow.how))


def _relative(size: float, whole: float) -> float:
    return size / whole if whole else size


# bounds -------------------------------------------------------------------------------------------
def _rounded(step: Callable[[Tensor], Tensor], of_blocks: bool = True, twice: bool = True) -> Bound:
    """Of each rank's numbers, and, where that is rounded ``twice``, of their sum, which the first
    rounding has moved.

    ``step``: of numbers, of which a scheme's scales are taken block by block, how far each of them
    is at most from what arrives.
    """

    def bound(every: Tensor, how: Compress, shapes: Sequence[Sequence[int]]) -> float:
        size = every.shape[1]
        unit = (len(every) if twice else 1) * (how.block if of_blocks else 1)
        x = torch.nn.functional.pad(every, (0, -size % unit))
        x = x.unflatten(1, (-1, how.block if of_blocks else 1))
        first = step(x).sum(0)
        second = step((x.sum(0).abs() + first)[None])[0] if twice else 0
        return float((first + second).flatten()[:size].norm())

    return bound


def _nearest(digits: int, least: float) -> Callable[[Tensor], Tensor]:
    """Of floats with so many binary digits, of which the smallest are ``least`` apart."""
    return lambda x: (x.abs() * 2.0**-digits).clamp(min=least / 2)


def _whole_numbers(part: float) -> Callable[[Tensor], Tensor]:
    """Of whole numbers up to 127 times a block's scale: a part of the distance of two."""
    return lambda x: (x.abs().amax(2, keepdim=True) * (part / 127)).expand_as(x)


def _float8(x: Tensor) -> Tensor:
    """Of float8_e4m3fn times a block's scale: 4 binary digits, the smallest 2⁻⁹ apart."""
    scale = x.abs().amax(2, keepdim=True) / 448
    return torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10)


def _signs(every: Tensor, how: Compress, shapes: Sequence[Sequence[int]]) -> float:
    """Signs lose ‖x‖² - ‖x‖₁²/n of a block of n; those of the sum at most what the first ones are.

    A last block that is not whole is taken for one of its own numbers.
    """
    lost, arrived = torch.zeros(len(every)), torch.zeros(len(every))
    for block in every.split(how.block, 1):
        of_signs = block.abs().sum(1) ** 2 / block.shape[1]
        arrived += of_signs
        lost += ((block**2).sum(1) - of_signs).clamp(0)
    return float(lost.sqrt().sum() + arrived.sqrt().sum())


def _largest(every: Tensor, how: Compress, shapes: Sequence[Sequence[int]]) -> float:
    """Those that are not sent are the smallest: at most their share of the square of the norm."""
    size = every.shape[1]
    return sqrt(1 - how.size(size) / size) * float(every.norm(dim=1).sum())


def _below(every: Tensor, how: Compress, shapes: Sequence[Sequence[int]]) -> float:
    """What is not sent is below the threshold, and no larger than it was."""
    return float(every.abs().clamp(max=how.threshold).norm(dim=1).sum())


def _norm_of_sum(every: Tensor, how: Compress, shapes: Sequence[Sequence[int]]) -> float:
    """All ranks send the same places: what is lacking is a part of the sum."""
    return float(every.sum(0).norm())


def _direction(every: Tensor, how: Compress, shapes: Sequence[Sequence[int]]) -> float:
    """Signs alone are no sum: +1 or -1 in place of each number."""
    return _norm_of_sum(every, how, shapes) + sqrt(every.shape[1])


def _norm_of_thick(every: Tensor, how: Compress, shapes: Sequence[Sequence[int]]) -> float:
    """Of a matrix what is lacking is its projection; others are exact."""
    total, parts = every.sum(0), []
    for shape, part in zip(shapes, total.split([elements([s]) for s in shapes]), strict=True):
        parts += [part] if thick([shape], how.rank) else []
    return float(torch.cat(parts).norm()) if parts else 0.0


def _of_roundings(twice: bool) -> dict[str, Bound]:
    return {
        "bf16": _rounded(_nearest(8, 2.0**-133), of_blocks=False, twice=twice),
        "fp16": _rounded(_nearest(11, 2.0**-24), of_blocks=False, twice=twice),
        "fp8": _rounded(_float8, twice=twice),
        "int8": _rounded(_whole_numbers(0.5), twice=twice),
        "int8-stochastic": _rounded(_whole_numbers(1.0), twice=twice),
    }


BOUNDS_OF_PIECES = _of_roundings(twice=False)
BOUNDS: Mapping[str, Bound] = {
    **_of_roundings(twice=True),
    "sign": _signs,
    "top-k": _largest,
    "threshold": _below,
    "random-k": _norm_of_sum,
    "power-sgd": _norm_of_thick,
    "majority-sign": _direction,
}


# what is told -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SentError:
    """The error of one sum beside the norm of the exact one, and what it may be at most."""

    name: str
    numbers: int
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound

    def as_json(self) -> dict[str, Any]:
        """The fields, and whether the bound holds; an infinite error becomes null."""
        error = self.error if isfinite(self.error) else None
        return {**vars(self), "error": error, "holds": self.holds}


def worst(found: Sequence[Sequence[SentError]]) -> tuple[SentError, ...]:
    """Of each sum the one of the rank that is nearest to its bound, or furthest beyond."""
    by_name: dict[tuple[str, int], SentError] = {}
    for each in (each for of_rank in found for each in of_rank):
        key = each.name, each.numbers
        before = by_name.get(key, each)
        by_name[key] = max(before, each, key=lambda e: e.error / (e.bound or 1.0))
    return tuple(by_name.values())


def told(sent: Sequence[SentError]) -> Iterator[str]:
    """A table of errors and bounds."""
    weights = any(each.name.endswith(GATHERED) for each in sent)
    what = f"gradients {'and weights ' if weights else ''}as they are sent"
    yield f"{what:<44}{'numbers':>12}{'error':>10}{'at most':>10}"
    for each in sent:
        beyond = "" if each.holds else "  BEYOND"
        yield f"{each.name:<44}{each.numbers:>12,}{each.error:>10.2%}{each.bound:>10.2%}{beyond}"
