"""The part of a stage that is about islands, which train copies of the model apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from torch import nn

from partc.errors import RunError
from partc.plan import Plan
from partc.program import Program
from partc.program.checkpoints import residuals
from partc.program.optimizer.served_states import Held, from_owners
from partc.program.stage.family import Family
from partc.program.tensors.rank_tensors import RankTensors
from partc.wrong_calls import known_arguments


class StageIslands(nn.Module):
    """The part of a stage that is about islands."""

    _own: Family
    _program: Program
    _tensors: RankTensors
    check_together: Callable[..., None]
    is_served = False  # a server beside the program is told of its gradients

    @known_arguments
    def meet_islands(self) -> None:
        """Do what is due with the other islands behind the last step; all ranks call this together.

        The next step does it else. To evaluate what islands have made together, call this behind
        the optimizer's step where the number of steps is a multiple of the period. Without islands
        it does nothing. Where islands own parameters, this brings them to all others.
        """
        self.check_together("meet_islands")
        self._own.islands.meet()

    @cached_property
    def _is_beside_server(self) -> bool:
        how = Plan.parse(self._program.plan).servers
        return how is not None and how.is_beside

    def check_served(self) -> None:
        """RunError before a step whose gradients the plan's server would not be told of."""
        if self._is_beside_server and not self.is_served:
            raise RunError(
                where="step", what="the plan has [servers], and this stage has no worker",
                why="the gradients of a step go to a server beside the program, whose optimizer "
                "steps", do="Make a worker, partc.program.servers.worker.IslandWorker(stage, "
                "store), and call its pull() before a step and its push() behind it; or leave "
                "[servers] out of the plan.",
            )  # fmt: skip

    @property
    def islands(self) -> dict[str, Any]:
        """How islands meet, and behind how many steps they have met last; empty without any."""
        known = residuals.of_islands(self._program.plan)
        return {**known, residuals.MET: self._own.state.met} if known else {}

    def meet_owners(self) -> None:
        """Bring the parameters that islands own to all others; all ranks call this together."""
        self._own.islands.pull()

    def from_owners(self, held: Held) -> Held:
        """An optimizer's tensors as the islands have them that own its parameters."""
        return from_owners(held, self._tensors)

    @property
    def owners(self) -> Mapping[str, int]:
        """By trained parameter the island that owns it, and its optimizer's state; empty without
        servers.
        """
        return self._tensors.owners
