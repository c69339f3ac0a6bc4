"""The collectives of a local graph, as functions of one rank's tensors.

In a graph these functions are call targets; their keyword ``axis`` names the mesh axis and ``num``
its size. On fake tensors they give the right local shapes, so that checks can run a local graph.
They move no data: ``codegen`` prints the real communication, and ``tests/simulate.py`` defines
their meaning for all ranks at once. A ``joined`` collective is a bucket: it moves several tensors
of one dtype in one transfer, and getitem nodes pick its results. ``wait`` marks where a started
collective's result is needed first; before waits are placed, a collective's node is its result.

A sum with a ``wire`` is sent with fewer bytes (``partc/plan/wires.py``, where ``size`` has its
meaning), and is what the scheme makes of it. It writes to the buffers in ``state``, which nothing
else reads: what it has not sent, of which some is sent in the next step. It begins behind ``start``
steps, in which it is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partc.plan.sharding import take_piece


def all_reduce(
    x: Tensor, *, axis: str, num: int, op: str = "sum", wire: str = "", size: int = 0,
    threshold: float = 0.0, start: int = 0, state: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """Sum (or ``op="max"``) over the axis: ``f32[8]{U:axis} -> f32[8]``."""
    return torch.empty_like(x)


def all_gather(
    x: Tensor, *, axis: str, num: int, dim: int, outer: int = 1, dtype: torch.dtype | None = None,
    code: str = "", block: int = 0,
) -> Tensor:  # fmt: skip
    """Give every rank the whole tensor: ``f32[8@axis] -> f32[8]``.

    With ``dtype`` each rank casts its shard before it is sent: ``f32[8@axis] -> bf16[8]``. With a
    ``code`` shards are sent with fewer bytes, and all ranks get what was sent.
    """
    shape = list(x.shape)
    shape[dim] *= num
    return x.new_empty(shape, dtype=dtype)


def reduce_scatter(
    x: Tensor, *, axis: str, num: int, dim: int, outer: int = 1, wire: str = "", size: int = 0,
    start: int = 0,
) -> Tensor:  # fmt: skip
    """Sum over the axis and keep this rank's piece: ``f32[8]{U:axis} -> f32[8@axis]``."""
    return torch.empty_like(
        take_piece(x, dim, outer, num, 0), memory_format=torch.contiguous_format
    )


def all_to_all(
    x: Tensor, *, axis: str, num: int, dim: int, to_dim: int, outer: int = 1, to_outer: int = 1
) -> Tensor:
    """Move the shard to another dim: ``f32[8@axis,4] -> f32[8,4@axis]`` with dim=0, to_dim=1."""
    shape = list(x.shape)
    shape[dim] *= num
    shape[to_dim] //= num
    return x.new_empty(shape)


def all_reduce_joined(
    xs: Sequence[Tensor], *, axis: str, num: int, wire: str = "", size: int = 0,
    threshold: float = 0.0, start: int = 0, state: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:  # fmt: skip
    """A bucket of all_reduces: ``(f32[8]{U:axis}, f32[4]{U:axis}) -> (f32[8], f32[4])``."""
    return _side_by_side([all_reduce(x, axis=axis, num=num) for x in xs])


def all_gather_joined(
    xs: Sequence[Tensor], *, axis: str, num: int, dims: Sequence[int], outers: Sequence[int],
    dtype: torch.dtype | None = None, code: str = "", block: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A bucket of all_gathers; tensor i is sharded along ``dims[i]``."""
    cuts = zip(xs, dims, outers, strict=True)
    return tuple(all_gather(x, axis=axis, num=num, dim=d, outer=o, dtype=dtype) for x, d, o in cuts)


def reduce_scatter_joined(
    xs: Sequence[Tensor], *, axis: str, num: int, dims: Sequence[int], outers: Sequence[int],
    wire: str = "", size: int = 0, start: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A bucket of reduce_scatters; result i is sharded along ``dims[i]``."""
    cuts = zip(xs, dims, outers, strict=True)
    pieces = [reduce_scatter(x, axis=axis, num=num, dim=d, outer=o) for x, d, o in cuts]
    return _side_by_side(pieces)


def _side_by_side(like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors of these shapes as views of one memory, like the results of a bucket's reduction."""
    flat = like[0].new_empty(sum(x.numel() for x in like))
    parts = flat.split([x.numel() for x in like])
    return tuple(part.view(x.shape) for part, x in zip(parts, like, strict=True))


def keep_piece(x: Tensor, *, axis: str, num: int, dim: int, outer: int = 1) -> Tensor:
    """Keep this rank's piece of a replicated tensor, no transfer: ``f32[8] -> f32[8@axis]``."""
    return take_piece(x, dim, outer, num, 0)


def keep_first(x: Tensor, *, axis: str, num: int) -> Tensor:
    """Zero the tensor on all ranks but the axis's first: ``f32[8] -> f32[8]{U:axis}``.

    Needs no communication: a replicated tensor becomes an unfinished sum.
    """
    return torch.empty_like(x)


def axis_index(like: Tensor, *, axis: str, num: int) -> int:
    """This rank's coordinate on the axis (0 under fake tensors)."""
    return 0


def accumulate(x: Tensor, *, axis: str, num: int) -> Tensor:
    """Sum over all microbatches, complete after the last one: ``f32[8]{U:mb} -> f32[8]``."""
    return torch.empty_like(x)


def collect(x: Tensor, *, axis: str, num: int, dim: int, outer: int = 1) -> Tensor:
    """Join the pieces of all microbatches, after the last one: ``f32[8@mb] -> f32[8]``."""
    return all_gather(x, axis=axis, num=num, dim=dim, outer=outer)


def wait(x: Tensor) -> Tensor:
    """Wait for a started collective; the result is its value, ready to read."""
    return x


JOINED = {  # a bucket -> the collective that it does to each of its tensors
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
