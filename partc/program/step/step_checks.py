"""What a step refuses: inputs, casts and numbers other than those it was compiled with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from partc.errors import RunError
from partc.plan.sharding import dtype_name
from partc.program.role import Role
from partc.program.step.decided import Decided
from partc.program.step.given import check_inputs, plain_inputs
from partc.program.tensors.rank_tensors import RankTensors
from partc.trace.frozen_numbers import CHANGING, FrozenNumbers

FIRST_STEPS = 3  # that look at all numbers of the model


class Guard(Protocol):
    """What is looked at before every run, whichever program runs (``run_state.py``)."""

    @property
    def tensors(self) -> RankTensors: ...

    def begin(self) -> None: ...

    def compare(self, role: Role, inputs: Sequence[Tensor] | None) -> None: ...


class StepChecks:
    """The checks before each run of a role.

    ``numbers``: those of the model's Python in the process that compiled it. ``guard`` looks at
    everything else on this rank, and compares all ranks now and then. ``decided``: the buffers
    whose values decided what the program does.
    """

    def __init__(self, role: Role, numbers: FrozenNumbers, guard: Guard, decided: Decided) -> None:
        self.role, self.numbers, self.guard, self.num_steps = role, numbers, guard, 0
        self.decided = decided

    def taken(
        self, inputs: Sequence[Tensor], device: str, turn: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """What the program takes: the inputs as plain tensors; all ranks call this together.

        ``turn``: what it computes at once, where the inputs are several microbatches.
        RunError if inputs, dtypes or the model's numbers are not as they were compiled, or ranks do
        not hold alike what they must.
        """
        try:
            plain = self.checked(inputs if turn is None else turn, device)
            self.guard.begin()
        except RunError:
            self.refuse()
            raise
        if turn is not None:
            plain = tuple(x.contiguous() for x in inputs)
        self.guard.compare(self.role, plain)
        return plain

    def refuse(self) -> None:
        """Tell the other ranks, which would wait for this one, that it does not run."""
        self.guard.compare(self.role, None)

    def checked(self, inputs: Sequence[Tensor], device: str) -> tuple[Tensor, ...]:
        """The inputs as plain tensors; RunError if they are not as they were compiled."""
        plain = plain_inputs(inputs, self.role)
        check_inputs(plain, self.role, device)
        self._check_numbers()
        self.decided.check()
        return tuple(x.contiguous() for x in plain)  # as the program's kernels were given them

    def _check_numbers(self) -> None:
        """Look whether the script has changed a number that the model was compiled with.

        All of them at the first steps, later some at each step, so that it takes no time.
        """
        first = self.num_steps < FIRST_STEPS
        changes = self.numbers.all_changes() if first else self.numbers.changes()
        self.num_steps += 1
        if changes:
            raise RunError(
                where="step",
                what="; ".join(changes[:4]),
                why="a program has numbers, and tensors from outside, as they were when compiled",
                do=_back_in_its_mode(changes[0]) or CHANGING,
            )


def _back_in_its_mode(change: str) -> str:
    """What to do about a module in another mode, as ``model.encoder.training was True ... now``; ""
    for another change. It may be of the model that the script has kept, to evaluate a part of it.
    """
    module, is_mode, values = change.partition(".training was ")
    if not is_mode:
        return ""
    call = "train" if values.startswith("True") else "eval"
    return (
        f"Call {module}.{call}() before this step. The modules of the model that partc was given "
        "are these too: put a part of it back in its mode where it was evaluated. A part that is "
        "to train in another mode has to be in it when the model is compiled."
    )


def check_world_stands(world: Any) -> None:
    """RunError if the process groups of a stage have been destroyed; ``world`` is its default."""
    if dist.group.WORLD is not world:
        raise RunError(
            where="step",
            what="the process group in which the stage was made is gone",
            why="it was destroyed, and perhaps another one was made",
            do="Call program.module() again, and load what was saved before.",
        )


@contextmanager
def can_be_moved(move: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """RunError where ``.to()`` of a stage asks for what this process has not got."""
    try:
        if move(torch.empty(0)).is_meta:
            raise RuntimeError("a stage computes, and tensors on meta have no values")
        yield
    except (AssertionError, RuntimeError) as error:
        raise RunError(
            where="stage.to(...)",
            what="its tensors cannot be moved so",
            why=str(error).partition("\n")[0],
            do='Say where ranks compute when the stage is made: program.module(device="cuda").',
        ) from None


def check_casts(casts: Mapping[str, torch.dtype]) -> None:
    """RunError if tensors were cast to other dtypes than they were compiled with."""
    for name, dtype in casts.items():
        raise RunError(
            where=name,
            what=f"was cast to {dtype_name(dtype)}",
            why="the casts, sums and constants of the program are for the dtypes of the model",
            do="Cast the model and compile it again, or enter torch.autocast in its loss.",
        )
