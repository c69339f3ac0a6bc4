"""What a step refuses: inputs, casts and numbers other than those it was compiled with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from partc.errors import RunError
from partc.program.given import check_inputs, plain_inputs
from partc.program.role import Role
from partc.trace.frozen_numbers import FrozenNumbers

FIRST_STEPS = 3  # that look at all numbers of the model


class StepChecks:
    """The checks before each step of a role.

    ``numbers``: those of the model's Python in the process that compiled it. ``compare`` is given
    the inputs, or None where this rank refuses them, and compares all ranks now and then.
    """

    def __init__(
        self, role: Role, numbers: FrozenNumbers, compare: Callable[[Sequence[Tensor] | None], None]
    ) -> None:
        self.role, self.numbers, self.num_steps = role, numbers, 0
        self.compare = compare

    def taken(self, inputs: Sequence[Tensor], device: str) -> tuple[Tensor, ...]:
        """What the step takes: the inputs as plain tensors.

        RunError if inputs, dtypes or the model's numbers are not as they were compiled, or ranks do
        not hold alike what they must.
        """
        try:
            plain = self._checked(inputs, device)
        except RunError:
            self.compare(None)  # the other ranks would wait for this one
            raise
        self.compare(plain)
        return plain

    def _checked(self, inputs: Sequence[Tensor], device: str) -> tuple[Tensor, ...]:
        check_default_dtype()
        _check_autocast(device)
        plain = plain_inputs(inputs, self.role)
        check_inputs(plain, self.role, device)
        self._check_numbers()
        return plain

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
                why="a program has the numbers of the model as they were when it was compiled",
                do="Compile again, make it an input of the step, or a buffer.",
            )


def check_default_dtype() -> None:
    """RunError where tensors of a program that name no dtype would not be float32."""
    default = torch.get_default_dtype()
    if default != torch.float32:
        raise RunError(
            where="torch.get_default_dtype()",
            what=f"the default dtype is {default}",
            why="the program was compiled with float32 as the default of what names no dtype",
            do="Call torch.set_default_dtype(torch.float32) before it is loaded and run.",
        )


def _check_autocast(device: str) -> None:
    """RunError where a program's ops would get other dtypes than they were compiled with."""
    if torch.is_autocast_enabled(device):
        raise RunError(
            where="step",
            what=f'it runs inside of torch.autocast("{device}")',
            why="the casts of a program are those that its loss made when it was compiled",
            do="Enter autocast in the loss that is compiled, and call step outside of it.",
        )
