"""Classes for copies of parametrized modules.

``torch.nn.utils.parametrize`` gives a module a class made for it alone, whose properties keep the
module. A copy of that class would keep the original, with its weights, for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize


def class_of_copy(module: nn.Module) -> type[nn.Module]:
    """The class for a copy of a module: of a parametrized one a new one, else its own."""
    kind = type(module)
    of = vars(module)["_modules"].get("parametrizations")
    if not isinstance(of, nn.ModuleDict) or not parametrize.is_parametrized(module):
        return kind
    computed = {name: property(_computed(name)) for name in of}
    return type(kind.__name__, (parametrize.type_before_parametrizations(module),), computed)


def give_own_classes(copied: nn.Module) -> None:
    """Let parts of a copy have classes that keep nothing of the original."""
    for module in copied.modules():
        kind = class_of_copy(module)
        if kind is not type(module):
            module.__class__ = kind


def _computed(name: str) -> Callable[[Any], Any]:
    return lambda module: module.parametrizations[name]()
