"""A step that waits for the script: it gives out results, and goes on with their gradients.

Its ``step`` is a generator: it yields the results by name, and is sent a gradient for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from partc.graph.given_back import gradients

Gradients = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def waits(step: Any) -> bool:
    """Whether a rank's module, or its class, has a step that waits for the script."""
    return inspect.isgeneratorfunction(getattr(step, "step", None))


def whole_step(step: Any, run: Callable[..., Any], inputs: Sequence[Tensor],
               given: Gradients = gradients) -> Any:  # fmt: skip
    """What ``run``, the ``step`` of a rank's module, gives for inputs.

    Of a step that waits for the script: a loss of 0, and the results; ``given`` computes the
    gradients in the place of the script.
    """
    if not waits(step):
        return run(*inputs)
    running = run(*inputs)
    results: Mapping[str, Tensor] = next(running)
    last = end(running, given([*results.values()]))
    return next(iter(results.values())).new_zeros(()), {**results, **last}


def end(running: Any, grads: Sequence[Tensor]) -> Mapping[str, Tensor]:
    """Let a step that waits go on to its end; gives the gradients of inputs, by their names."""
    try:
        running.send(grads)
    except StopIteration as ended:
        return ended.value or {}
    raise AssertionError("a step waits for the script once")
