"""Refuse to train a wrapped model by its methods or parts, before it was called a first time.

A method that runs its layers, ``agent.get_value(x)``, and a part, ``model.head(x)``, are the
model's own until then: each rank would train a model of its own, on its own rows, and nobody would
notice.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from partc.errors import RunError
from partc.program.ranks.handshake import world_size

_WATCHED: Any = WeakIdKeyDictionary()  # a model's parameters -> who says whether it was called
_HOOKS: list[Any] = []


class TrainedAlone:
    """The gradients of a wrapped model that was never called; there should be none."""

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._before = {id(p): id(p.grad) for p in model.parameters() if p.grad is not None}
        self._is_over = world_size() == 1
        for param in [] if self._is_over else model.parameters():
            _WATCHED[param] = ref(self)
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_before_step))

    def end(self) -> None:
        """The model was called: optimizers are looked at no more."""
        self._is_over, model = True, self._model()
        for param in [] if model is None else model.parameters():
            _WATCHED.pop(param, None)

    def check(self, where: str) -> None:
        """RunError where the script has computed gradients of the model itself."""
        model = self._model()
        if self._is_over or model is None:
            return
        for name, param in model.named_parameters():
            if self.is_new(param):
                raise _alone(where, name, type(model).__name__)

    def is_new(self, param: Tensor) -> bool:
        """Whether a parameter has a gradient that it had not when the model was wrapped."""
        return param.grad is not None and self._before.get(id(param)) != id(param.grad)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups if len(_WATCHED) else []:
        for param in group["params"]:
            watched = _WATCHED.get(param, lambda: None)()
            if watched is not None and watched.is_new(param):
                watched.check(f"{type(optimizer).__name__}.step")


def _alone(where: str, param: str, model: str) -> RunError:
    return RunError(
        where=where,
        what=f"{param} of the {model} has a gradient, and the model was never called",
        why="a method or a part of the model, called by the script, runs on this rank alone: each "
        "rank would train a model of its own",
        do="Call the model, model(x), whose forward may call these; or train by loss=, as "
        "loss_of(model, x, y) may call methods and parts: loss = model.step(x, y).",
    )
