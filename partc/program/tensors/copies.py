"""Tensors of a state dict that are copies: what a script writes into them is lost unless loaded.

``state_dict()`` of a plain module gives the memory of its parameters, so that scripts write into
it, as averages of weights do. Where a state dict has to be of copies, ``Writes`` remembers what was
written, and refuses what comes next where it was not loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from partc.errors import RunError
from partc.program.tensors.stage_tensors import StageTensor

_SETS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__",
         "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "set_data"}  # fmt: skip
_VIEWS = {"__get__", "detach", "view", "reshape", "flatten", "__getitem__", "select", "narrow"}


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors into which a function of torch writes."""
    name = getattr(func, "__name__", "")
    found = tree_leaves((kwargs or {}).get("out"))
    if name in _SETS or (name.endswith("_") and not name.endswith("__")):
        found += tree_leaves(args[0])
    return [x for x in found if isinstance(x, Tensor)]


class Writes:
    """What was written into the copies of one stage, by name, with the call that did."""

    def __init__(self) -> None:
        self._lost: dict[str, str] = {}

    def note(self, name: str, call: str) -> None:
        self._lost.setdefault(name, call)

    def forget(self) -> None:
        """What was written has been loaded, or replaced."""
        self._lost.clear()

    def check(self) -> None:
        """RunError where something was written, and not loaded."""
        if self._lost:
            name, call = next(iter(self._lost.items()))
            raise _in_vain(call, name)


class _Copied(Tensor):
    """A copy of the weight ``called``, which tells ``writes`` of what is written into it."""

    called: str
    writes: Writes

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        for x in written(func, args, kwargs):
            if isinstance(x, _Copied):
                x.writes.note(x.called, name)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        of = args[0] if args else None
        if isinstance(of, _Copied) and name in _VIEWS and _shares(found, of):
            return copied(found, of.called, of.writes)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


class WholeCopy(_Copied):
    """A copy that is a plain tensor, as a model of ``parallelize`` gives."""


class CopiedStageTensor(_Copied, StageTensor):
    """A copy that is a DTensor, whole on every rank, as a stage gives."""


def copied(tensor: Any, name: str, writes: Writes) -> Any:
    """The tensor as one that tells what is written into it."""
    if type(tensor) is StageTensor:
        tensor.__class__ = CopiedStageTensor
    elif type(tensor) is Tensor:
        tensor = tensor.as_subclass(WholeCopy)
    if isinstance(tensor, _Copied):
        tensor.called, tensor.writes = name, writes
    return tensor


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach() if isinstance(tensor, DTensor) else tensor.as_subclass(Tensor)


def _shares(found: Any, of: Tensor) -> bool:
    if not isinstance(found, Tensor) or isinstance(found, DTensor) or isinstance(of, DTensor):
        return isinstance(found, DTensor)
    with torch._C.DisableTorchFunctionSubclass():
        return bool(found.untyped_storage()._cdata == of.untyped_storage()._cdata)


def _in_vain(call: str, name: str) -> RunError:
    return RunError(
        where=f"state_dict()[{name!r}]",
        what=f"{call} has written into it, and the model has not got what was written",
        why="it is a copy, which joins the pieces that ranks have of this weight",
        do="Load it then, model.load_state_dict(state); or write into the parameters, under "
        "torch.no_grad(): for p, q in zip(model.parameters(), others): p.copy_(q).",
    )
