"""Functions that modules keep, ``self.mlpf = lambda x: m.c_proj(m.c_fc(x))``, for other modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

from torch import nn


def closed_over(function: FunctionType) -> Iterator[Any]:
    """What a function takes from where it was made: variables around it, and defaults."""
    for cell in function.__closure__ or ():
        if _is_filled(cell):
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def over_others(function: FunctionType, others: Mapping[nn.Module, nn.Module]) -> FunctionType:
    """The same function over other modules, by those that it takes now."""

    def other(value: Any) -> Any:
        return others.get(value, value) if isinstance(value, nn.Module) else value

    defaults = function.__defaults__ and tuple(map(other, function.__defaults__))
    cells = function.__closure__ and tuple(
        CellType(other(cell.cell_contents)) if _is_filled(cell) else cell
        for cell in function.__closure__
    )
    code, variables, name = function.__code__, function.__globals__, function.__name__
    made = FunctionType(code, variables, name, defaults, cells)
    named = function.__kwdefaults__
    made.__kwdefaults__ = named and {key: other(x) for key, x in named.items()}
    vars(made).update(vars(function))
    return made


def _is_filled(cell: CellType) -> bool:
    """Whether the variable has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
