"""The model that a program was compiled from, as long as the script keeps it."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from torch import nn


class Origin:
    """Refers to a model without keeping it; a copy in another process refers to none."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model: Callable[[], nn.Module | None] = _none if model is None else ref(model)

    @property
    def model(self) -> nn.Module | None:
        return self._model()

    def __reduce__(self) -> tuple[type[Origin], tuple[()]]:
        return Origin, ()


def _none() -> None:
    """What there is of no model."""
