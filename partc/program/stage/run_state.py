"""What all programs of a stage have in common, and what is looked at before any of them runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from partc.program.model.raw_model import RawModel
from partc.program.ranks.agreement import Agreement
from partc.program.role import Role
from partc.program.step.step_checks import check_casts, check_world_stands
from partc.program.tensors.loaded import Loaded
from partc.program.tensors.rank_tensors import RankTensors
from partc.program.wanted import Mode, Wanted


class Watch(Protocol):
    """What is around every run of a program: given the program's text, and what it is for."""

    def __call__(self, role: Role, wanted: Wanted) -> AbstractContextManager[None]: ...


def unwatched(role: Role, wanted: Wanted) -> AbstractContextManager[None]:
    """Nothing is around a run."""
    return nullcontext()


@dataclass
class RunState:
    """Mode, seed and counts of a stage.

    ``mode``: that the user has asked for. ``seed``: the seed, and how many steps have drawn from
    it; evaluations are counted apart, so that they do not change what a step draws. ``met``: behind
    how many steps islands have met last, or looked whether they have to. ``variant``: the variant
    of the step that runs next, ``watch`` is around it (``partc/control``).
    """

    mode: Mode | None = None
    seed: tuple[int, int] = 0, 0
    num_evaluations: int = 0
    met: int = -1
    variant: str = ""
    watch: Watch = unwatched

    def varied(self, wanted: Wanted, programs: Collection[Wanted]) -> Wanted:
        """The variant of a step that runs next, if there is one for this batch."""
        variant = replace(wanted, variant=self.variant)
        return variant if wanted.kind == "step" and variant in programs else wanted


@dataclass
class Guard:
    """Looks before every run at what no single program knows.

    ``check_modules`` is given the number of runs before this one. ``casts``: tensors that the
    script has cast, by name.
    """

    tensors: RankTensors
    loaded: Loaded
    raw: RawModel
    agreement: Agreement
    check_modules: Callable[[int], None]
    state: RunState
    world: Any
    casts: dict[str, torch.dtype] = field(default_factory=dict)
    num_runs: int = 0

    def begin(self) -> None:
        """RunError if the script has changed what a program cannot follow; on this rank alone."""
        check_world_stands(self.world)
        check_casts(self.casts)
        self.check_modules(self.num_runs)
        self.raw.begin_step()
        self.num_runs += 1

    def compare(self, role: Role, inputs: Sequence[Tensor] | None) -> None:
        """RunError if ranks differ in what they must hold alike, or a tensor has no values.

        All ranks call this together. ``inputs``: None where this rank refuses to run.
        """
        held = self.tensors.held
        self.agreement.compare(role, inputs, held, self.state.seed, self.tensors.device)
        if inputs is not None:
            self.loaded.check(held, self.tensors.device)
