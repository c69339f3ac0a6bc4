"""Where this rank's piece lies in the whole tensor.

A piece is one box of the whole tensor, or several where each part of a fused weight is cut by
itself: f32[(3 4@tp),2] on rank 1 of 2 is rows 2-3, 6-7 and 10-11.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from partc.plan.mesh import Mesh
from partc.program.role import Shard

Run = tuple[int, int]  # where it begins in the whole dim, how long it is


@dataclass(frozen=True)
class Chunk:
    """A box: where it begins in the whole tensor, where in the piece, and its sizes."""

    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, piece: Tensor) -> Tensor:
        """The box of a piece, as a view."""
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            piece = piece.narrow(dim, start, size)
        return piece


def chunks_of(shard: Shard, mesh: Mesh, coords: Mapping[str, int]) -> list[Chunk]:
    """The boxes that make up the piece of the rank at ``coords``."""
    runs: list[list[Run]] = [[(0, size)] for size in shard.shape]
    for axis, dim, outer in shard.cuts:
        runs[dim] = list(_taken(runs[dim], outer, mesh.size(axis), coords[axis]))
    boxes = product(*(_with_starts(each) for each in runs))
    return [Chunk(*zip(*box, strict=True)) if box else Chunk((), (), ()) for box in boxes]


def _taken(runs: list[Run], outer: int, num: int, index: int) -> Iterator[Run]:
    """The runs of a dim that a cut leaves: of each of ``outer`` parts the index-th of ``num``."""
    each = sum(size for _, size in runs) // (outer * num)
    for part in range(outer):
        begin, passed = (part * num + index) * each, 0
        for offset, size in runs:
            first, last = max(begin, passed), min(begin + each, passed + size)
            if first < last:
                yield offset + first - passed, last - first
            passed += size


def _with_starts(runs: list[Run]) -> Iterator[tuple[int, int, int]]:
    """Each run as (where in the whole, where in the piece, how long)."""
    start = 0
    for offset, size in runs:
        yield offset, start, size
        start += size
