"""Things of one kind that some ranks of a run hold alike, and which ranks these are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partc.plan.mesh import ISLAND, PP, Mesh

EVERYWHERE = ("random", "source")  # kinds that islands have alike too
OF_PARAMETERS = ("frozen", "gradient")  # kinds whose names are those of parameters
CAUSES = (  # why weights differ, and why these do
    ("optimizer", *OF_PARAMETERS, "write"), ("optimizer", *OF_PARAMETERS), ("optimizer", "frozen"),
)  # fmt: skip


@dataclass(frozen=True)
class Alike:
    """Things of one kind that the same ranks hold alike.

    ``kind``: input, parameter, frozen (whether a parameter is), gradient (how an optimizer found
    it), buffer, source, optimizer, write or random. A source is the whole tensor that a rank took
    its piece from, as pieces say nothing of each other; 0 where it is not known. ``apart``: the
    mesh axes along which ranks have different pieces. ``places``: the coordinates on ``pp`` of the
    ranks that have them. ``everywhere``: whether islands have them alike too.
    """

    kind: str
    names: tuple[str, ...]
    apart: frozenset[str]
    places: tuple[int, ...]
    everywhere: bool = False

    def groups(self, mesh: Mesh) -> Iterator[list[int]]:
        """The groups of ranks whose copies have to be equal."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coords in enumerate(mesh.all_coords()):
            if coords.get(PP, 0) in self.places:
                apart = self.apart if self.everywhere else {*self.apart, ISLAND}
                key = tuple(index for axis, index in coords.items() if axis in apart)
                groups.setdefault(key, []).append(rank)
        yield from (ranks for ranks in groups.values() if len(ranks) > 1)
