"""What a step refuses: inputs, casts and numbers other than those it was compiled with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partc.errors import RunError
from partc.plan.sharding import dtype_name
from partc.program.role import Role
from partc.trace.frozen_numbers import FrozenNumbers

FIRST_STEPS = 3  # that look at all numbers of the model


class StepChecks:
    """The checks before each step of a role.

    ``numbers``: those of the model's Python in the process that compiled it.
    """

    def __init__(self, role: Role, numbers: FrozenNumbers) -> None:
        self.role, self.numbers, self.num_steps = role, numbers, 0

    def check(self, inputs: Sequence[Tensor], device: str) -> None:
        """RunError if inputs, dtypes or the model's numbers are not as they were compiled."""
        check_default_dtype()
        check_autocast(device)
        self._check_inputs(inputs, device)
        self._check_numbers()

    def _check_inputs(self, inputs: Sequence[Tensor], device: str) -> None:
        wanted = [(shape, dtype, device) for shape, dtype in self.role.inputs.values()]
        given = [(tuple(x.shape), x.dtype, x.device.type) for x in inputs]
        if given == wanted:
            return
        names = list(self.role.inputs)
        expected = [f"{n}: {_typed(*w)}" for n, w in zip(names, wanted, strict=True)]
        got = [_typed(*each) for each in given]
        raise RunError(
            where="step",
            what=f"expected ({', '.join(expected)}), got ({', '.join(got)})",
            why="the program was compiled for one global batch",
            do="Pass the whole batch on every rank, or compile for this shape.",
        )

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


def check_autocast(device: str) -> None:
    """RunError where a program's ops would get other dtypes than they were compiled with."""
    if torch.is_autocast_enabled(device):
        raise RunError(
            where="step",
            what=f'it runs inside of torch.autocast("{device}")',
            why="the casts of a program are those that its loss made when it was compiled",
            do="Enter autocast in the loss that is compiled, and call step outside of it.",
        )


def _typed(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> str:
    return f"{dtype_name(dtype)}{list(shape)} on {device}"
