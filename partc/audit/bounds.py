"""Find the bounds that no number of a run reaches, and move them to where the numbers are.

``clamp(x, -30, 30)`` leaves small numbers alone, ``norm + 1e-12`` is ``norm``, and ``x == 0`` is
never true: with such numbers an edit of them changes nothing. A bound is *reached* by a call whose
result differs when the bound is a little other; a comparison, when some elements fulfil it and some
do not. The others are moved (30 -> 0.5) or mixed (some elements turned) in a further run, of the
text as printed and as edited: both must then still agree. No list of ops is needed, as numbers are
what a call is given.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import isfinite, isinf
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from partc.audit.changed_lines import Place
from partc.graph.draws import takes_numbers
from partc.program.expected import numbers
from partc.program.user_lines import TEXT, file_of

# An op, one of its arguments and the number there; of a comparison no argument, but all its numbers
Bound = tuple[str, str, tuple[float, ...]]
LITTLE = 1e-3  # by which a bound is changed, as a part of it
SEEN = 1e-9  # the part of the largest number by which a result has to differ then
TRIED = (0.5, 0.1, 0.02, 4e-3, 1e-3, 1e-4, 2.0, 10.0, 100.0)  # where a bound is moved


@dataclass(frozen=True)
class Moved:
    """What a run has other than the text: bounds by what they are there, and turned comparisons."""

    bounds: Mapping[Bound, float] = field(default_factory=dict)
    turned: frozenset[Bound] = frozenset()

    def single(self) -> Iterator[Moved]:
        """Each of these alone."""
        for bound, number in self.bounds.items():
            yield Moved({bound: number})
        for bound in sorted(self.turned):
            yield Moved(turned=frozenset([bound]))

    def within(self, bounds: Set[Bound]) -> Moved:
        """Those of these bounds alone."""
        moved = {bound: number for bound, number in self.bounds.items() if bound in bounds}
        return Moved(moved, self.turned & bounds)


@dataclass
class Seen:
    """What runs found of bounds, by the line where a call stands."""

    reached: dict[tuple[Place, Bound], bool] = field(default_factory=lambda: defaultdict(bool))
    better: dict[Bound, Counter[float]] = field(default_factory=lambda: defaultdict(Counter))

    def note(self, place: Place, bound: Bound, reached: bool) -> None:
        self.reached[place, bound] |= reached

    def add(self, other: Seen) -> None:
        for (place, bound), reached in other.reached.items():
            self.note(place, bound, reached)
        for bound, tried in other.better.items():
            self.better[bound].update(tried)

    def idle(self) -> set[tuple[Place, Bound]]:
        """The bounds that no number reached, and where they stand."""
        return {at for at, reached in self.reached.items() if not reached}

    def moved(self) -> Moved:
        """Where the idle bounds are to be moved; every comparison with a number is turned.

        A limit in ``x > 5`` is a step: nearly no change of it is seen, whatever the numbers are.
        """
        idle = {bound for _, bound in self.idle()}
        bounds = {
            bound: self.better[bound].most_common(1)[0][0]
            for bound in sorted(idle)
            if self.better[bound]
        }
        compared = {bound for _, bound in self.reached if not bound[1]}
        return Moved(bounds, frozenset(b for b in compared if b[2] or b in idle))


class Bounds(TorchDispatchMode):
    """Notes what bounds are reached while it is open, in a rank's text; moves some."""

    def __init__(self, moved: Moved) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved, self.seen = moved, Seen()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = Call(func, tuple(args), dict(kwargs or {}))
        if func.namespace != "aten" or takes_numbers(func, call.args, call.kwargs):
            return func(*call.args, **call.kwargs)
        given = {name: (str(func), name, (float(x),)) for name, x in call.numbers().items()}
        for name, bound in given.items():
            if bound in self.moved.bounds:
                call = call.having(name, self.moved.bounds[bound])
        earlier = call.copied()
        result = call.run()
        if call.compares(result):
            every = tuple(number for *_, (number,) in given.values())
            return self._compared((str(func), "", every), result)
        for name, bound in given.items():
            self._note(earlier, name, bound, result)
        return result

    def _note(self, call: Call, name: str, bound: Bound, result: Any) -> None:
        """Note whether a call's result differs with another number in the place of this one."""
        number = call.numbers()[name]
        if bound in self.moved.bounds:
            reached = call.differs(name, bound[2][0], result)
        else:
            empty = not any(x.numel() for x in call.tensors())
            reached = empty or any(call.differs(name, x, result) for x in call.near(number))
        self.seen.note(self._place(), bound, reached)
        if not reached:
            tried = [x for x in call.tried(number) if call.differs(name, x, result)]
            self.seen.better[bound].update(tried)

    def _compared(self, bound: Bound, result: Tensor) -> Tensor:
        """A comparison's result, some of it turned if that is to be."""
        if bound in self.moved.turned:
            result = result ^ _turned(bound, tuple(result.shape))
        mixed = bool(result.any()) and not bool(result.all())
        self.seen.note(self._place(), bound, mixed)
        return result

    def _place(self) -> Place:
        """The file and line of the text that runs."""
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(TEXT):
            frame = frame.f_back
        if frame is None:
            return "", 0
        return file_of(frame.f_code.co_filename), frame.f_lineno


