"""How a tensor lies on the mesh: one Layout per axis, written ``f32[8,64,1024@tp]{U:tp}``.

On one axis a tensor is replicated, an unfinished sum (or max), or cut along a dim. A cut has an
``outer`` factor: the dim of size N is seen as ``(outer, N / outer)`` and the second part is cut.
``outer=1`` is the ordinary cut; ``outer=3`` cuts each third of a fused q, k, v weight by itself.
What lies in an order that a rank made by itself (``partc/graph/rows.py``) is ``own``: ``80~dp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from partc.plan.mesh import Mesh

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Layout:
    """How a tensor lies along one mesh axis."""

    kind: Literal["R", "U", "M", "cut"] = "R"
    dim: int = 0
    outer: int = 1
    permuted: bool = False  # the rows of this cut, in an order that the rank made

    def __str__(self) -> str:
        if self.kind != "cut":
            return self.kind
        return f"{'own' if self.permuted else 'cut'} {self.dim}" + (
            f" outer {self.outer}" if self.outer > 1 else ""
        )


R = Layout("R")  # every rank holds the whole
U = Layout("U")  # the whole is the sum over the axis
M = Layout("M")  # the whole is the maximum over the axis


def cut(dim: int, outer: int = 1, permuted: bool = False) -> Layout:
    """The layout in which each rank of the axis holds one piece of ``dim``."""
    return Layout("cut", dim, outer, permuted)


@dataclass(frozen=True)
class Sharding:
    """The layouts of one tensor over the mesh; axes it does not name are replicated."""

    layouts: tuple[tuple[str, Layout], ...] = ()

    @classmethod
    def of(cls, layouts: Mapping[str, Layout], mesh: Mesh) -> Sharding:
        """In mesh order and without the replicated axes, so that equal shardings compare equal."""
        return cls(tuple((a, layouts[a]) for a in mesh.names if layouts.get(a, R) != R))

    def on(self, axis: str) -> Layout:
        return dict(self.layouts).get(axis, R)

    def with_(self, axis: str, layout: Layout, mesh: Mesh) -> Sharding:
        return Sharding.of({**dict(self.layouts), axis: layout}, mesh)

    def cuts(self) -> list[tuple[str, Layout]]:
        """The cuts in the order they are applied to a whole tensor.

        Outer parts of a dim go first; among equals the later (inner) mesh axis goes first, so
        that ``dp`` cuts what ``tp`` left, as FSDP does with a tensor-parallel weight.
        """
        cuts = [(axis, layout) for axis, layout in reversed(self.layouts) if layout.kind == "cut"]
        return sorted(cuts, key=lambda pair: (pair[1].dim, pair[1].outer))

    def local_outer(self, axis: str, mesh: Mesh) -> int:
        """``outer`` of this axis's cut, counted in the dim that earlier cuts have left; 0 if they
        cut across it.
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
        """The shape one rank holds of a whole of ``shape``, or None where a cut does not divide
        it.
        """
        local = list(shape)
        for axis, layout in self.cuts():
            outer, num = self.local_outer(axis, mesh), mesh.size(axis)
            if layout.dim >= len(local) or not outer or local[layout.dim] % (outer * num):
                return None
            local[layout.dim] //= num
        return tuple(local)

    def local(self, whole: Tensor, coords: Mapping[str, int], mesh: Mesh) -> Tensor:
        """The piece of ``whole`` that the rank at ``coords`` holds (sums and maxima are not
        undone).
        """
        for axis, layout in self.cuts():
            outer = self.local_outer(axis, mesh)
            whole = take_piece(whole, layout.dim, outer, mesh.size(axis), coords[axis])
        return whole

    def whole(self, pieces: Sequence[Tensor], mesh: Mesh) -> Tensor:
        """Join what all ranks hold, given in rank order: the inverse of ``local``, sums
        included.
        """
        held = dict(enumerate(pieces))
        cuts = self.cuts()
        rest = [(a, lay) for a, lay in self.layouts if lay.kind != "cut"]
        replicated = [(a, R) for a in mesh.names if self.on(a) == R]
        for axis, layout in [*reversed(cuts), *rest, *replicated]:
            outer = self.local_outer(axis, mesh) if layout.kind == "cut" else 1
            held = {
                rank: join_pieces([held[p] for p in mesh.peers(rank, axis)], layout, outer)
                for rank in held
                if mesh.coords(rank)[axis] == 0
            }
        return held[0]

    def typed(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """``f32[8,64,1024@tp]{U:tp}``: the whole's dtype and shape, and how it lies."""
        dims = [
            _dim_text(size, [c for c in self.cuts() if c[1].dim == d])
            for d, size in enumerate(shape)
        ]
        unfinished = "".join(
            f"{{{layout.kind}:{axis}}}" for axis, layout in self.layouts if layout.kind in "UM"
        )
        return f"{DTYPE_NAMES.get(dtype, str(dtype))}[{','.join(dims)}]{unfinished}"


REPLICATED = Sharding()


def _dim_text(size: int, cuts: Sequence[tuple[str, Layout]]) -> str:
    """``1024@tp``, ``64@tp+dp``, ``80~dp`` or, with an outer factor, ``(3 1024@tp)``."""
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
    """Piece ``index`` of ``num`` of a dim seen as ``(outer, rest)`` and cut in ``rest``."""
    if outer == 1:
        return whole.chunk(num, dim)[index]
    parts = whole.unflatten(dim, (outer, num, -1))
    piece: Tensor = parts.select(dim + 1, index).flatten(dim, dim + 1)
    return piece


def join_pieces(pieces: Sequence[Tensor], layout: Layout, outer: int) -> Tensor:
    """The whole along one axis from the pieces of all its ranks."""
    if layout.kind == "R":
        return pieces[0]
    if layout.kind == "U":
        return torch.sum(torch.stack(list(pieces)), 0, dtype=pieces[0].dtype)
    if layout.kind == "M":
        return torch.stack(list(pieces)).amax(0)
    if outer == 1:
        return torch.cat(list(pieces), layout.dim)
    parts = [piece.unflatten(layout.dim, (outer, -1)) for piece in pieces]
    whole = torch.cat(parts, layout.dim + 1)
    return whole.flatten(layout.dim, layout.dim + 1)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")
