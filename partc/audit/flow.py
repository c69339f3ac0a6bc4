"""How the layouts of a call's results follow from those of its operands, on one mesh axis.

A layout is known, or None: then nothing is said of what follows from it. Beside the layouts of
``plan/sharding.py`` there are

- ``SAME``: a constant that is the same in every entry, so that it is a piece of itself;
- ``ZERO``: nothing but zeros, or not yet written: any layout, an unfinished sum too;
- ``WINDOW``: indices counted from this rank's first row, and what follows from them;
- ``OUTSIDE``: rows picked with a window: right where the index is this rank's, else to be masked;
- ``stack``: a dim 0 of the ranks, in front of their pieces of flat entries, cut at ``outer``;
- ``rows``: all ranks' pieces, one after the other on dim 0, that are cut at ``dim`` and ``outer``;
- ``pieces``: an unfinished sum whose pieces of ``dim`` lie one after the other on dim 0;
- ``moved``: as ``rows``, of tensors that each have a piece of another dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from partc.errors import RuleError
from partc.plan.sharding import Layout, M, R, U, cut
from partc.rules.call import Call
from partc.rules.strategy import applied
from partc.rules.table import Rule, find

SAME, ZERO, WINDOW, OUTSIDE = (
    Layout(kind) for kind in ("same", "zero", "window", "outside")  # type: ignore[arg-type]
)
STACK, ROWS, PIECES, MOVED = "stack", "rows", "pieces", "moved"
Known = Layout | None
Shape = tuple[int, ...]


def special(kind: str, layout: Layout) -> Layout:
    """A layout of another kind, with the dim and the outer factor of a piece."""
    return Layout(kind, layout.dim, layout.outer)  # type: ignore[arg-type]


def moving(layout: Layout, dim: int, outer: int) -> Layout:
    """The layout of a piece whose own pieces of another dim lie one after the other."""
    return Layout(MOVED, layout.dim, layout.outer, (dim, outer))  # type: ignore[arg-type]


def moved_to(layout: Layout) -> tuple[int, int]:
    """The dim and the outer factor at which a tensor is cut once its pieces are joined."""
    to: Any = layout.permuted
    return to  # type: ignore[no-any-return]


class Unsound(Exception):
    """A call that no layout of the whole makes right; the text says why."""


@dataclass(frozen=True)
class Op:
    """A call as layouts see it: the functional form of its op, and its tensors by slot."""

    target: Any
    call: Call

    def flow(self, ins: Sequence[Known]) -> list[Known]:
        """The results' layouts; ``ins`` has one per slot. Unsound if there can be none."""
        special = SPECIAL.get(self.name)
        return special(self, ins) if special is not None else self.plain(ins)

    def plain(self, ins: Sequence[Known]) -> list[Known]:
        """The results' layouts by the op's rule."""
        num, slots = len(self.call.results), self.call.slots
        kinds = {x.kind if x else None for i, x in enumerate(ins) if slots[i] is not None}
        if kinds <= {"R", "same", "zero"}:
            return [self._constant(kinds)] * num
        if self.name.split(".")[0] in RESHAPES:
            return [reshaped(ins[0], self.call.shape(0), self.call.results[0] or ())]
        if self.name.split(".")[0] in COPIES:
            return [ins[0]]
        if not kinds <= {"R", "same", "zero", "cut", "U", "M", "window", "outside"}:
            return [None] * num
        if "window" in kinds or "outside" in kinds:
            return self._windowed(ins, kinds)
        rule = find(self.target)
        if rule is None:
            return [None] * num
        if "U" in kinds or "M" in kinds:
            return self._unfinished(rule, ins)
        if torch.Tag.pointwise in self.target.tags:
            return [self._broadcast(ins)] * num
        return self._cut(rule, ins)

    def _broadcast(self, ins: Sequence[Known]) -> Known:
        """An elementwise call: every operand is cut at the same dim, or has one entry there."""
        cuts, whole = set(), []
        for slot, each in enumerate(ins):
            if self.call.slots[slot] is None or each is None:
                continue
            if each.kind == "cut":
                cuts.add((each.dim - self.call.rank(slot), each.outer))
            elif each == R:
                whole.append(self.call.shape(slot))
        if len(cuts) != 1:
            return None
        behind, outer = cuts.pop()  # counted from the last dim, as operands are broadcast
        if any(len(shape) >= -behind and shape[behind] != 1 for shape in whole):
            return None
        return cut(len(self.call.results[0] or ()) + behind, outer)

    @property
    def name(self) -> str:
        return str(self.target).removeprefix("aten.")

    def _constant(self, kinds: set[str | None]) -> Layout:
        """The layout of what is computed from values that are whole."""
        if kinds == {"zero"} and self.name.split(".")[0] in VIEWS:
            return ZERO
        if "R" in kinds or not torch.Tag.pointwise in self.target.tags:
            return R
        return SAME

    def _windowed(self, ins: Sequence[Known], kinds: set[str | None]) -> list[Known]:
        """Elementwise calls and views of windows are windows."""
        num = len(self.call.results)
        plain = torch.Tag.pointwise in self.target.tags or self.name.split(".")[0] in VIEWS
        if kinds <= {"window", "R", "same", "zero"} and plain:
            return [WINDOW] * num
        if kinds <= {"outside", "R", "same"} and plain:
            return [OUTSIDE] * num
        return [None] * num

    # unfinished sums ---------------------------------------------------------------------------
    def _unfinished(self, rule: Rule, ins: Sequence[Known]) -> list[Known]:
        num = len(self.call.results)
        open_slots = {i for i, each in enumerate(ins) if each in (U, M)}
        if rule.unread is not None and open_slots == {rule.unread}:
            return [R] * num
        kind = U if any(each == U for each in ins) else M
        whole = all(each is None or each == kind or each.kind in ("R", "same", "zero") for each in ins)
        if whole and (kind == U or rule.moves):
            zeros = {i for i, each in enumerate(ins) if each == ZERO}
            for group in rule.groups(self.call):
                if open_slots <= {*group} <= open_slots | zeros:
                    return [kind] * num
        said = {U: "an unfinished sum", M: "an unfinished maximum"}[kind]
        raise Unsound(f"it reads {said} and is not linear in it")

    # pieces --------------------------------------------------------------------------------------
    def _cut(self, rule: Rule, ins: Sequence[Known]) -> list[Known]:
        """Follow the rule's letters: a dim of pieces gives a dim of pieces, or an unfinished sum."""
        num = len(self.call.results)
        try:
            notation, factors = applied(rule, self.call)
        except (RuleError, ValueError, IndexError):
            return [None] * num
        letters = set()
        for slot, each in enumerate(ins):
            if each is not None and each.kind == "cut":
                dims = factors.operands[slot] if slot < len(factors.operands) else ()
                dim = dims[each.dim] if each.dim < len(dims) else ()
                letters.add((dim[0], each.outer) if len(dim) == 1 else None)
        if len(letters) != 1 or None in letters:
            return [None] * num
        letter, outer = next(iter(letters))  # type: ignore[misc]
        if letter in factors.frozen or self._mixes(factors.operands, letter, ins):
            return [None] * num
        outs: list[Known] = []
        for i, term in enumerate(notation.results):
            at = [d for d, dim in enumerate(factors.results[i]) if letter in dim]
            if at:
                outs.append(cut(at[0], outer * factors.before(factors.results[i][at[0]], letter)))
            elif letter in term.kept:
                outs.append(R)
            else:
                outs.append({"sum": U, "max": M, "mean": None}[rule.reduce])
        self._check_added(rule, ins, outs)
        return outs

    def _mixes(self, operands: Sequence[Any], letter: str, ins: Sequence[Known]) -> bool:
        """Whether another operand has this letter and is no piece."""
        for slot, dims in enumerate(operands):
            each = ins[slot] if slot < len(ins) else None
            if any(letter in dim for dim in dims) and each in (R, None):
                return self.call.slots[slot] is not None
        return False

    def _check_added(self, rule: Rule, ins: Sequence[Known], outs: Sequence[Known]) -> None:
        slot = rule.added
        if slot is not None and U in outs and self.call.slots[slot] is not None and ins[slot] == R:
            raise Unsound("every rank adds the whole bias to its part of a sum")


