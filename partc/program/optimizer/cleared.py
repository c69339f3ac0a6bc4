"""Gradients of a step that a script clears before an optimizer has read them.

``model.step(...)`` computes gradients at once. A loop in the order of forward, ``zero_grad``,
backward, ``optimizer.step`` would clear them, and train nothing without a word. Gradients that the
step itself gave as zeros, as those before a layer that starts at 0 are, are not cleared. Neither
does a loop train whose losses get no ``backward()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from partc.users_line import warn

LOOKED_AT = 3  # steps of a stage; a loop clears in all of them or in none
# By stage the parameters, by id, whose gradients were not 0; no optimizer has stepped since.
_GAVE: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
_AWAIT: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()  # a backward
_SEEN: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_HOOKS: list[Any] = []


def gave_gradients(stage: nn.Module) -> None:
    """A step of this stage has put gradients into ``.grad``."""
    if _SEEN.setdefault(stage, 0) < LOOKED_AT:
        _SEEN[stage] += 1
        _GAVE[stage] = _with_gradients([p for p in stage.parameters() if p.requires_grad])
        _look()


def awaits_backward(stage: nn.Module) -> None:
    """A call of this stage has given what the script computes gradients by."""
    if torch.is_grad_enabled() and _SEEN.setdefault(stage, 0) < LOOKED_AT:
        _SEEN[stage] += 1
        _AWAIT[stage] = None
        _look()


def _look() -> None:
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Of an optimizer that steps on a stage's parameters, whether there are gradients; one that is
    given a closure computes them later.
    """
    for stage in [] if len(args) > 1 or kwargs.get("closure") else [*_AWAIT]:
        params = _stepped_on(stage, optimizer)
        if params:
            del _AWAIT[stage]
        if params and all(param.grad is None for param in params):
            _SEEN[stage] = LOOKED_AT  # told once
            _warn_of_no_backward(optimizer)
    for stage in [*_GAVE]:
        params = _stepped_on(stage, optimizer)
        if _GAVE[stage] & {id(param) for param in params}:
            del _GAVE[stage]
            if not _with_gradients(params):
                _SEEN[stage] = LOOKED_AT  # told once
                _warn(optimizer)


def _stepped_on(stage: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    own = {id(param) for param in stage.parameters() if param.requires_grad}
    return [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]


def _with_gradients(params: Sequence[Tensor]) -> set[int]:
    """The parameters, by id, whose gradients are not all 0 on this rank."""
    grads = {id(param): param.grad for param in params if param.grad is not None}
    pieces = [each.to_local() if isinstance(each, DTensor) else each for each in grads.values()]
    found = torch.stack([piece.any() for piece in pieces]).tolist() if pieces else []
    return {key for key, is_any in zip(grads, found, strict=True) if is_any}


def _warn(optimizer: Optimizer) -> None:
    warn(
        f"partc: {type(optimizer).__name__}.step() finds no gradient: they were cleared behind "
        "model.step(), which computes them at once, so that nothing is trained. Call zero_grad() "
        "before model.step(), or keep loss = model(...) and loss.backward()"
    )


def _warn_of_no_backward(optimizer: Optimizer) -> None:
    warn(
        f"partc: {type(optimizer).__name__}.step() finds no gradient: no backward() was called for "
        "what model(...) gave, or the gradients were cleared since, so that nothing is trained. "
        "Call loss.backward() between model(...) and optimizer.step()",
    )
