"""How a tensor is spread over the ranks of one mesh axis, as the audit follows it.

A spread that nothing is known of is None. The kinds are

- ``R``: whole on every rank; ``U`` an unfinished sum; ``M`` an unfinished maximum;
- ``cut``: a piece of ``dim``; in front of the ranks, ``outer`` parts of the dim are each cut;
- ``same``: a constant that is equal in every entry, so that it is a piece of itself;
- ``zero``: nothing but zeros, or not yet written: any spread, an unfinished sum too;
- ``window``: indices counted from this rank's first row, and what follows from them;
- ``outside``: rows picked with a window: right where the index is this rank's, else to be masked;
- ``stack``: a dim 0 of the ranks, in front of their pieces of flat entries, cut at ``outer``;
- ``rows``: all ranks' pieces, one after the other on dim 0, that are cut at ``dim`` and ``outer``;
- ``pieces``: an unfinished sum whose pieces of ``dim`` lie one after the other on dim 0;
- ``arrived``: as ``pieces``, after they went to the ranks that keep them: this rank's piece of the
  sum, in parts of all ranks one after the other;
- ``parts``: these parts along a dim 0 of their own, whose sum is the piece;
- ``moved``: as ``rows``, of tensors that each have a piece of another dim, ``to``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

Kind = Literal[
    "R",
    "U",
    "M",
    "cut",
    "same",
    "zero",
    "window",
    "outside",
    "stack",
    "rows",
    "pieces",
    "arrived",
    "parts",
    "moved",
]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Spread:
    """How a tensor is spread over one axis; see the module for the kinds."""

    kind: Kind
    dim: int = 0
    outer: int = 1
    to: tuple[int, int] = (0, 1)  # of "moved": the dim and the outer factor of the other piece

    def __str__(self) -> str:
        return f"cut at dim {self.dim}" if self.kind == "cut" else WORDS.get(self.kind, self.kind)

    @property
    def first(self) -> Spread:
        """The spread of this kind with dim 0 cut as it is."""
        return Spread(self.kind)

    def as_kind(self, kind: Kind) -> Spread:
        """A spread of another kind, with the dim and the outer factor of this one."""
        return replace(self, kind=kind)


WORDS = {"R": "whole on every rank", "U": "an unfinished sum", "M": "an unfinished maximum"}
Known = Spread | None
R, U, M = Spread("R"), Spread("U"), Spread("M")
SAME, ZERO = Spread("same"), Spread("zero")
WINDOW, OUTSIDE = Spread("window"), Spread("outside")


def cut(dim: int, outer: int = 1) -> Spread:
    """A piece of a dim: each of its ``outer`` parts is cut."""
    return Spread("cut", dim, outer)


def is_cut(spread: Known) -> bool:
    return spread is not None and spread.kind == "cut"


def reshaped(layout: Known, old: Shape, new: Shape) -> Known:
    """The layout after a view: the ranks' pieces stay where they are in the order of entries."""
    if layout is not None and layout.kind == "stack":
        return _unstacked(layout, old, new)
    if layout is not None and layout.kind in ("arrived", "parts"):
        return _parted(layout, old, new)
    if layout is not None and layout.kind in ("rows", "pieces", "moved"):
        return layout if old == new else None
    if layout is None or layout.kind != "cut":
        return layout
    dim = layout.dim
    same = dim < len(new) and new[dim] == old[dim] and prod(new[:dim]) == prod(old[:dim])
    if same:
        return layout
    border = prod(old[:dim]) * layout.outer
    found = [
        (d, border // prod(new[:d]))
        for d in range(len(new))
        if border % max(prod(new[:d]), 1) == 0
        and border // max(prod(new[:d]), 1)
        and new[d] % (border // prod(new[:d])) == 0
    ]
    if not found:
        return None
    at, outer = next((pair for pair in found if pair[1] == 1), found[0])
    return cut(at, outer)


def _parted(layout: Spread, old: Shape, new: Shape) -> Known:
    """The layout after a view of the parts of a sum, which may get a dim of their own."""
    if old == new:
        return layout
    if layout.kind == "arrived":
        apart = len(new) == len(old) + 1 and (new[0] * new[1], *new[2:]) == old
        return layout.as_kind("parts") if apart else None
    return layout if old[:1] == new[:1] and layout == layout.first else None


def _unstacked(layout: Spread, old: Shape, new: Shape) -> Known:
    """The layout after a view of a table with a row of each rank."""
    if len(old) < 2 or new != (old[0] * old[1], *old[2:]):
        return layout if old[:1] == new[:1] else None
    piece = reshaped(cut(0, layout.outer), (prod(old[1:]),), old[1:])
    if piece is None:
        return None
    return R if piece == cut(0) else piece.as_kind("rows")
