"""What a stage is asked to run: a step, a loss or a forward, in which mode, for which batch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from partc.plan.sharding import Layout, dtype_name
from partc.program.step.autocast import check_autocast
from partc.trace.arguments import Given
from partc.trace.record import Kind
from partc.users_line import warn

if TYPE_CHECKING:
    from partc.graph import Graph
    from partc.program import Program

Mode = Literal["train", "eval"]
Typed = tuple[tuple[int, ...], torch.dtype]
NO_GRAD = "no_grad"  # in the place of a variant, where ranks tell each other what they run
OTHER_LOSS = "other_loss_"  # before the number of a loss, in the same place
WORDS = {"step": "step", "loss": "eval_step", "forward": "forward"}


@dataclass(frozen=True)
class Wanted:
    """One program of a stage: shapes and dtypes of its inputs are those of the whole batch.

    ``replicated``: every rank computes the whole batch, as data ranks cannot share its rows.
    ``form``: of a forward beside a training step, what it is called with, as JSON of ``Arguments``.
    ``autocast``: the autocast around the call, as ``cpu bfloat16``. ``variant``: the name of
    another plan for the same step, which a controller chooses.
    """

    kind: Kind
    mode: Mode
    inputs: tuple[Typed, ...]
    replicated: bool = False
    form: str = ""
    autocast: str = ""
    variant: str = ""

    @classmethod
    def of(cls, kind: Kind, mode: Mode, inputs: Sequence[Tensor], form: str = "") -> Wanted:
        return cls(kind, mode, tuple((tuple(x.shape), x.dtype) for x in inputs), form=form)

    def as_text(self) -> str:
        """Plain text for other ranks, and for ``program.json``; ``parse`` reads it."""
        inputs = [[list(shape), dtype_name(dtype)] for shape, dtype in self.inputs]
        last = [self.autocast, *([self.variant] if self.variant else [])]
        last = last if any(last) else []
        return json.dumps([self.kind, self.mode, inputs, self.replicated, self.form, *last])

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """The same from its text; ValueError or TypeError where that is malformed."""
        kind, mode, inputs, replicated, form, *last = json.loads(text)
        autocast, variant, *more = (*last, "", "")[: max(2, len(last))]
        check_autocast(autocast)
        of_types = type(replicated) is bool and type(form) is str and not more
        of_types = of_types and (not variant or is_name(variant))
        if kind not in WORDS or mode not in get_args(Mode) or not of_types:
            raise ValueError(f"{text!r} is no step of a stage")
        typed = tuple((tuple(int(size) for size in shape), _dtype(name)) for shape, name in inputs)
        return cls(kind, mode, typed, replicated, form, autocast, variant)

    @property
    def is_without_grad(self) -> bool:
        """Whether a rank told others that it runs this under ``torch.no_grad()``."""
        return self.variant.endswith(NO_GRAD)

    @property
    def is_of_other_loss(self) -> bool:
        """Whether a rank told others that it runs another loss than the stage's own."""
        return self.variant.startswith(OTHER_LOSS)

    def __str__(self) -> str:
        """``step in train mode of (int64[8, 16], int64[8, 16])``."""
        inputs = ", ".join(f"{dtype_name(dtype)}{list(shape)}" for shape, dtype in self.inputs)
        alike = ", the same on every rank" if self.replicated else ""
        under = f" under autocast ({self.autocast})" if self.autocast else ""
        known = not self.variant or self.is_of_other_loss or self.is_without_grad
        by = "" if known else f" by the variant {self.variant}"
        if self.is_of_other_loss:
            by = f" by loss {self.variant.removeprefix(OTHER_LOSS).partition('_')[0]} of the stage"
        by += " under torch.no_grad()" if self.is_without_grad else ""
        return f"{WORDS[self.kind]} in {self.mode} mode of ({inputs}){alike}{under}{by}"


def other_loss(number: int) -> str:
    """What ranks tell each other of another loss, or form of arguments, over a stage's weights.

    >>> other_loss(1)  # of the stage's own loss, the first, they tell nothing
    'other_loss_2'
    """
    return f"{OTHER_LOSS}{number + 1}"


def is_name(variant: object) -> bool:
    """Whether a variant may be called so: a word of letters, figures, ``_`` and ``-``."""
    return isinstance(variant, str) and re.fullmatch(r"[A-Za-z][\w-]{0,63}", variant) is not None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype


class Recipe(Protocol):
    """What compiled a program in this process, so that it can compile others of the same model."""

    def program(self, wanted: Wanted, first: Program) -> Program:
        """A program whose parameters are stored as those of ``first``."""
        ...

    def variant(self, wanted: Wanted, plan: Any, first: Program) -> Program:
        """The step of ``first`` by another plan, with parameters stored as ``first`` does."""
        ...

    @property
    def held(self) -> Callable[[], nn.Module | None]:
        """Gives the script's model, None once it is gone."""
        ...

    def graph(self, first: Program) -> Graph:
        """The joint graph of the first program's step before any plan, without what repeats."""
        ...

    def keep_twin(self) -> None:
        """Copy the model without its weights, for a script that lets it go."""
        ...

    def given(self, args: Sequence[Any], named: Mapping[str, Any]) -> Given:
        """What the model's forward is given by a call."""
        ...

    def batch_of(
        self, wanted: Wanted, first: Program, steps: Mapping[str, Layout]
    ) -> Sequence[Layout]:
        """Along which dim each input of a forward has the batch, R for none, where the inputs of
        the steps have it as ``steps`` says.
        """
        ...

    def ignores(
        self, wanted: Wanted, to: Wanted, first: Program, values: Sequence[float | None]
    ) -> str:
        """Why rows that fill up a batch would change loss or gradients; empty if they do not."""
        ...

    def also(self, inputs: Any, loss: Callable[..., Any] | None, first: Program) -> Program:
        """A step of another loss, whose parameters are stored as those of ``first``."""
        ...


def warn_of_mode(wanted: Wanted, model: nn.Module) -> None:
    """Warn where a model is lent to a program of the other mode, whose dropout is another."""
    mine = "train" if model.training else "eval"
    if mine != wanted.mode:
        warn(
            f"partc: {type(model).__name__} is in {mine} mode, and the program is in {wanted.mode} "
            "mode, in which it was compiled: dropout and batch norms are the program's. If that is "
            f"meant, call model.{'train' if wanted.mode == 'train' else 'eval'}() before; else "
            "compile again"
        )
