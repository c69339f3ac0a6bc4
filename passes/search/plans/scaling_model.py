"""The laws that a profile is made of: how every call's, transfer's and tensor's size follows from
the axes' sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FORWARD, BACKWARD = 0, 1
_SEARCHED = "searched-"


def searched_word(tp: int) -> str:
    """What stands in a preset's place for the shardings that were searched for a size of ``tp``."""
    return f"{_SEARCHED}{tp}"


def is_searched(word: str) -> bool:
    """Whether a word stands for shardings that were searched."""
    return word.startswith(_SEARCHED)


@dataclass(frozen=True)
class Sizes:
    """Bytes by the axes that cut them: by none, by ``tp``, by ``dp``, by both; of the whole."""

    by_cut: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def local(self, dp: int, tp: int) -> float:
        """The bytes of one rank; ``dp`` counts microbatches too."""
        none, tensor, data, both = self.by_cut
        return none + tensor / tp + data / dp + both / (dp * tp)

    def __add__(self, other: Sizes) -> Sizes:
        a, b = self.by_cut, other.by_cut
        return Sizes((a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]))


@dataclass(frozen=True)
class Transfer:
    """A collective over ``tp`` that a unit makes in one phase; one that sums a gradient can run
    beside what makes those of weights, all others stand in the way.
    """

    unit: int
    phase: int
    kind: str
    size: Sizes  # what a rank puts in
    sums_gradient: bool


@dataclass(frozen=True)
class Weights:
    """Parameters of one unit: bytes by how ``tp`` cuts them, in number of tensors ``count``."""

    size: Sizes
    count: int
    largest_dtype: str


@dataclass(frozen=True, eq=False)
class Calls:
    """All calls as columns: where they stand, their FLOPs and the axes that cut these, bytes; of
    matrix products the result's sizes, the axes that cut each, and its bytes.
    """

    unit: Ints
    phase: Ints
    is_weight_grad: NDArray[np.bool_]
    flops: Floats
    cut: NDArray[np.bool_]  # [call, (dp, tp)]
    bytes: Floats  # [call, (none, tp, dp, both)]
    dtype: tuple[str, ...]
    work: NDArray[np.str_]
    product: Floats  # [call, (batch, rows, columns)] of the whole
    product_cut: NDArray[np.bool_]  # [call, (batch, rows, columns), (dp, tp)]
    written: Floats  # as bytes


@dataclass(frozen=True, eq=False)
class ScalingModel:
    """A model's step under one way to cut weights over ``tp``: a preset's ``word``, or shardings
    that were searched for one size of it.

    ``units`` are its blocks and what stands between, ``chain`` has them in the order in which they
    run, a block that stands for others several times. ``saved`` is what a unit keeps for its
    backward, ``beside`` the most that is live beside what was saved while it runs, ``working`` the
    same at the step's peak; ``dp_divides`` and ``tp_divides`` are
    what the axis sizes have to divide.
    """

    word: str
    units: tuple[str, ...]
    is_block: tuple[bool, ...]
    chain: tuple[int, ...]
    calls: Calls
    transfers: tuple[Transfer, ...]
    weights: tuple[Weights, ...]
    saved: tuple[Sizes, ...]
    boundary: tuple[Sizes, ...]
    beside: tuple[Sizes, ...]
    working: Sizes
    dp_divides: int
    tp_divides: int
    flops: float  # of the whole step, without what is computed twice