def _turned(bound: Bound, shape: tuple[int, ...]) -> Tensor:
    """The elements of a comparison that are turned, the same in both texts: at least one, and of
    several not all.
    """
    with _disable_current_modes():  # which would take these for numbers that the text draws
        drawn = numbers(f"turned {bound}", shape)
        turned = drawn >= drawn.max().clamp(max=0.7)
        return turned & (drawn > drawn.min()) if drawn.numel() > 1 else turned


@dataclass(frozen=True)
class Call:
    """A call of an op, which can be made again with another number."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def numbers(self) -> dict[str, float]:
        """The numbers that the op computes with, by argument: no dims, sizes and flags."""
        names = list(self.func._schema.arguments)
        named = {a.name: (a, x) for a, x in zip(names, self.args, strict=False)}
        named |= {a.name: (a, self.kwargs[a.name]) for a in names if a.name in self.kwargs}
        return {
            name: x
            for name, (argument, x) in named.items()
            if type(x) in (int, float) and x == x and _computes(argument)
        }

    def tensors(self) -> list[Tensor]:
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]

    def compares(self, result: Any) -> bool:
        """Whether a call gives truth values of numbers."""
        if not isinstance(result, Tensor) or result.dtype != torch.bool or not result.numel():
            return False
        return not self.func._schema.is_mutable and any(
            x.dtype != torch.bool for x in self.tensors()
        )

    def having(self, name: str, number: float) -> Call:
        """The call with another number."""
        names = [a.name for a in self.func._schema.arguments]
        if name in self.kwargs:
            return Call(self.func, self.args, {**self.kwargs, name: number})
        at = names.index(name)
        return Call(self.func, (*self.args[:at], number, *self.args[at + 1 :]), self.kwargs)

    def copied(self) -> Call:
        """The call on copies of its tensors, if it writes into some."""
        if not self.func._schema.is_mutable:
            return self
        args = tuple(x.clone() if isinstance(x, Tensor) else x for x in self.args)
        kwargs = {n: x.clone() if isinstance(x, Tensor) else x for n, x in self.kwargs.items()}
        return Call(self.func, args, kwargs)

    def tried(self, number: float) -> list[float]:
        """Numbers to which a bound can be moved, those of its own sign first."""
        if self._counts() and isinstance(number, int):
            return [number + x for x in (1, -1, 2, -2, 5, -5)]
        sign = -1.0 if number < 0 else 1.0
        return [sign * x for x in TRIED] + [-sign * x for x in TRIED]

    def _counts(self) -> bool:
        """Whether all operands are integers."""
        return not any(x.is_floating_point() or x.is_complex() for x in self.tensors())

    def near(self, number: float) -> tuple[float, float]:
        """A number that is a little larger, and one that is smaller."""
        if isinf(number):
            return -number, 1e30 if number > 0 else -1e30
        step = 1 if self._counts() and isinstance(number, int) else LITTLE * abs(number) or LITTLE
        return number + step, number - step

    def differs(self, name: str, number: float, now: Any) -> bool:
        """Whether the result is another one than ``now`` with another number."""
        other = self.having(name, number).copied()
        try:
            return other.draws() or _differ(now, other.run())
        except Exception:
            return True  # the op does not take every number here

    def draws(self) -> bool:
        return takes_numbers(self.func, self.args, self.kwargs)


def _computes(argument: Any) -> bool:
    """Whether an argument is computed with: a number, or a tensor in whose place one stands."""
    return any(word in str(argument.type) for word in ("number", "float", "Tensor", "Scalar"))


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list):
        return any(map(_differ, one, other))
    if not isinstance(one, Tensor):
        return bool(one != other)
    if one.shape != other.shape or not one.dtype.is_floating_point:
        return not torch.equal(one, other)
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return True
    a, b = one[finite], other[finite]
    most = float(a.abs().max()) if a.numel() else 0.0
    return bool(a.numel()) and isfinite(most) and float((a - b).abs().max()) > SEEN * most
