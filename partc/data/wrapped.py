"""A dataset that stands for the script's own, and makes a rank's batches of its rows."""

from __future__ import annotations

from typing import Any


class Wrapped:
    """Has the length and the public names of the dataset inside, for scripts that use them.

    ``loader.dataset.classes`` reads, and ``loader.dataset.transform = ...`` sets what the script's
    dataset has. Names with an underscore are this object's own.
    """

    _inside: Any

    def __len__(self) -> int:
        return len(self._inside)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # also while it is unpickled, before it has anything inside
        return getattr(self._inside, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._inside, name, value)
