"""A training step that is traced once, for any number of plans and meshes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from partc.errors import TraceError
from partc.graph import Graph
from partc.graph.folds import TracedStages
from partc.lowering import table, traced
from partc.passes.runner import State, Table
from partc.trace.default_dtype import float32_default
from partc.trace.fingerprint import Fingerprint
from partc.trace.hooked_modules import hooked_modules
from partc.trace.inputs_refused import check_loss
from partc.trace.no_model import check_model
from partc.trace.param_hooks import gradient_hooks
from partc.trace.record import Kind, Source, kind_of
from partc.wrong_calls import known_fields

Seen = tuple[Fingerprint, tuple[Any, ...], tuple[bool, ...]]
Wanted = tuple[bool, TracedStages | None, bool, Table, tuple[str, ...]]


@known_fields
@dataclass(eq=False)
class Traced:
    """A training step that is traced once, for ``partc.compile`` to take in place of a model.

    Tracing begins when a graph is first asked for, by ``compile`` or by ``graph()``.

    Args:
        model: as for ``compile``. Its code and the values of its small buffers must stay as they
            are.
        inputs: as for ``compile``, with the shapes of the global batch.
        loss: as for ``compile``; None: what the model returns, or its ``.loss``.
        kind: ``"step"`` for forward and backward, ``"loss"`` for the loss without gradients,
            ``"forward"`` for what the model returns; None: a step, unless there is no loss and
            gradients are off.

    Raises:
        TraceError: the model cannot be traced; or since then a tensor has got another shape or
            dtype, a parameter was frozen or has got a hook, a module went from ``train()`` to
            ``eval()``, a number that the step reads is another one. Other changes, as of the
            model's code, are not seen.

    Example::

        step = partc.Traced(model, batch, loss_of)
        for plan in ("ddp", "zero2", "fsdp"):
            print(partc.compile(step, "dp=8", plan=plan).cost)
    """

    model: nn.Module
    inputs: Any
    loss: Callable[..., Any] | None = None
    kind: Kind | None = None
    _states: dict[Wanted, State] = field(default_factory=dict, repr=False)
    _state: Seen | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            check_model(self.model, "Traced")
        check_loss(self.loss)

    @classmethod
    def of(cls, model: nn.Module | Traced, inputs: Any, loss: Callable[..., Any] | None) -> Traced:
        """The step of what ``compile`` is given."""
        if not isinstance(model, Traced):
            check_model(model)
            if inputs is None:
                raise TraceError(
                    where=f"compile({type(model).__name__})",
                    what="there are no example inputs",
                    why="the shapes of the global batch decide what is computed",
                    do="Pass a tuple of tensors; their values do not matter.",
                )
            return cls(model, inputs, loss)
        if inputs is not None or loss is not None:
            raise TraceError(
                where=f"compile({type(model.model).__name__})",
                what="inputs or a loss are given beside a traced step",
                why="the step was traced with its own",
                do="Leave them out, or pass the model itself.",
            )
        return model

    @property
    def trains(self) -> bool:
        """Whether it has a backward."""
        return (self.kind or kind_of(self.loss)) == "step"

    def graph(self, *, fold: bool = False, kept: TracedStages | None = None) -> Graph:
        """A copy of the joint graph of forward and backward, for the caller to change.

        Args:
            fold: leave out the middle of each stack of equal blocks; ``graph.folds`` says which.
            kept: leave out what a folded graph has shown to be equal to the rest.
        """
        return self.state(table(), fold=fold, kept=kept).graph

    @float32_default()
    def state(
        self, rows: Table, *, fold: bool = False, kept: TracedStages | None = None,
        hooks: tuple[str, ...] = (),
    ) -> State:  # fmt: skip
        """The graph with what the passes of this table made beside it, for the caller to change."""
        check_model(self.model, "Traced")
        self._check_unchanged()
        wanted = fold, kept, torch.is_grad_enabled(), rows, hooks
        if wanted not in self._states:
            source = Source.of(self.model, self.inputs, self.loss, self.kind)
            with hooked_modules(self.model, hooks):
                self._states[wanted] = traced(source, rows, fold=fold, kept=kept)
        return self._states[wanted].copied()

    def _check_unchanged(self) -> None:
        state = _state(self.model)
        self._state = self._state or state
        changes = [*self._state[0].differences(state[0]), *self._changed_numbers()]
        if state != self._state or changes:
            raise TraceError(
                where=type(self.model).__name__,
                what="the model is not as it was when its step was traced",
                why="; ".join(changes)
                or "parameters were frozen or have got hooks, or modules went from train() to "
                "eval()",
                do="Make a new partc.Traced for the model as it is now.",
            )

    def _changed_numbers(self) -> list[str]:
        """What the script has changed since a graph was traced."""
        return [each for s in self._states.values() for each in s.made["numbers"].all_changes()]


def _state(model: nn.Module) -> Seen:
    """What may not change behind a trace, as far as it can be seen."""
    trained = tuple((p.requires_grad, *gradient_hooks(p)) for p in model.parameters())
    return Fingerprint.of(model), trained, tuple(m.training for m in model.modules())
