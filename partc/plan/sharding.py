"""Layouts of a tensor on the mesh, one per axis, written for example ``f32[8,64,1024@tp]{U:dp}``.

``f32[8,64,1024@tp]`` has the whole tensor's shape, with dim 2 sharded over axis ``tp``; ``{U:dp}``
is a sum that ``dp`` has not finished (DTensor's Partial). On one axis a tensor is replicated, an
unfinished sum (U) or maximum (M), or sharded along a dim. A shard has a factor ``outer``: the dim
of size N is seen as ``(outer, N / outer)``, and the second part is sharded. ``outer=1`` is the
ordinary shard; ``outer=3`` shards each third of a fused q, k, v weight by itself. ``80~dp`` is a
dim sharded over ``dp`` whose rows each rank has permuted by itself (``partc/graph/rows.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from partc.plan.mesh import Mesh

_NAMES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8",
    "bool": "bool", "complex64": "c64", "complex128": "c128",
}  # fmt: skip

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    DTYPE_NAMES: dict[torch.dtype, str]
else:

    def __getattr__(name: str) -> Any:
        """``DTYPE_NAMES``, made when first read: plans and meshes are read without torch."""
        if name != "DTYPE_NAMES":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import torch

        table = {getattr(torch, long): short for long, short in _NAMES.items()}
        return globals().setdefault(name, table)


@dataclass(frozen=True, order=True)
class Layout:
    """The layout of a tensor on one mesh axis: R replicated, U sum, M maximum, or a shard (cut)."""

    kind: Literal["R", "U", "M", "cut"] = "R"
    dim: int = 0
    outer: int = 1
    permuted: bool = False  # each rank has put the rows of its shard into an order of its own

    def __str__(self) -> str:
        if self.kind != "cut":
            return self.kind
        return f"{'own' if self.permuted else 'cut'} {self.dim}" + (
            f" outer {self.outer}" if self.outer > 1 else ""
        )


R = Layout("R")  # replicated: every rank holds the whole tensor
U = Layout("U")  # unfinished sum: the whole is the sum over the axis (DTensor's Partial)
M = Layout("M")  # unfinished maximum: the whole is the maximum over the axis


def cut(dim: int, outer: int = 1, permuted: bool = False) -> Layout:
    """The sharded layout: each rank of the axis holds one piece of ``dim``."""
    return Layout("cut", dim, outer, permuted)


@dataclass(frozen=True)
class Sharding:
    """The layouts of one tensor by mesh axis; on axes that are not named it is replicated."""

    layouts: tuple[tuple[str, Layout], ...] = ()

    @classmethod
    def of(cls, layouts: Mapping[str, Layout], mesh: Mesh) -> Sharding:
        """A Sharding in mesh order, without replicated axes, so that equal ones compare equal."""
        return cls(tuple((a, layouts[a]) for a in mesh.names if layouts.get(a, R) != R))

    def on(self, axis: str) -> Layout:
        return dict(self.layouts).get(axis, R)

    def with_(self, axis: str, layout: Layout, mesh: Mesh) -> Sharding:
        return Sharding.of({**dict(self.layouts), axis: layout}, mesh)

    def without(self, axes: Collection[str], mesh: Mesh) -> Sharding:
        """The layout of what a rank's pieces along ``axes`` are pieces of.

        ``f32[8@mb+dp]`` on two microbatches is, without ``mb``, ``f32[(2 4@dp)]``: of the rows of
        each microbatch the rank's own.
        """
        kept = {axis: layout for axis, layout in self.layouts if axis not in axes}
        cuts = self.cuts()
        for i, (axis, layout) in enumerate(cuts):
            alike = [(layout.dim, layout.outer) == (b.dim, b.outer) for _, b in cuts[:i]]
            before = [other for (other, _), same in zip(cuts[:i], alike, strict=True) if same]
            last = max((n for n, other in enumerate(before) if other in axes), default=-1)
            if axis in kept and last >= 0:
                parts = prod(mesh.size(other) for other in before[: last + 1])
                kept[axis] = replace(layout, outer=layout.outer * parts)
        return Sharding.of(kept, mesh)

    def cuts(self) -> list[tuple[str, Layout]]:
        """The shards in the order in which they are applied to a whole tensor.

        Of one dim, smaller ``outer`` factors go first. Of equal factors the later (inner) mesh axis
        goes first, so that ``dp`` shards the piece that ``tp`` left, as FSDP does with a
        tensor-parallel weight.
        """
        cuts = [(axis, layout) for axis, layout in reversed(self.layouts) if layout.kind == "cut"]
        return sorted(cuts, key=lambda pair: (pair[1].dim, pair[1].outer))

    def local_outer(self, axis: str, mesh: Mesh) -> int:
        """The axis's ``outer`` factor in the piece of the dim that earlier shards have left.

        0 if the earlier shards do not leave whole parts, so that the layout is impossible.
        """
        mine = self.on(axis)
        outer = mine.outer
        for other, layout in self.cuts():
            if other == axis:
                break
            if layout.dim == mine.dim and layout.outer < mine.outer:
                if mine.outer // layout.outer % mesh.size(other):
                    return 0
                outer //= mesh.size(other)
        return outer

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...] | None:
        """One rank's local shape of a tensor of ``shape``; None if a size is not divisible."""
        local = list(shape)
        for axis, layout in self.cuts():
            outer, num = self.local_outer(axis, mesh), mesh.size(axis)
            if layout.dim >= len(local) or not outer or local[layout.dim] % (outer * num):
                return None
            local[layout.dim] //= num
        return tuple(local)

    def local(self, whole: Tensor, coords: Mapping[str, int], mesh: Mesh) -> Tensor:
        """The piece of ``whole`` that the rank at ``coords`` holds.

        On axes with an unfinished sum or maximum, every rank gets the whole value.
        """
        for axis, layout in self.cuts():
            outer = self.local_outer(axis, mesh)
            whole = take_piece(whole, layout.dim, outer, mesh.size(axis), coords[axis])
        return whole

    def whole(self, pieces: Sequence[Tensor], mesh: Mesh) -> Tensor:
        """The whole tensor from the pieces of all ranks, in rank order.

        The inverse of ``local``, which also finishes sums and maxima.
        """
        held = dict(enumerate(pieces))
        cuts = self.cuts()
        rest = [(a, lay) for a, lay in self.layouts if lay.kind != "cut"]
        replicated = [(a, R) for a in mesh.names if self.on(a) == R]
        # Shards are undone in the reverse order of `local`. Every step leaves one tensor per group,
        # on the group's first rank; so replicated axes come too, to get down to rank 0.
        for axis, layout in [*reversed(cuts), *rest, *replicated]:
            outer = self.local_outer(axis, mesh) if layout.kind == "cut" else 1
            held = {
                rank: join_pieces([held[p] for p in mesh.peers(rank, axis)], layout, outer)
                for rank in held
                if mesh.coords(rank)[axis] == 0
            }
        return held[0]

    def typed(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """The dtype, the whole shape and the layouts as text: ``f32[8,64,1024@tp]{U:dp}``."""
        dims = [
            _dim_text(size, [c for c in self.cuts() if c[1].dim == d])
            for d, size in enumerate(shape)
        ]
        unfinished = "".join(
            f"{{{layout.kind}:{axis}}}" for axis, layout in self.layouts if layout.kind in "UM"
        )
        return f"{_NAMES.get(dtype_name(dtype), str(dtype))}[{','.join(dims)}]{unfinished}"


REPLICATED = Sharding()


def _dim_text(size: int, cuts: Sequence[tuple[str, Layout]]) -> str:
    """One dim as text: ``1024@tp``, ``64@tp+dp``, ``80~dp`` or, with outer=3, ``(3 1024@tp)``."""
    factors: dict[int, str] = {}
    for outer in {layout.outer for _, layout in cuts}:
        here = [(axis, layout.permuted) for axis, layout in cuts if layout.outer == outer]
        named = {"@": [a for a, own in here if not own], "~": [a for a, own in here if own]}
        factors[outer] = "".join(mark + "+".join(axes) for mark, axes in named.items() if axes)
    if not factors:
        return str(size)
    texts, done = [], 1
    starts = sorted({1, *factors})
    for start, end in zip(starts, [*starts[1:], size], strict=True):
        part = end // start
        axes = factors.get(start, "")
        if part > 1 or axes:
            texts.append(f"{part}{axes}")
        done = end
    assert done == size
    return texts[0] if len(texts) == 1 else f"({' '.join(texts)})"


def take_piece(whole: Tensor, dim: int, outer: int, num: int, index: int) -> Tensor:
    """Piece ``index`` of ``num`` of a tensor whose dim is seen as ``(outer, rest)``.

    Each of the ``outer`` parts is cut into ``num`` pieces.
    """
    if outer == 1:
        return whole.chunk(num, dim)[index]
    parts = whole.unflatten(dim, (outer, num, -1))
    piece: Tensor = parts.select(dim + 1, index).flatten(dim, dim + 1)
    return piece


def join_pieces(pieces: Sequence[Tensor], layout: Layout, outer: int) -> Tensor:
    """The whole tensor from the pieces of all ranks of one axis."""
    import torch

    if layout.kind == "R":
        return pieces[0]
    if layout.kind == "U":
        # torch.sum of int32 gives int64 by itself; an all_reduce keeps the dtype
        return torch.sum(torch.stack(list(pieces)), 0, dtype=pieces[0].dtype)
    if layout.kind == "M":
        return torch.stack(list(pieces)).amax(0)
    if outer == 1:
        return torch.cat(list(pieces), layout.dim)
    parts = [piece.unflatten(layout.dim, (outer, -1)) for piece in pieces]
    whole = torch.cat(parts, layout.dim + 1)
    return whole.flatten(layout.dim, layout.dim + 1)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: ``torch.float32 -> "float32"``."""
    return str(dtype).removeprefix("torch.")
