"""What a Lightning trainer asks of a stage that stands: evaluation, and states for checkpoints.

In: the calls of a trainer. Out: what the stage's programs compute, and whole states.
"""

from __future__ import annotations

import re
from typing import Any

from partc.errors import PlanError
from partc.plan import Plan
from partc.plan.mesh import PP, Mesh
from partc.wrappers.lightning_errors import ended_fit, part_alone, sets
from partc.wrappers.lightning_module import Compiled, logging
from partc.wrappers.lightning_rows import SharedRows

SEEDED = "partc_seeded"  # in a checkpoint: the seed of random numbers, and steps taken


class ServedByStage(SharedRows):
    """Evaluates a module by a stage, and gives checkpoints its weights and moments."""

    def __init__(self, mesh: Mesh, *, is_whole: bool) -> None:
        super().__init__(mesh, is_whole=is_whole)
        self._compiled: Compiled | None = None
        self._stage: Any = None
        self._num_programs = 0

    # evaluation ------------------------------------------------------------------------------
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is None:
            return self._evaluated(super().validation_step, args, kwargs)
        state = self._stage._own.state
        before, state.mode = state.mode, "eval"
        try:
            with self._compiled.computing(self._part), self.precision_plugin.val_step_context():
                return self._evaluated(self.lightning_module.validation_step, args, kwargs)
        finally:
            state.mode = before
            self.check_notes()

    def _part(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """What a part of the model computes, by the stage's program."""
        try:
            return self._stage(path, *args, **kwargs)
        except PlanError as error:
            raise part_alone(path) if PP in self._mesh.names else error from error

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().test_step, args, kwargs)

    def _evaluated(self, step: Any, args: Any, kwargs: Any) -> Any:
        with logging(self.lightning_module, of_all=not self._is_whole):
            return step(*args, **kwargs)

    def check_notes(self) -> None:
        """RunError if a step sets an attribute of the module, which no program does."""
        programs = [*self._stage._own.programs.values()][self._num_programs :]
        self._num_programs += len(programs)
        for note in (note for each in programs for note in Plan.parse(each.plan).notes):
            if found := re.match(r"the step sets model\.(\w+);", note):
                raise sets(self.lightning_module, found[1])

    # checkpoints -----------------------------------------------------------------------------
    def lightning_module_state_dict(self) -> Any:
        if self._stage is None:
            return super().lightning_module_state_dict()
        return self._stage.full_state_dict()

    def optimizer_state(self, optimizer: Any) -> Any:
        if self._stage is None:
            raise ended_fit()
        return self._stage.full_optim_state_dict(getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if self._stage is not None:
            checkpoint[SEEDED] = list(self._stage.seeded)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if self._stage is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        self._stage.load_full(checkpoint["state_dict"], strict=strict)
        self._stage.seed(*checkpoint.get(SEEDED, self._stage.seeded))

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._stage.load_full_optim_state_dict(optimizer, state)
