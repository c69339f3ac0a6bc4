"""Gradients of a step that a script clears before an optimizer has read them.

``model.step(...)`` computes gradients at once. A loop in the order of forward, ``zero_grad``,
backward, ``optimizer.step`` would clear them, and train nothing without a word.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

LOOKED_AT = 3  # steps of a stage; a loop clears in all of them or in none
_GAVE: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()  # and no optimizer stepped since
_SEEN: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_HOOKS: list[Any] = []


def gave_gradients(stage: nn.Module) -> None:
    """A step of this stage has put gradients into ``.grad``."""
    if _SEEN.setdefault(stage, 0) < LOOKED_AT:
        _GAVE[stage] = None
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for stage in [*_GAVE]:
        own = {id(param) for param in stage.parameters() if param.requires_grad}
        params = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
        if params:
            del _GAVE[stage]
            _SEEN[stage] += 1
            if all(_is_cleared(param.grad) for param in params):
                _SEEN[stage] = LOOKED_AT  # told once
                _warn(optimizer)


def _is_cleared(grad: Tensor | None) -> bool:
    if grad is None:
        return True
    piece = grad.to_local() if isinstance(grad, DTensor) else grad
    return not piece.any()


def _warn(optimizer: Optimizer) -> None:
    warnings.warn(
        f"partc: {type(optimizer).__name__}.step() finds no gradient: they were cleared behind "
        "model.step(), which computes them at once, so that nothing is trained. Call zero_grad() "
        "before model.step(), or keep loss = model(...) and loss.backward()",
        stacklevel=4,
    )
