"""The part of a stage that deals with optimizers over its parameters."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from partc.errors import RunError
from partc.program.model.other_wrappers import NotWrapped
from partc.program.optimizer.optimizer_states import Form, OptimizerStates
from partc.program.optimizer.optimizers import (
    OnPieces,
    OnWhole,
    SavedMoments,
    Stepping,
    check_of_stage,
)
from partc.program.optimizer.try_optimizer import check_elementwise, check_per_tensor
from partc.program.tensors.rank_tensors import RankTensors
from partc.program.tensors.shown import Shown
from partc.wrong_calls import known_arguments

Stepped = TypeVar("Stepped", bound=torch.optim.Optimizer)


class StageOptimizers(NotWrapped):
    """How optimizers over a stage's parameters step, and what their states are."""

    _forms: WeakKeyDictionary[Any, Form]
    _shown: dict[str, Shown]
    _tensors: RankTensors

    @property
    def pipeline(self) -> Any:
        """The process group of the ranks with the other stages; None if there is none."""
        return self._tensors.pipeline

    @known_arguments
    def step_on_pieces(self, optimizer: Stepped) -> Stepped:
        """Let an elementwise optimizer (SGD, Adam, ...) step on this rank's plain pieces.

        That is as fast as on one device; on DTensors each op costs some 0.1 ms more. Its state
        dict has DTensors all the same, so it loads under any mesh; all ranks call that together.

        Args:
            optimizer: one over ``stage.parameters()``, in groups as you like.

        Returns:
            The same optimizer.

        Raises:
            RunError: tried on small tensors and on the shapes of its parameters, of up to a
                million elements, its steps on pieces are not those on whole tensors (Adafactor,
                Muon, LBFGS), or it has parameters that are not the stage's.
        """
        check_of_stage(optimizer, self.parameters())
        shown, tensors = list(self._shown.values()), self._tensors
        check_elementwise(optimizer, {s.param: s.shard for s in shown}, tensors.piece)
        self._set_form(optimizer, "pieces")
        Stepping(optimizer, shown, OnPieces())
        SavedMoments(optimizer, shown, tensors.portable)
        return optimizer

    def step_on_whole(self, optimizer: Stepped) -> Stepped:
        """Let any optimizer step on whole tensors, which each step gathers on every rank.

        For what DTensor cannot compute (Adafactor). Its states are whole on every rank, and so
        are parameters and gradients during a step. All ranks step together.

        Args:
            optimizer: one over ``stage.parameters()``, in groups as you like.

        Returns:
            The same optimizer.

        Raises:
            RunError: the program has several pipeline stages and the optimizer joins parameters
                (LBFGS), or it has parameters that are not the stage's.
        """
        if self.pipeline is not None:
            check_per_tensor(optimizer)
        self._set_form(optimizer, "whole")
        tensors = self._tensors
        Stepping(optimizer, self._shown.values(), OnWhole(tensors.join, tensors.piece))
        return optimizer

    def states_of(self, optimizer: torch.optim.Optimizer) -> OptimizerStates:
        """What the states of an optimizer over this stage's parameters are."""
        return OptimizerStates(self._tensors, self._forms.get(optimizer, "dtensors"))

    def _set_form(self, optimizer: torch.optim.Optimizer, form: Form) -> None:
        check_of_stage(optimizer, self.parameters())
        if optimizer in self._forms:
            raise RunError(
                where=f"stage.step_on_{form}({type(optimizer).__name__})",
                what=f"it steps on {self._forms[optimizer]} already",
                why="its states are of one kind",
                do="Call one of stage.step_on_pieces and stage.step_on_whole, once.",
            )
        states = self.states_of(optimizer)  # made already, by the optimizer or by steps
        for name, shown in self._shown.items():
            for field, value in optimizer.state.get(shown.param, {}).items():
                if isinstance(value, Tensor):
                    optimizer.state[shown.param][field] = states.in_form(name, value, form)
        self._forms[optimizer] = form