def reshaped(layout: Known, old: Shape, new: Shape) -> Known:
    """The layout after a view: the ranks' pieces stay where they are in the order of entries."""
    if layout is not None and layout.kind == STACK:
        return _unstacked(layout, old, new)
    if layout is not None and layout.kind in (ROWS, PIECES, MOVED):
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


def _unstacked(layout: Layout, old: Shape, new: Shape) -> Known:
    """The layout after a view of a table with a row of each rank."""
    if len(old) < 2 or new != (old[0] * old[1], *old[2:]):
        return layout if old[:1] == new[:1] else None
    piece = reshaped(cut(0, layout.outer), (prod(old[1:]),), old[1:])
    if piece is None:
        return None
    return R if piece == cut(0) else special(ROWS, piece)


# ops of their own ---------------------------------------------------------------------------------
Special = Callable[[Op, Sequence[Known]], list[Known]]


def _squeezed(op: Op, ins: Sequence[Known]) -> list[Known]:
    """Dims of one entry come or go at the places that the call names."""
    x, name = ins[0], op.name.split(".")[0]
    if x is None or x.kind != "cut":
        return op.plain(ins)
    rank = op.call.rank() + (name == "unsqueeze")
    given = op.call.arguments.get("dim")
    if given is None:
        return [reshaped(x, op.call.shape(0), op.call.results[0] or ())]
    dims = {d % rank for d in ([given] if isinstance(given, int) else given)}
    if name == "unsqueeze":
        (dim,) = dims
        return [cut(x.dim + (dim <= x.dim), x.outer)]
    gone = {d for d in dims if op.call.shape(0)[d] == 1}
    return [None if x.dim in gone else cut(x.dim - sum(d < x.dim for d in gone), x.outer)]



