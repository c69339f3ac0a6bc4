"""Numbers and modes of a model's modules that its forward has read, by the modules' paths.

A stage has modules that look like the model's (``user_modules.py``). What a script changes in them
changes nothing of the program, so that it is refused; of what no forward reads it means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from partc.trace.frozen_numbers import FrozenNumbers, Number

MODE = "training"
PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class ReadNumbers:
    """What was read, by the path of the module: its mode; its other numbers, by attribute.

    ``mode``: that of the whole model. ``others``: tensors, arrays, functions, and what lies in
    lists and dicts of modules, with the module's path.
    """

    mode: bool = True
    modes: Mapping[str, bool] = field(default_factory=dict)
    numbers: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    others: tuple[tuple[str, Number], ...] = ()

    @classmethod
    def of(cls, model: nn.Module | None, numbers: FrozenNumbers) -> ReadNumbers:
        """Those of a model, of the numbers that its program was traced with."""
        paths = {} if model is None else {module: path for path, module in model.named_modules()}
        found = dict(_plain(paths, numbers))
        modes = {path: value for (path, name), value in found.items() if name == MODE}
        whole = numbers.training is not False
        plain = {key: value for key, value in found.items() if key[1] != MODE}
        return cls(whole, modes, plain, tuple(_others(paths, numbers)))


def _owned(
    paths: Mapping[nn.Module, str], numbers: FrozenNumbers
) -> Iterator[tuple[str, Number, bool]]:
    """The numbers under attributes of the model's modules, with the path, and which are plain."""
    for number in numbers.numbers:
        owner, name = number.owner(), number.keys[0]
        if isinstance(owner, nn.Module) and owner in paths and isinstance(name, str):
            is_plain = len(number.keys) == 1 and isinstance(number.value, PLAIN)
            yield paths[owner], number, is_plain


def _plain(
    paths: Mapping[nn.Module, str], numbers: FrozenNumbers
) -> Iterator[tuple[tuple[str, str], Any]]:
    for path, number, is_plain in _owned(paths, numbers):
        if is_plain:
            yield (path, number.keys[0]), number.value


def _others(paths: Mapping[nn.Module, str], numbers: FrozenNumbers) -> Iterator[tuple[str, Number]]:
    for path, number, is_plain in _owned(paths, numbers):
        if not is_plain and number.keys[0] != "_modules":
            yield path, number
