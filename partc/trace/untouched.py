"""Leave a model as it was: no fake tensor, and nothing else that a run sets, may stay in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor, nn

# The tables of a module: parameters, buffers, submodules and hooks. Handles of hooks refer to the
# table itself, so its content is restored and not the table exchanged.
TABLES = tuple(key for key, value in vars(nn.Module()).items() if isinstance(value, dict | set))
_HOOKS = tuple(key for key in TABLES if key.endswith("_hooks"))
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore attributes and hooks of every module, and of its parameters and buffers."""
    modules = [(each, dict(vars(each)), _tables(each)) for each in model.modules()]
    own = [*chain(model.parameters(), model.buffers())]
    tensors = [(each, dict(vars(each)), _hooks(each)) for each in own]
    try:
        yield
    finally:
        for owner, attributes, tables in (*modules, *tensors):
            _put_back(vars(owner), attributes)
            for table, content in tables:
                _put_back(table, content)


def hooks_of(module: nn.Module) -> dict[tuple[str, int], Any]:
    """The hooks of a module, by table and number."""
    own = vars(module)
    tables = ((key, own[key]) for key in _HOOKS if key in own)
    return {(key, number): hook for key, table in tables for number, hook in table.items()}


def _tables(module: nn.Module) -> list[tuple[Any, Any]]:
    """The tables of a module, each with a copy of its content."""
    own = vars(module)
    return [(own[key], own[key].copy()) for key in TABLES if key in own]


def _hooks(tensor: Tensor) -> list[tuple[Any, Any]]:
    tables = [getattr(tensor, key, None) for key in _HOOKS_OF_TENSORS]
    return [(table, table.copy()) for table in tables if table is not None]


def _put_back(table: Any, content: Any) -> None:
    table.clear()
    table.update(content)
