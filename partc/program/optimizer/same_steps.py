"""Do all ranks step by the same numbers? What optimizers over a stage's parameters have of them.

Learning rates that differ by rank train another model on each, and so does a gradient that one rank
alone has cleared. Copies of a weight tell, but pieces of one do not: each rank has its own.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from partc.program.optimizer.beside import ALONE, TOGETHER, Beside, is_of_stage
from partc.program.optimizer.same_optimizer import HOW, plain_values
from partc.program.tensors.own_writes import OWN_WRITES

NAMES = ("learning rate of the optimizer", "hyperparameter, or class, of the optimizer")
STEPS = "number of steps of the optimizer"  # where ranks have none
# Optimizers that have stepped since they were last compared, and how gradients were then, by the
# id of the parameter.
_STEPPED: WeakKeyDictionary[Optimizer, dict[int, int]] = WeakKeyDictionary()
_BEFORE: WeakKeyDictionary[Optimizer, dict[int, int]] = WeakKeyDictionary()  # of one that steps now
_HOOKS: list[Any] = []
NONE, SET = 0, 1 << 32  # of how a gradient was; one that the step gave counts its changes from 1 on


@dataclass(frozen=True)
class Steps:
    """What optimizers have done on some tensors since ranks were last compared.

    ``numbers``: one of the learning rates, and one of all else; 0 where none stepped. ``grads``: by
    a tensor's id how its gradient was in the last step, ``NONE``, from ``SET`` on where the script
    has set it, or else 1 and how often it was changed in place. ``beside``: what else they stepped
    on, and what optimizers over none of these tensors did, by kind.
    """

    numbers: list[int]
    grads: Mapping[int, int]
    beside: Mapping[str, Beside] = field(default_factory=dict)


def watch_steps() -> None:
    """Let optimizers that step be known, once in a process."""
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_steps))
        _HOOKS.append(register_optimizer_step_post_hook(_stepped))


def steps_since(params: Collection[Tensor]) -> Steps:
    """The steps of those that stepped on these tensors since the last call."""
    stepped = _stepped_on(params)
    numbers, grads = _numbers(stepped), dict[int, int]()
    others = [each for each in [*_STEPPED] if not any(map(is_of_stage, _params(each)))]
    beside = {
        TOGETHER: Beside.of({each: _STEPPED[each] for each in stepped}),
        ALONE: Beside.of({each: _STEPPED.pop(each) for each in others}),
    }
    for each in stepped:
        grads |= _STEPPED.pop(each)
    return Steps(numbers, grads, beside)


def number_by_now(params: Collection[Tensor]) -> int:
    """One number of all that ``steps_since`` gives, and of what was written to stages since ranks
    were compared; forgets nothing.
    """
    stepped = _stepped_on(params)
    grads = [array("q", _STEPPED[each].values()).tobytes() for each in stepped]
    return _of_bytes(str([_numbers(stepped), OWN_WRITES.since()]).encode(), *grads)


def _stepped_on(params: Collection[Tensor]) -> list[Optimizer]:
    own = {id(param) for param in params}
    return [each for each in [*_STEPPED] if any(id(param) in own for param in _params(each))]


def _numbers(stepped: Collection[Optimizer]) -> list[int]:
    groups = [plain_values(group) for each in stepped for group in each.param_groups]
    rates = [group.get("lr") for group in groups]
    names = {*HOW, "lr"}
    others = [{n: v for n, v in group.items() if n not in names} for group in groups]
    kinds = [type(each).__name__ for each in stepped]
    return [_number(rates), _number([kinds, others])] if stepped else [0, 0]


def _params(optimizer: Optimizer) -> Iterable[Any]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _number(of: Any) -> int:
    """63 bits that tell these plain values from others."""
    return _of_bytes(json.dumps(of, sort_keys=True, default=str).encode())


def _of_bytes(*parts: bytes) -> int:
    return int.from_bytes(sha256(b"".join(parts)).digest()[:8]) >> 1


def _steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _BEFORE[optimizer] = _grads(optimizer)


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    before = _BEFORE.pop(optimizer, {})
    closure = any(map(callable, (*args, *kwargs.values())))  # which computes the gradients
    _STEPPED[optimizer] = _grads(optimizer) if closure else before


def _grads(optimizer: Optimizer) -> dict[int, int]:
    """How the gradient of each of an optimizer's parameters is; those of inference mode count no
    changes.
    """
    pairs = [(id(param), param.grad) for param in _params(optimizer)]
    try:
        return {i: NONE if g is None else 1 + g._version + _set(g) for i, g in pairs}
    except RuntimeError:
        return {i: NONE if g is None else 1 + _set(g) for i, g in pairs}


def _set(grad: Any) -> int:
    """``SET`` for a gradient that no step has shown."""
    return 0 if getattr(grad, "follower", grad) is not None else SET
