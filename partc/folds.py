"""Equal blocks of a list of modules, of which a graph holds only some."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fold:
    """Equal blocks of a list that a graph leaves out: each does what the one before them does."""

    path: str  # of the list, "model.layers"
    first: int
    last: int

    @property
    def num(self) -> int:
        return self.last - self.first + 1

    @property
    def like(self) -> str:
        """The path of the block that stands for those left out."""
        return f"{self.path}.{self.first - 1}"

    @property
    def after(self) -> str:
        """The path of the block behind those left out."""
        return f"{self.path}.{self.last + 1}"

    def covers(self, name: str) -> bool:
        """Whether a module, parameter or buffer is or stands in one of the blocks left out."""
        path, index = list_member(name)
        return path == self.path and self.first <= index <= self.last


def list_member(path: str) -> tuple[str, int]:
    """The list that a path leads through first, and which member of it: ``("model.layers", 3)``."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and i:
            return ".".join(parts[:i]), int(part)
    return "", 0
