"""The part of a stage that is about islands, which train copies of the model apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from partc.program import Program
from partc.program.checkpoints import residuals
from partc.program.stage.family import Family
from partc.wrong_calls import known_arguments


class StageIslands(nn.Module):
    """The part of a stage that is about islands."""

    _own: Family
    _program: Program
    check_together: Callable[[str], None]

    @known_arguments
    def meet_islands(self) -> None:
        """Do what is due with the other islands behind the last step; all ranks call this together.

        The next step does it else. To evaluate what islands have made together, call this behind
        the optimizer's step where the number of steps is a multiple of the period. Without islands
        it does nothing.
        """
        self.check_together("meet_islands")
        self._own.islands.meet()

    @property
    def islands(self) -> dict[str, Any]:
        """How islands meet, and behind how many steps they have met last; empty without any."""
        known = residuals.of_islands(self._program.plan)
        return {**known, residuals.MET: self._own.state.met} if known else {}
