"""The global batch of a verification, where the caller has one rank's piece of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from partc.plan.mesh import Mesh
from partc.plan.sharding import cut, join_pieces
from partc.program import Program
from partc.program.role import Shard


def whole_batch(program: Program, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inputs, or all ranks' pieces if they have the shapes of one rank's.

    Each rank's piece has the values of the first one, moved on by some places, so that a sum over
    ranks that is missing shows.
    """
    role = program.role(0)
    shapes = [tuple(x.shape) for x in inputs]
    if not program.dealt or shapes != [shape for shape, _ in role.inputs.values()]:
        return inputs
    return [_whole(x, of, program.mesh) for x, of in zip(inputs, role.batch, strict=True)]


def _whole(piece: Tensor, of: Shard, mesh: Mesh) -> Tensor:
    number = 0

    def moved() -> Tensor:
        nonlocal number
        number += 1
        return piece.detach().flatten().roll(1 - number).view(piece.shape)

    def joined(cuts: Sequence[tuple[str, int, int]]) -> Tensor:
        if not cuts:
            return moved()
        (axis, dim, outer), *rest = cuts
        return join_pieces([joined(rest) for _ in range(mesh.size(axis))], cut(dim, outer), outer)

    return joined(of.cuts) if of.cuts else piece
