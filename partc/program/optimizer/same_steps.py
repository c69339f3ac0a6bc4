"""Do all ranks step by the same numbers? What optimizers over a stage's parameters have of them.

Learning rates that differ by rank train another model on each. Copies of a weight tell, but pieces
of one do not: each rank has its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from partc.program.optimizer.same_optimizer import HOW, plain_values
from partc.program.tensors.own_writes import OWN_WRITES

NAMES = ("learning rate of the optimizer", "hyperparameter of the optimizer")
STEPS = "number of steps of the optimizer"  # where ranks have none
_STEPPED: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()  # since they were last compared
_HOOKS: list[Any] = []


def watch_steps() -> None:
    """Let optimizers that step be known, once in a process."""
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_stepped))


def numbers_of_steps(params: Collection[Tensor]) -> list[int]:
    """A number of the learning rates, and one of all else, of those that stepped on these tensors
    since the last call; 0 where none did.
    """
    stepped = _stepped_on(params)
    for each in stepped:
        del _STEPPED[each]
    return _numbers(stepped)


def number_by_now(params: Collection[Tensor]) -> int:
    """One number of all that ``numbers_of_steps`` gives, and of what was written to stages since
    ranks were compared; forgets nothing.
    """
    return _number([_numbers(_stepped_on(params)), OWN_WRITES.since()])


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
    text = json.dumps(of, sort_keys=True, default=str)
    return int.from_bytes(sha256(text.encode()).digest()[:8]) >> 1


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _STEPPED[optimizer] = None
