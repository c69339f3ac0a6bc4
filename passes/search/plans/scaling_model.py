"""A scaling model: FLOPs and bytes of every call, transfer and tensor of a step as formulas of the
sizes of the mesh axes.
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
    """The word, in place of a preset's, of the shardings searched for one size of ``tp``."""
    return f"{_SEARCHED}{tp}"


def is_searched(word: str) -> bool:
    """Whether a word stands for searched shardings."""
    return word.startswith(_SEARCHED)


@dataclass(frozen=True)
class Sizes:
    """Global bytes in four parts: replicated, sharded over ``tp``, over ``dp``, over both."""

    by_cut: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def local(self, dp: int, tp: int) -> float:
        """The bytes of one rank; ``dp`` counts microbatches too."""
        none, tensor, data, both = self.by_cut
        return none + tensor / tp + data / dp + both / (dp * tp)

    def times(self, share: float) -> Sizes:
        """A share of the bytes."""
        none, tensor, data, both = (share * part for part in self.by_cut)
        return Sizes((none, tensor, data, both))

    def __add__(self, other: Sizes) -> Sizes:
        a, b = self.by_cut, other.by_cut
        return Sizes((a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]))


@dataclass(frozen=True)
class Transfer:
    """A collective over ``tp`` in one phase of a unit.

    One that sums an activation's gradient can overlap with computing weight gradients; all others
    are exposed.
    """

    unit: int
    phase: int
    kind: str
    size: Sizes  # of the collective's operands
    sums_gradient: bool


@dataclass(frozen=True)
class Weights:
    """The parameters of one unit: their bytes, their number ``count``, and the commonest dtype.

    ``gathered`` are the bytes in the dtype in which FSDP gathers them: that of a cast where the
    forward reads nothing else.
    """

    size: Sizes
    count: int
    largest_dtype: str
    gathered: Sizes


@dataclass(frozen=True, eq=False)
class Calls:
    """All calls as columns: unit, phase, global FLOPs with the axes that divide them, bytes.

    For matrix products also the result's global sizes, the axes that divide each, and its bytes.
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
    """A model's step under one sharding over ``tp``: that of a preset, or one that was searched.

    ``units`` are the blocks and the calls between them. ``chain`` lists unit numbers in forward
    order, a block that stands for dropped ones several times. ``saved`` are a unit's saved
    activations, ``boundary`` the activations sent behind it. ``beside`` is the most memory live
    beside saved activations while the unit runs, ``working`` that at the step's peak. Sizes of
    ``dp`` and ``tp`` must divide ``dp_divides`` and ``tp_divides``.
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
