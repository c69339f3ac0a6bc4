"""The parts of an estimate: seconds by unit and by stage, and the bytes around one unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property

import numpy as np

from partc.passes.search.plans.scaling_model import BACKWARD, Floats


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step by cause, and bytes of the fullest rank by kind; its device has
    ``memory_bytes``.
    """

    seconds: dict[str, float] = field(hash=False)
    bytes: dict[str, float] = field(hash=False)
    memory_bytes: int = 0

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak_bytes(self) -> float:
        return sum(self.bytes.values())


@dataclass(frozen=True, eq=False)
class UnitTimes:
    """Seconds of one microbatch on a rank, by unit and phase: f64[unit, phase], or f64[unit]."""

    compute: Floats
    weight_grads: Floats  # f64[unit], the part of the backward's ``compute``
    tensor: Floats  # collectives over ``tp``
    sums: Floats  # f64[unit], the part of ``tensor`` in the backward that sums gradients

    @cached_property
    def exposed(self) -> Floats:
        """Compute, plus the collectives over ``tp`` that weight gradients do not hide."""
        hidden = np.zeros_like(self.compute)
        hidden[:, BACKWARD] = np.minimum(self.sums, self.weight_grads)
        return self.compute + self.tensor - hidden


def bytes_around(sizes: Sequence[float], gathered: Sequence[float], at: int) -> float:
    """Bytes of unsharded tensors under FSDP while the backward of unit ``at`` runs: weights of the
    unit and the next one (being gathered), gradients of the unit and the last two (being reduced).
    """
    held = gathered[at] + sum(gathered[max(0, at - 1) : at])
    return held + sizes[at] + sum(sizes[at + 1 : at + 3])


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch on one stage: compute, and exposed transfers by kind."""

    compute: float
    tensor: float
    gathers: float
    closing: float  # once per step
    weight_grads: float

    @property
    def turn(self) -> float:
        """Seconds of one turn: forward and backward of one microbatch."""
        return self.compute + self.tensor + self.gathers


def together(stages: Sequence[StageTimes]) -> StageTimes:
    """The sum of the stages of one rank."""
    return StageTimes(*(sum(each) for each in zip(*map(astuple, stages), strict=True)))


@dataclass(frozen=True)
class Waits:
    """Seconds that a phase waits for transfers beside its compute."""

    waits: float
    closing: float  # of these, or of transfers under way when the phase ends: once a step
