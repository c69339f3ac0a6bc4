"""The communication ops that a partitioned graph holds, as functions of one rank's tensors.

In a graph they are call targets; the keyword ``axis`` names the mesh axis. Under fake tensors they
give the right local shape, which is how a partitioned graph is checked. ``codegen`` gives them
their text; what each means for all ranks at once stands in ``tests/simulate.py``.
A ``joined`` one moves several tensors of one dtype in one transfer; getitem nodes pick its results.
``wait`` marks where a started collective's result is first needed; until a graph is scheduled the
collective's own node is its result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partc.plan.sharding import take_piece


def all_reduce(x: Tensor, *, axis: str, num: int, op: str = "sum") -> Tensor:
    """Sum (or ``op="max"``) over the axis: ``f32[8]{U:axis} -> f32[8]``."""
    return torch.empty_like(x)


def all_gather(x: Tensor, *, axis: str, num: int, dim: int, outer: int = 1) -> Tensor:
    """Every rank gets the whole: ``f32[8@axis] -> f32[8]``."""
    shape = list(x.shape)
    shape[dim] *= num
    return x.new_empty(shape)


def reduce_scatter(x: Tensor, *, axis: str, num: int, dim: int, outer: int = 1) -> Tensor:
    """Sum over the axis and keep this rank's piece: ``f32[8]{U:axis} -> f32[8@axis]``."""
    return torch.empty_like(
        take_piece(x, dim, outer, num, 0), memory_format=torch.contiguous_format
    )


def all_to_all(
    x: Tensor, *, axis: str, num: int, dim: int, to_dim: int, outer: int = 1, to_outer: int = 1
) -> Tensor:
    """Move a cut from one dim to another: ``f32[8@axis,4] -> f32[8,4@axis]`` with dim=0,
    to_dim=1.
    """
    shape = list(x.shape)
    shape[dim] *= num
    shape[to_dim] //= num
    return x.new_empty(shape)


def all_reduce_joined(xs: Sequence[Tensor], *, axis: str, num: int) -> tuple[Tensor, ...]:
    """Sums over the axis: ``(f32[8]{U:axis}, f32[4]{U:axis}) -> (f32[8], f32[4])``."""
    return _side_by_side([all_reduce(x, axis=axis, num=num) for x in xs])


def all_gather_joined(
    xs: Sequence[Tensor], *, axis: str, num: int, dims: Sequence[int], outers: Sequence[int]
) -> tuple[Tensor, ...]:
    """Every rank gets every whole, each cut along its own of ``dims``."""
    cuts = zip(xs, dims, outers, strict=True)
    return tuple(all_gather(x, axis=axis, num=num, dim=d, outer=o) for x, d, o in cuts)


def reduce_scatter_joined(
    xs: Sequence[Tensor], *, axis: str, num: int, dims: Sequence[int], outers: Sequence[int]
) -> tuple[Tensor, ...]:
    """Sums over the axis; of each this rank keeps its piece, cut along its own of ``dims``."""
    cuts = zip(xs, dims, outers, strict=True)
    pieces = [reduce_scatter(x, axis=axis, num=num, dim=d, outer=o) for x, d, o in cuts]
    return _side_by_side(pieces)


def _side_by_side(like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors shaped as these in one memory: a reduction's results are views of what arrives."""
    flat = like[0].new_empty(sum(x.numel() for x in like))
    parts = flat.split([x.numel() for x in like])
    return tuple(part.view(x.shape) for part, x in zip(parts, like, strict=True))


def keep_piece(x: Tensor, *, axis: str, num: int, dim: int, outer: int = 1) -> Tensor:
    """This rank's piece of what all hold, no communication: ``f32[8] -> f32[8@axis]``."""
    return take_piece(x, dim, outer, num, 0)


def keep_first(x: Tensor, *, axis: str, num: int) -> Tensor:
    """The value on the first rank of the axis and zeros elsewhere, no communication: ``f32[8] ->
    f32[8]{U:axis}``.
    """
    return torch.empty_like(x)


def axis_index(like: Tensor, *, axis: str, num: int) -> int:
    """This rank's coordinate on the axis (0 under fake tensors)."""
    return 0


def accumulate(x: Tensor, *, axis: str, num: int) -> Tensor:
    """The sum over all microbatches, complete after the last one: ``f32[8]{U:mb} -> f32[8]``."""
    return torch.empty_like(x)


def collect(x: Tensor, *, axis: str, num: int, dim: int, outer: int = 1) -> Tensor:
    """The pieces of all microbatches side by side, after the last one: ``f32[8@mb] -> f32[8]``."""
    return all_gather(x, axis=axis, num=num, dim=dim, outer=outer)


def wait(x: Tensor) -> Tensor:
    """The result of a started collective, ready to read."""
    return x


JOINED = {  # and what each does to every tensor that it moves
    all_reduce_joined: all_reduce,
    all_gather_joined: all_gather,
    reduce_scatter_joined: reduce_scatter,
}
COLLECTIVES = (
    all_reduce,
    all_gather,
    reduce_scatter,
    all_to_all,
    *JOINED,
)  # these communicate and are waited for
LOCAL = (
    keep_piece,
    keep_first,
    accumulate,
    collect,
)  # these depend on the rank or the microbatch but move nothing
