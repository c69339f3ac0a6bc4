"""The files of a ``Trainer`` over a stage: whole, as those of one process, by one rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import transformers
from torch import nn

from partc.errors import UsageError
from partc.program.model.lent_whole import lent_whole
from partc.wrappers.prepared import Prepared


class WholeFiles(transformers.Trainer):  # type: ignore[misc]
    """As transformers' Trainer: a checkpoint loads in one process, and under any mesh and plan."""

    def _whole_model(self) -> nn.Module:
        """What has the weights: the prepared model once it was trained."""
        trained = isinstance(self.model_wrapped, Prepared) and self.model_wrapped._stage
        found: nn.Module = self.model_wrapped if trained else self.model
        return found

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Whole files, written by one rank; all ranks call this together."""
        state = self._whole_model().state_dict() if state_dict is None else state_dict
        trained = self._whole_model() is not self.model
        with lent_whole(self.model, state) if trained else nullcontext():
            super()._save(output_dir, state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.should_save:
            self.optimizer.state_dict()  # gathered by all ranks, for the one that writes
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self._whole_model() if model is None else model
        if hasattr(self.model, "peft_config") and model is not self.model:
            raise _adapters(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _check_best_model(self) -> None:
        """UsageError before the training for what could not be loaded behind it."""
        if self.args.load_best_model_at_end and hasattr(self.model, "peft_config"):
            raise _adapters("the best checkpoint, at the end")

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def _adapters(folder: str) -> UsageError:
    return UsageError(
        where=f"load from {folder}",
        what="a model with adapters is trained by then, and its checkpoint has the adapters alone",
        why="peft loads them into modules, which a stage has not",
        do="Load before the first step (resume_from_checkpoint), leave load_best_model_at_end out, "
        "or load the folder in a new process.",
    )
