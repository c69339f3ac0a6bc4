"""A model whose weights a stage has taken over: calls of it, and its states, are refused in words,
not by torch's.
"""

from __future__ import annotations

import functools
import sys
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from partc.errors import RunError

_EMPTY: WeakSet[nn.Module] = WeakSet()
_HOOKS: list[Any] = []


def refuse_calls(model: nn.Module) -> None:
    """From now on RunError where the model, or a part of it, is called without values.

    By torch's hook for all modules, as one of the model would be copied and pickled with it.
    """
    _EMPTY.update(model.modules())
    if not _HOOKS:
        _HOOKS.append(register_module_forward_pre_hook(_check_values))
        _refuse_states()


def _refuse_states() -> None:
    """Refuse ``state_dict`` of such a model, also by a method that a script has kept from before.

    By what each ``state_dict`` calls: ``old = model.state_dict`` is torch's own from then on.
    """
    plain = nn.Module._save_to_state_dict

    @functools.wraps(plain)
    def save_to_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if self in _EMPTY and is_emptied(self) and not _is_asked_by_partc():
            raise no_values(f"{type(self).__name__}.state_dict()")
        plain(self, *args, **kwargs)

    nn.Module._save_to_state_dict = save_to_state_dict  # type: ignore[method-assign]


def _is_asked_by_partc() -> bool:
    """Whether partc is the one outside of torch's modules who asks for a state."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == nn.Module.__module__:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("partc.")


def _check_values(module: nn.Module, args: tuple[Any, ...]) -> None:
    tensors = [x for x in args if isinstance(x, Tensor)]
    if not (tensors and all(map(_has_none, tensors))) and is_emptied(module):
        raise no_values(f"{type(module).__name__}(...)")


def is_emptied(module: nn.Module) -> bool:
    """Whether a stage has taken this module's values, and it has none of its own."""
    params = [*module.parameters()] if module in _EMPTY else []
    return bool(params) and all(map(_is_bare, params))


def no_values(where: str) -> RunError:
    """The refusal of a call of a model without values."""
    return RunError(
        where=where, what="this model has no values any more",
        why="its weights are the stage's since its first training step",
        do="Call what accelerator.prepare returned, or trainer.model_wrapped of a Trainer; the "
        "trained weights are whole in accelerator.get_state_dict(model), in "
        "trainer.model_wrapped.state_dict(), which all ranks call, and in the folder of "
        "trainer.save_model(folder).",
    )  # fmt: skip


def _is_bare(param: Tensor) -> bool:
    """Whether it lies on ``meta``, and no trace or functional call has put another in its place."""
    return param.is_meta and not isinstance(param, FakeTensor)


def _has_none(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)
