"""Equal blocks of a list of modules, and equal stages of them, of which a graph holds only some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Entry = TypeVar("Entry")
DEPTHS = (1, 2, 3)  # how many list indices deep a block may stand


@dataclass(frozen=True)
class RepeatedBlocks:
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

    def twin(self, name: str) -> str:
        """What a block left out owns under a name, in the block that stands for it."""
        return self.like + name.removeprefix("{}.{}".format(*list_member(name)))


@dataclass(frozen=True)
class StageLike:
    """A pipeline stage that does what stage ``number`` of a graph does, with layers of its own."""

    number: int
    path: str = ""  # of the list that its layers stand in
    shift: int = 0  # of its layers' numbers against that stage's

    def moved(self, name: str) -> str:
        """The path here of what stands at a path there.

        >>> StageLike(1, "h", 8).moved("h.4.mlp"), StageLike(1, "h", 8).moved("wte")
        ('h.12.mlp', 'wte')
        """
        path, index = list_member(name)
        if not self.shift or path != self.path:
            return name
        rest = name.removeprefix(f"{path}.{index}")
        return f"{path}.{index + self.shift}{rest}"


@dataclass(frozen=True)
class TracedStages:
    """What of a model is traced for a pipeline: ``folds`` are left out of stages, ``gaps`` between
    these; per stage of the plan, ``stages`` names the one that it is like.
    """

    points: tuple[str, ...]  # where the stages that are traced begin, but the first
    folds: tuple[RepeatedBlocks, ...]
    gaps: tuple[RepeatedBlocks, ...]
    stages: tuple[StageLike, ...]

    @property
    def left_out(self) -> tuple[RepeatedBlocks, ...]:
        return tuple(sorted((*self.folds, *self.gaps), key=lambda fold: (fold.path, fold.first)))

    def spread(self, table: Mapping[str, Entry]) -> dict[str, Entry]:
        """A table by parameter with entries for those of blocks left out too."""
        return spread(table, self.left_out)


def spread(table: Mapping[str, Entry], folds: Iterable[RepeatedBlocks]) -> dict[str, Entry]:
    """A table by parameter with entries for those of folds too; the folds of a list in order."""
    found = dict(table)
    for fold in folds:  # the block before may have been left out as well
        like = {n: e for n, e in found.items() if n.startswith(f"{fold.like}.")}
        for number in range(fold.first, fold.last + 1):
            block = f"{fold.path}.{number}"
            found |= {block + n.removeprefix(fold.like): entry for n, entry in like.items()}
    return found


def likes_of(kept: TracedStages | None, num: int) -> list[int]:
    """Per stage of ``num``, the number of the stage that was compiled for it."""
    return [like.number for like in kept.stages] if kept else list(range(num))


def list_member(path: str) -> tuple[str, int]:
    """The list that a path leads through first, and which member of it: ``("model.layers", 3)``."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and i:
            return ".".join(parts[:i]), int(part)
    return "", 0


def layer_path(module: str, depth: int) -> str:
    """The path up to and including its ``depth``-th number, or "".

    >>> layer_path("h.3.mlp.experts.1.fc", 1)
    'h.3'
    """
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[depth - 1] + 1]) if len(numbers) >= depth else ""
