"""A script that accumulates gradients over several steps, and divides the losses that these gave.

``model.step(...) / 4`` divides a number: the gradients were added to ``.grad`` before, so that the
sum of four of them is four times the mean that the script wants.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from partc.program.model.habits import once
from partc.users_line import warn

MOST = 1024  # steps that are kept; a loop without an optimizer of torch never ends them
_DIVISORS = deque[float](maxlen=MOST)  # of losses, since an optimizer has stepped
_STEPS = deque[bool](maxlen=MOST)  # steps since then, and whether their gradients were scaled
_HOOKS: list[Any] = []


def divided_by(number: Any) -> None:
    """The loss of a step was divided by a number of Python."""
    if isinstance(number, int | float) and len(_DIVISORS) < len(_STEPS):
        _DIVISORS.append(number)


def took_step(*, scaled: bool) -> None:
    """A step has added its gradients."""
    _STEPS.append(scaled)
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    num, divisors = len(_STEPS), [*_DIVISORS]
    unscaled = not any(_STEPS)
    _STEPS.clear()
    _DIVISORS.clear()
    if num > 1 and unscaled and divisors == [num] * num and once("divided"):
        warn(
            f"partc: {type(optimizer).__name__}.step() follows {num} steps, each of whose losses "
            f"was divided by {num}. That divides no gradient: model.step() had added them before. "
            f"Call model.step(..., scale=1 / {num}); or keep loss = model(...) / {num} and "
            "loss.backward()",
        )
