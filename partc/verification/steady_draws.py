"""Give every random op numbers of its site, so that a whole tensor and its pieces draw the same.

A number follows from the name of the draw and the element's place in the whole value. Two masks
then differ, and so do two elements of one, but every rank, step and run has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partc.graph.draws import SORTED, Draw, takes_numbers, word_of
from partc.program.expected import numbers
from partc.verification.precision import Raised

DRAWN = 0.5  # of an op that is no function of one uniform number; of an integer 0
LEAST = 1e-6  # chances stay so far from 0 and 1
Given = Mapping[str, Any]


class SteadyDraws(TorchDispatchMode):
    """While this is open, what ops draw follows from ``chance``. It holds in this thread.

    An op that is no function of one uniform number per element draws constants: 0.5 for floats, 0
    for integers, True for bools. ``constant`` has the names of these draws.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constant: set[str] = set()

    def chance(self, args: Sequence[Any], kwargs: Given) -> tuple[str, Tensor | None]:
        """The name of a draw, and what stands for chance in it: numbers between 0 and 1."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Given | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not takes_numbers(func, args, kwargs):
            return result
        name, chance = self.chance(args, kwargs)
        form = FORMS.get(word_of(func))
        if isinstance(result, Tensor) and chance is not None and form is not None:
            return result.copy_(form(chance, _given(func, args, kwargs)))
        self.constant.add(name)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            _settle(tensor)
        return result


class WholeDraws(SteadyDraws):
    """The draws of a step on one device; ``name`` is set before each of them."""

    def __init__(self, draws: Mapping[str, Draw]) -> None:
        super().__init__()
        self.draws = {draw.name: draw for draw in draws.values()}
        self.name = ""

    def chance(self, args: Sequence[Any], kwargs: Given) -> tuple[str, Tensor | None]:
        draw = self.draws.get(self.name)
        return self.name, None if draw is None else whole_chance(draw)


def whole_chance(draw: Draw) -> Tensor:
    """Numbers between 0 and 1 for all of a draw.

    Where each rank has sorted its rows by itself, the rows are alike.
    """
    alike = {dim for _, dim, *_ in draw.cuts} if draw.kind == SORTED else set()
    shape = tuple(1 if dim in alike else size for dim, size in enumerate(draw.shape))
    uniform = (numbers(f"draw {draw.name}", shape) / sqrt(3) + 1) / 2
    return uniform.clamp(LEAST, 1 - LEAST).expand(draw.shape)


def _settle(tensor: Any) -> None:
    if isinstance(tensor, Tensor):
        is_float = tensor.is_floating_point() or tensor.is_complex()
        tensor.fill_(DRAWN if is_float else tensor.dtype == torch.bool)


@contextmanager
def as_on_any_device(draws: SteadyDraws) -> Iterator[None]:
    """Compute in float64 and with steady draws, as whole and in pieces."""
    with Raised(), draws:
        yield


# distributions, as functions of a uniform number ---------------------------------------------
def _given(func: Any, args: Sequence[Any], kwargs: Given) -> dict[str, Any]:
    """The arguments of a call by their names, with defaults."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
    known = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return {**known, **named, **kwargs}


def _bernoulli(chance: Tensor, given: Given) -> Tensor:
    """Of a fixed probability about half is true, so that every mask has both."""
    p = given.get("p", given.get("self"))
    return chance < (p if isinstance(p, Tensor) or not 0 < float(p or 0) < 1 else 0.5)


def _normal(chance: Tensor, given: Given) -> Tensor:
    return given.get("mean", 0.0) + given.get("std", 1.0) * sqrt(2) * torch.erfinv(2 * chance - 1)  # type: ignore[no-any-return]


def _whole_number(chance: Tensor, given: Given) -> Tensor:
    low = given.get("low", 0)
    return low + (chance * (given["high"] - low)).floor()  # type: ignore[no-any-return]


FORMS: dict[str, Callable[[Tensor, Given], Tensor]] = {
    "bernoulli": _bernoulli,
    "rand": lambda chance, _: chance,
    "rand_like": lambda chance, _: chance,
    "uniform": lambda chance, given: given["from"] + (given["to"] - given["from"]) * chance,
    "randn": _normal,
    "randn_like": _normal,
    "normal": _normal,
    "normal_functional": _normal,
    "log_normal": lambda chance, given: _normal(chance, given).exp(),
    "randint": _whole_number,
    "randint_like": _whole_number,
    "exponential": lambda chance, given: -torch.log1p(-chance) / given["lambd"],
    "geometric": lambda chance, given: (chance.log() / torch.tensor(1 - given["p"]).log()).ceil(),
    "cauchy": lambda chance, given: given["median"] + given["sigma"] * (pi * (chance - 0.5)).tan(),
}
