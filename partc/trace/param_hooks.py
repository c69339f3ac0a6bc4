"""Gradient hooks of parameters: what they compute becomes part of the step, or they are refused.

``weight.register_hook(fn)`` lets ``fn`` replace the gradient of the whole batch, before it is added
to ``weight.grad``. A trace runs the hook on the fake that stands for the weight. What hangs on a
parameter behind the sum, such as an optimizer in the backward, has no place in a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.fx.traceback as provenance
from torch import Tensor

from partc.errors import TraceError
from partc.trace.reachable import is_ours
from partc.trace.source_lines import line_text

Hook = Callable[..., Any]


def gradient_hooks(param: Tensor) -> tuple[Hook, ...]:
    """The functions of the user's ``param.register_hook``, in their order."""
    every = (getattr(param, "_backward_hooks", None) or {}).values()
    return tuple(hook for hook in every if not is_ours(hook))


def has_hooks(params: Mapping[str, Tensor]) -> bool:
    """Whether a gradient hook hangs on one of the parameters."""
    return any(map(gradient_hooks, params.values()))


def check_hooks(params: Mapping[str, Tensor]) -> None:
    """TraceError if a parameter has a hook that runs once its gradient has been added up."""
    for name, param in params.items():
        for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
            raise TraceError(
                where=f"{name} ({place_of(hook)})",
                what="it has a hook that runs once its gradient has been added up",
                why="a program returns when all gradients are there, and ranks hold pieces",
                do="Remove the handle of register_post_accumulate_grad_hook, and do what the hook "
                "does behind step().",
            )


def copy_hooks(
    params: Mapping[str, Tensor], fakes: Mapping[str, Tensor], idle: dict[str, str]
) -> None:
    """Let the gradient hooks of parameters run on the gradients of the fakes in their place.

    ``idle`` gets the place of a hook that changes nothing, by the parameter's name.
    """
    for name, param in params.items():
        for hook in gradient_hooks(param):
            if fakes[name].requires_grad:
                fakes[name].register_hook(_recorded(hook, name, idle))


def check_no_more_hooks(params: Mapping[str, Tensor], fakes: Mapping[str, Tensor]) -> None:
    """TraceError if the step itself put a hook on a parameter: every step would add another."""
    for name, fake in fakes.items():
        added = gradient_hooks(fake)[len(gradient_hooks(params[name])) :]
        if added:
            raise TraceError(
                where=f"{name} ({place_of(added[0])})",
                what="the step puts another hook on this parameter every time it runs",
                why="the n-th step would run the hook n times",
                do="Register the hook once, before you compile.",
            )


def idle_notes(idle: Mapping[str, str]) -> tuple[str, ...]:
    """Sentences on hooks that looked at a gradient and left it as it was."""
    return tuple(
        f"{name} has a hook ({place}) that changes nothing; a program does not call it"
        for name, place in idle.items()
    )


def place_of(function: Any) -> str:
    """Where a function stands, as ``scale, train.py:12: def scale(grad):``."""
    plain = inspect.unwrap(getattr(function, "func", function))
    plain = getattr(plain, "__func__", plain)
    name = getattr(plain, "__qualname__", type(plain).__name__).rpartition("<locals>.")[2]
    code = getattr(plain, "__code__", getattr(type(plain).__call__, "__code__", None))
    return name if code is None else f"{name}, {line_text(code.co_filename, code.co_firstlineno)}"


def _recorded(hook: Hook, name: str, idle: dict[str, str]) -> Hook:
    """The hook, whose calls are recorded as those of the parameter's module."""

    def run(grad: Tensor) -> Any:
        version = grad._version
        with provenance.annotate({"module": name.rpartition(".")[0]}):
            result = hook(grad)
        if result is None and grad._version == version:
            idle[name] = place_of(hook)
        return result

    return run
