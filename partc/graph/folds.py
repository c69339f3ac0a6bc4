"""Repeated blocks and stages: of equal blocks of a module list, a graph holds only one.

For example a graph has ``layers.0`` and ``layers.1``; ``layers.2`` to ``layers.30`` equal
``layers.1`` and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Entry = TypeVar("Entry")
CALL = "@"  # begins the number of a call in a place, `cell.@3` (`places.py`)
DEPTHS = (1, 2, 3)  # how many list indices deep a block may stand


@dataclass(frozen=True)
class RepeatedBlocks:
    """Blocks ``first`` to ``last`` of a list, which a graph leaves out.

    Each computes the same as the block before ``first``, which the graph has.
    """

    path: str  # of the list, "model.layers"
    first: int
    last: int

    @property
    def num(self) -> int:
        return self.last - self.first + 1

    @property
    def like(self) -> str:
        """The path of the representative: the block before those left out."""
        return f"{self.path}.{self.first - 1}"

    @property
    def after(self) -> str:
        """The path of the block after those left out."""
        return f"{self.path}.{self.last + 1}"

    def covers(self, name: str) -> bool:
        """Whether a module, parameter or buffer is one of the blocks left out, or inside of one."""
        path, index = list_member(name)
        return path == self.path and self.first <= index <= self.last

    def twin(self, name: str) -> str:
        """The name in the representative of a module or parameter of a block left out.

        For example ``layers.7.w1 -> layers.1.w1``.
        """
        return self.like + name.removeprefix("{}.{}".format(*list_member(name)))


@dataclass(frozen=True)
class StageLike:
    """A pipeline stage that computes the same as a traced stage, ``number``, with other layers."""

    number: int
    path: str = ""  # of the list that its layers stand in
    shift: int = 0  # of its layers' numbers against that stage's

    def moved(self, name: str) -> str:
        """The path in this stage for a path in the traced stage.

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
    """The stages of a pipeline that are traced, since equal stages are traced and compiled once.

    ``folds`` are blocks left out inside traced stages, ``gaps`` the blocks of stages left out
    between them. ``stages`` has, per stage of the plan, the traced stage that it equals.
    """

    points: tuple[str, ...]  # where the stages that are traced begin, but the first
    folds: tuple[RepeatedBlocks, ...]
    gaps: tuple[RepeatedBlocks, ...]
    stages: tuple[StageLike, ...]

    @property
    def left_out(self) -> tuple[RepeatedBlocks, ...]:
        return tuple(sorted((*self.folds, *self.gaps), key=lambda fold: (fold.path, fold.first)))

    def spread(self, table: Mapping[str, Entry]) -> dict[str, Entry]:
        """A table by parameter name, with entries added for the blocks left out."""
        return spread(table, self.left_out)


def spread(table: Mapping[str, Entry], folds: Iterable[RepeatedBlocks]) -> dict[str, Entry]:
    """A table by parameter name, with the representative's entries copied to the blocks left out.

    The folds of one list must be in ascending order.
    """
    found = dict(table)
    for fold in folds:  # the block before may have been left out as well
        like = {n: e for n, e in found.items() if n.startswith(f"{fold.like}.")}
        for number in range(fold.first, fold.last + 1):
            block = f"{fold.path}.{number}"
            found |= {block + n.removeprefix(fold.like): entry for n, entry in like.items()}
    return found


def likes_of(kept: TracedStages | None, num: int) -> list[int]:
    """Per pipeline stage, the number of the compiled stage that it equals."""
    return [like.number for like in kept.stages] if kept else list(range(num))


def list_member(path: str) -> tuple[str, int]:
    """The outermost module list of a path, and the member's number.

    For example ``("model.layers", 3)`` for ``model.layers.3.mlp``; ``("", 0)`` without a list.
    """
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and i:
            return ".".join(parts[:i]), int(part)
    return "", 0


def is_number(part: str) -> bool:
    """Whether a part of a place is the number of a list's member, or of a call of a module."""
    return part.isdigit() or part.startswith(CALL)


def layer_path(module: str, depth: int) -> str:
    """The path up to and including its ``depth``-th number; "" if the path has fewer numbers.

    >>> layer_path("h.3.mlp.experts.1.fc", 1)
    'h.3'
    >>> layer_path("decoder.cell.@7.x", 1)  # of one call of a module
    'decoder.cell.@7'
    """
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if is_number(part)]
    return ".".join(parts[: numbers[depth - 1] + 1]) if len(numbers) >= depth else ""
