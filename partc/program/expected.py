"""The numbers that the single-device step gives for seeded weights and a seeded batch.

A saved program has them in ``program.json``, so that the text of its ranks can be run and compared
without the model (``partc/audit/numbers.py``). Of every tensor two numbers are kept: its norm, and
its product with seeded numbers. They come from the graph of the model, not from the program's text.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # a target that losses leave out
Json = Mapping[str, Any]
Typed = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Summary:
    """Two numbers that stand for a tensor: its norm, and its product with seeded numbers."""

    norm: float
    product: float

    @classmethod
    def of(cls, label: str, tensor: Tensor) -> Summary:
        """The summary of a tensor; ``label`` seeds the numbers that it is multiplied with."""
        x = tensor.detach()
        flat = (x if x.is_complex() else x.double()).flatten()
        product = (flat * numbers(label, tuple(flat.shape))).sum()
        return cls(_rounded(flat.abs().square().sum().sqrt()), _rounded(product.real))

    def times(self, factor: float) -> Summary:
        return Summary(self.norm * factor, self.product * factor)


@dataclass(frozen=True)
class Seeds:
    """How the batch is drawn: the first integer that is too large for each input, by name.

    ``ignoring``: the inputs in which some integers are -100. ``plain``: masks are all 1.
    """

    highs: Mapping[str, int] = field(default_factory=dict)
    ignoring: tuple[str, ...] = ()
    plain: bool = False

    def batch(self, inputs: Mapping[str, Typed]) -> dict[str, Tensor]:
        """The global batch, floats in float64."""
        return {name: self._input(name, *typed) for name, typed in inputs.items()}

    def _input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        drawn = numbers(f"input {name}", shape)
        if dtype.is_complex:
            return torch.complex(drawn, numbers(f"imaginary {name}", shape))
        if dtype.is_floating_point:
            return drawn
        if dtype == torch.bool:
            return torch.ones_like(drawn, dtype=dtype) if self.plain else drawn > -1.0
        high = self.highs.get(name, 2)
        if high <= 2 and self.plain:
            return torch.ones(shape, dtype=dtype)
        whole = ((drawn / sqrt(3) + 1) / 2 * high).to(dtype).clamp(0, high - 1)
        if name in self.ignoring:  # ever more, so that no two pieces of a batch count as many
            rising = torch.linspace(-1.7, 0.0, whole.numel(), dtype=drawn.dtype).view(shape)
            whole.masked_fill_(numbers(f"ignored {name}", shape) < rising, IGNORED)
        return whole


@dataclass(frozen=True)
class Expected:
    """What a step gives: summaries by ``"loss"``, ``"gradient NAME"``, ``"buffer NAME"`` or
    ``"result NAME"``.
    """

    seeds: Seeds
    tensors: Mapping[str, Summary]

    @property
    def grads(self) -> list[str]:
        """The labels of gradients."""
        return [label for label in self.tensors if label.startswith("gradient ")]

    def as_json(self) -> dict[str, Any]:
        return {
            "highs": dict(self.seeds.highs), "ignoring": list(self.seeds.ignoring),
            "plain": self.seeds.plain,
            "tensors": {name: [each.norm, each.product] for name, each in self.tensors.items()},
        }  # fmt: skip

    @classmethod
    def of_json(cls, data: Json) -> Expected:
        """Read ``as_json``; KeyError and alike where entries are missing or malformed."""
        highs = {str(name): int(high) for name, high in data["highs"].items()}
        seeds = Seeds(highs, tuple(map(str, data["ignoring"])), bool(data["plain"]))
        tensors = {str(n): Summary(float(a), float(b)) for n, (a, b) in data["tensors"].items()}
        return cls(seeds, tensors)


UNKNOWN = "the program was saved without them"


def _nothing() -> str:
    """Knows no numbers."""
    return UNKNOWN


@dataclass(frozen=True, eq=False)
class Expectation:
    """The expected numbers of a program; ``find`` computes them, once, when they are asked for.

    It returns the reason instead where there are none, for example a step that is too large.
    """

    find: Callable[[], Expected | str] = _nothing

    @cached_property
    def found(self) -> Expected | str:
        return self.find()

    @property
    def numbers(self) -> Expected | None:
        return None if isinstance(self.found, str) else self.found

    @property
    def lacking(self) -> str:
        """Why there are no numbers; "" where there are some."""
        return self.found if isinstance(self.found, str) else ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without ``find``, which holds a graph."""
        return Expectation, ()

    def as_json(self) -> dict[str, Any] | str:
        return self.found if isinstance(self.found, str) else self.found.as_json()

    @classmethod
    def of_json(cls, data: Json | str) -> Expectation:
        known = data if isinstance(data, str) else Expected.of_json(data)
        return cls(lambda: known)


def numbers(label: str, shape: tuple[int, ...]) -> Tensor:
    """Uniform numbers of mean 0 and variance 1 that follow from a label, the same anywhere."""
    generator = torch.Generator().manual_seed(zlib.crc32(label.encode()))
    drawn: Tensor = torch.rand(shape, dtype=torch.float64, generator=generator) * 2 - 1
    drawn *= sqrt(3)
    return drawn


def seeded_weight(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The value of a parameter or buffer: vectors near 1, larger tensors of variance 1 / inputs.

    Integers are 0.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype)
    drawn = numbers(name, shape)
    if len(shape) < 2:
        return 1 + 0.2 * drawn
    scaled = drawn * sqrt(shape[0] / max(drawn.numel(), 1))
    return scaled.to(torch.complex128) if dtype.is_complex else scaled


def _rounded(number: Tensor) -> float:
    """A number with the digits that are the same on every machine."""
    return float(f"{float(number):.12g}")
