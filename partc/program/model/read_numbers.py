"""Numbers and modes of a model's modules that its forward has read, by the modules' paths.

A stage has modules that look like the model's (``user_modules.py``). What a script changes in them
changes nothing of the program, so that it is refused; of what no forward reads it means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from partc.trace.frozen_numbers import FrozenNumbers

MODE = "training"


@dataclass(frozen=True)
class ReadNumbers:
    """What was read, by the path of the module: its mode; its other numbers, by attribute.

    ``mode``: that of the whole model.
    """

    mode: bool = True
    modes: Mapping[str, bool] = field(default_factory=dict)
    numbers: Mapping[tuple[str, str], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module | None, numbers: FrozenNumbers) -> ReadNumbers:
        """Those of a model, of the numbers that its program was traced with."""
        paths = {} if model is None else {module: path for path, module in model.named_modules()}
        found = dict(_plain(paths, numbers))
        modes = {path: value for (path, name), value in found.items() if name == MODE}
        whole = numbers.training is not False
        return cls(whole, modes, {key: value for key, value in found.items() if key[1] != MODE})


def _plain(
    paths: Mapping[nn.Module, str], numbers: FrozenNumbers
) -> Iterator[tuple[tuple[str, str], Any]]:
    for number in numbers.numbers:
        owner, name = number.owner(), number.keys[0]
        if not isinstance(owner, nn.Module) or owner not in paths or len(number.keys) > 1:
            continue
        if isinstance(name, str) and isinstance(number.value, bool | int | float | str):
            yield (paths[owner], name), number.value
