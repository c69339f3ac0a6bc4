"""The global batch of a verification, where the caller has one rank's piece of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from partc.errors import UsageError
from partc.plan import Plan
from partc.plan.batch import Dealt
from partc.plan.mesh import Mesh
from partc.plan.sharding import cut, dtype_name, join_pieces
from partc.program import Program
from partc.program.role import Role, Shard
from partc.trace.arguments import Given
from partc.verification.piece_norms import Pieces
from partc.verification.reference import WHOLE


def whole_batch(program: Program, given: Given) -> Given:
    """The arguments, with all ranks' pieces if their tensors have the shapes of one rank's.

    Each rank's piece has the values of the first one, moved on by some places, so that a sum over
    ranks that is missing shows.
    """
    role = program.role(0)
    _check_kinds(given, role)
    shapes = [tuple(x.shape) for x in given.tensors]
    if shapes == [each.shape for each in role.batch]:
        return given
    if shapes != [shape for shape, _ in role.inputs.values()]:
        raise _other_shapes(shapes, role)
    pairs = zip(given.tensors, role.batch, strict=True)
    return given.with_tensors([_whole(x, of, program.mesh) for x, of in pairs])


def own_rows(program: Program, name: str, shape: Sequence[int]) -> Dealt:
    """How a result of this whole shape is cut into ranks' own rows.

    Where it has as many rows as an input, these lie as those that ranks are given, whatever the
    program says.
    """
    return tuple(
        (axis, dim, dealt_in(program, shape[dim]).get(axis, outer))
        for axis, dim, outer in program.results.get(name, ())
    )


def dealt_in(program: Program, rows: int) -> dict[str, int]:
    """By axis, in how many parts of a batch of so many rows each rank is given a piece."""
    given = ((shape, cut) for name, (shape, _) in program.inputs.items()
             for cut in program.dealt.get(name, ()))  # fmt: skip
    return {axis: outer for shape, (axis, dim, outer) in given if shape[dim] == rows}


def _check_kinds(given: Given, role: Role) -> None:
    """UsageError for whole numbers in place of floating-point ones, or the other way round."""
    for name, x, of in zip(given.names, given.tensors, role.batch, strict=False):
        if (
            x.is_floating_point() != of.dtype.is_floating_point
            or x.is_complex() != of.dtype.is_complex
        ):
            raise UsageError(
                where="verify", what=f"the input {name} is {dtype_name(x.dtype)}",
                why=f"the program was compiled for {dtype_name(of.dtype)}",
                do="Pass a batch of this dtype.",
            )  # fmt: skip


def _other_shapes(shapes: Sequence[tuple[int, ...]], role: Role) -> UsageError:
    whole = [list(each.shape) for each in role.batch]
    piece = [list(shape) for shape, _ in role.inputs.values()]
    pieces = "" if piece == whole else f", and one rank's piece {piece}"
    return UsageError(
        where="verify",
        what=f"the inputs have the shapes {[list(shape) for shape in shapes]}",
        why=f"the program was compiled for a whole batch of {whole}{pieces}",
        do="Pass a batch of these shapes.",
    )


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


def pieces_of(program: Program) -> Pieces:
    """The pieces in which the reference takes the batch; ``WHOLE`` without local batch norm."""
    plan = Plan.parse(program.plan)
    if plan.batch_norm != "local":
        return WHOLE
    axes = tuple((a, program.mesh.size(a)) for a in program.mesh.names if a in plan.batch_axes)
    cuts = (plan.inputs.get(name, {}).values() for name in program.role(0).inputs)
    dims = tuple(next((each.dim for each in of), None) for of in cuts)
    return Pieces(prod(size for _, size in axes), plan.microbatches, axes, dims)