def _masked_fill(op: Op, ins: Sequence[Known]) -> list[Known]:
    """Rows picked with a window, masked where it is another rank's: parts of a sum."""
    x, mask = ins[0], ins[1]
    if x == OUTSIDE and mask == WINDOW:
        return [U if op.call["value"] == 0 else None]
    if x == U and mask in (R, SAME):
        if op.call["value"] != 0:
            raise Unsound("every rank fills a value into its part of a sum")
        return [U]
    return op.plain(ins)


def _rows(op: Op, ins: Sequence[Known]) -> list[Known]:
    """Rows of a table: with a window of indices, right only for this rank's."""
    table, indices = ins[0], [each for i, each in enumerate(ins[1:], 1) if op.call.slots[i] is not None]
    if table == cut(0) and indices and set(indices) == {WINDOW}:
        return [OUTSIDE]
    if WINDOW in indices or table == OUTSIDE:
        return [None]
    return op.plain(ins)


def _gather(op: Op, ins: Sequence[Known]) -> list[Known]:
    x, index = ins[0], ins[1]
    if index == WINDOW:
        return [OUTSIDE if x == cut(op.call.dim()) else None]
    return op.plain(ins)


def _nll(op: Op, ins: Sequence[Known]) -> list[Known]:
    if ins[1] == WINDOW:
        num = len(op.call.results)
        return [U if ins[0] == cut(1) else None] * num
    return op.plain(ins)


def _embedding_backward(op: Op, ins: Sequence[Known]) -> list[Known]:
    if ins[1] == WINDOW:
        return [cut(0) if ins[0] in (R, SAME) else None]
    return op.plain(ins)


def _scatter_add(op: Op, ins: Sequence[Known]) -> list[Known]:
    """Into this rank's columns by a window: they stay a piece."""
    if WINDOW in ins[1:]:
        fits = ins[0] == cut(op.call.dim()) and None not in ins
        return [ins[0] if fits else None]
    return op.plain(ins)


def _split(op: Op, ins: Sequence[Known]) -> list[Known]:
    """A dim of several parts, each of which is cut: every part is a piece."""
    x, dim = ins[0], op.call.dim()
    num, rank = len(op.call.results), op.call.rank()
    if x is not None and x.kind == "cut" and x.dim == dim < rank:
        equal = len({*op.call.results}) == 1
        return [cut(dim, x.outer // num) if equal and x.outer % num == 0 else None] * num
    return op.plain(ins)


def _cat(op: Op, ins: Sequence[Known]) -> list[Known]:
    """Pieces of equal parts behind each other are pieces of the dim that these make up."""
    first, dim = ins[0], op.call.dim()
    alike = len({*ins}) == 1 and len({*op.call.shapes}) == 1
    if alike and first is not None and first.kind == "cut" and first.dim == dim:
        return [cut(dim, first.outer * len(ins))]
    if alike and first in (U, M):
        return [first]
    return [None] if len({*ins}) > 1 else op.plain(ins)


def _expand(op: Op, ins: Sequence[Known]) -> list[Known]:
    """A dim is repeated: a cut dim with one entry here is cut in the repeated one as before."""
    x, new = ins[0], op.call.results[0] or ()
    if x is not None and x.kind == "cut":
        return [cut(x.dim + len(new) - op.call.rank(), x.outer)]
    return [x] if x is not None and x.kind in ("U", "M", "R") else op.plain(ins)


def _filled(layout: Known) -> Special:
    return lambda op, ins: [layout] * len(op.call.results)


COPIES = {"clone", "contiguous", "_to_copy", "alias", "lift_fresh"}
VIEWS = {"view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "t", "transpose", "clone",
         "slice", "select", "split", "split_with_sizes", "unbind", "squeeze_", "alias", "detach", "_unsafe_view", "contiguous"}  # fmt: skip
RESHAPES = {"view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten"}
SPECIAL: dict[str, Special] = {
    "masked_fill.Scalar": _masked_fill,
    "index.Tensor": _rows,
    "embedding.default": _rows,
    "gather.default": _gather,
    "nll_loss_forward.default": _nll,
    "embedding_dense_backward.default": _embedding_backward,
    "scatter_add.default": _scatter_add,
    "split.Tensor": _split,
    "cat.default": _cat,
    "expand.default": _expand,
    **dict.fromkeys(("unsqueeze.default", "squeeze.dim", "squeeze.dims"), _squeezed),
    **dict.fromkeys(("new_empty.default", "empty_like.default"), _filled(ZERO)),
    **dict.fromkeys(("new_zeros.default", "zeros_like.default"), _filled(ZERO)),
    **dict.fromkeys(("ones_like.default", "full_like.default"), _filled(SAME)),
    **dict.fromkeys(("new_ones.default", "new_full.default"), _filled(SAME)),
}
