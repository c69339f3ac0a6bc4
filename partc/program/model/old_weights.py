"""A loss that reads the weights from which a model began, beside what its stage returns.

Scripts keep the model that they gave to parallelize, and add a penalty of its weights to the loss.
The stage has others, which the penalty would not train. Both get gradients in one backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partc.errors import RunError

_LAST = {"stage": -1, "old": -1}  # the backward, by torch's number, in which each got a gradient
_NAMES: list[str] = []  # of the old weight that got one last


def stage_backward() -> None:
    """A stage takes part in the backward that runs; RunError if an old weight does, too."""
    _seen("stage")


def refuse_in_one_backward(name: str) -> Callable[[Tensor], None]:
    """A gradient hook of an old weight, which refuses the backward of a stage's results."""

    def old_weight(_: Tensor) -> None:
        _NAMES[:] = [name]
        _seen("old")

    return old_weight


def _seen(what: str) -> None:
    _LAST[what] = torch._C._current_graph_task_id()
    if _LAST["stage"] == _LAST["old"] >= 0:
        raise RunError(
            where=f"loss.backward(): {_NAMES[0]}",
            what="the loss reads this weight of the model that was given to parallelize",
            why="what parallelize gave trains weights of its own, so that a penalty of these "
            "would train nothing",
            do="Take the parameters of what parallelize gave, in each step: "
            "sum(p.pow(2).sum() for p in model.parameters()).",
        )
