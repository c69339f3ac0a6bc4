"""Whole tensors in a model whose weights a stage has, while a library writes its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from partc.program.tensors.elsewhere import NAMES
from partc.program.tensors.states_elsewhere import STATES

_TABLES = "_parameters", "_buffers"
_METHODS = *NAMES, *STATES  # of which a part of a pipeline's model has its own


@contextmanager
def lent_whole(model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a model and its parts have the tensors of a whole state dict, as in one process:
    a writer may walk modules, names, states and what is frozen. No rank waits for another.

    ``model``: an emptied one, or the likeness of a stage.
    """
    parts = [*model.modules()]
    taken = *_TABLES, *_METHODS
    before = [{key: vars(p)[key] for key in taken if key in vars(p)} for p in parts]
    tables = _tables(model, state)
    try:
        for part in parts:
            for key in _METHODS:
                vars(part).pop(key, None)
            vars(part).update(tables.get(part, {}))
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            for key in _METHODS:
                vars(part).pop(key, None)
            vars(part).update(own)


def _tables(
    model: nn.Module, state: Mapping[str, Any]
) -> dict[nn.Module, dict[str, dict[str, Any]]]:
    """By part its tables of parameters and buffers, with those of the state in its order."""
    flags, made = _flags(model), dict[int, nn.Parameter]()
    parts = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, dict[str, dict[str, Any]]] = {}
    for name, value in state.items():
        path, _, leaf = name.rpartition(".")
        part = parts.get(path)
        table = None if part is None else _table_of(part, leaf)
        if part is None or table is None or not isinstance(value, Tensor):
            continue
        whole: Tensor = _plain(value)
        if table == "_parameters":
            flag = flags.get(name, True) and whole.is_floating_point()
            whole = made.setdefault(id(value), nn.Parameter(whole, requires_grad=flag))
        found.setdefault(part, {}).setdefault(table, {})[leaf] = whole
    return {
        part: {table: {**new, **_rest(part, table, new)} for table, new in each.items()}
        for part, each in found.items()
    }


def _rest(part: nn.Module, table: str, new: Mapping[str, Any]) -> dict[str, Any]:
    """What a table has beside the new entries."""
    return {name: x for name, x in vars(part)[table].items() if name not in new}


def _table_of(part: nn.Module, leaf: str) -> str | None:
    """In which table a part has a tensor, also one that only another pipeline rank has."""
    return next((each for each in _TABLES if leaf in vars(part)[each]), None)


def _flags(model: nn.Module) -> dict[str, bool]:
    """What is trained, by all names: parts say it of parameters of other pipeline ranks, too."""
    flags = {name: p.requires_grad for name, p in model._parameters.items() if p is not None}
    for path, part in model.named_children():
        every = part.named_parameters(remove_duplicate=False)
        flags |= {f"{path}.{name}": p.requires_grad for name, p in every}
    return flags


def _plain(value: Tensor) -> Tensor:
    with DisableTorchFunctionSubclass():
        return value.detach().as_subclass(Tensor)
