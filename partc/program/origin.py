"""The model that a program was compiled from: kept until a stage has taken its weights."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from torch import nn


class Origin:
    """Refers to a model; a copy in another process refers to none."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._kept = model
        self._model: Callable[[], nn.Module | None] = _none if model is None else ref(model)

    def release(self) -> nn.Module | None:
        """The model, None if it is gone; from now on only the script keeps it."""
        model, self._kept = self._model(), None
        return model

    def __reduce__(self) -> tuple[type[Origin], tuple[()]]:
        return Origin, ()


def _none() -> None:
    """What there is of no model."""
