"""How the spreads of a call's results follow from those of its operands, on one mesh axis.

The op's sharding rule says it, read forwards: operands that are cut at one letter of the rule give
results that are cut at this letter, or unfinished sums where the letter is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partc.audit.spread import (
    OUTSIDE,
    SAME,
    WINDOW,
    ZERO,
    Kind,
    Known,
    M,
    R,
    Spread,
    U,
    cut,
    is_cut,
    reshaped,
)
from partc.errors import RuleError
from partc.rules.call import Call
from partc.rules.strategy import applied
from partc.rules.table import Rule, find

Kinds = set[Kind | None]
COPIES = {"clone", "contiguous", "_to_copy", "alias", "lift_fresh"}
RESHAPES = {"view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten"}
VIEWS = {
    *RESHAPES, *COPIES, "unsqueeze", "squeeze", "expand", "permute", "t", "transpose", "slice",
    "select", "split", "split_with_sizes", "unbind", "detach",
}  # fmt: skip


class Unsound(Exception):
    """A call that no layout of the whole makes right; the text says why."""


@dataclass(frozen=True)
class Op:
    """A call as layouts see it: the functional form of its op, and its tensors by slot."""

    target: Any
    call: Call

    def flow(self, ins: Sequence[Known]) -> list[Known]:
        """The results' spreads; ``ins`` has one per slot. Unsound if there can be none."""
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

    def _constant(self, kinds: Kinds) -> Spread:
        """The layout of what is computed from values that are whole."""
        if kinds == {"zero"} and self.name.split(".")[0] in VIEWS:
            return ZERO
        if "R" in kinds or torch.Tag.pointwise not in self.target.tags:
            return R
        return SAME

    def _windowed(self, ins: Sequence[Known], kinds: Kinds) -> list[Known]:
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
        whole = all(
            each is None or each == kind or each.kind in ("R", "same", "zero") for each in ins
        )
        if whole and (kind == U or rule.moves):
            zeros = {i for i, each in enumerate(ins) if each == ZERO}
            for group in rule.groups(self.call):
                if open_slots <= {*group} <= open_slots | zeros:
                    return [kind] * num
        if any(is_cut(each) for each in ins) and torch.Tag.pointwise not in self.target.tags:
            return [None] * num  # an op that adds to a sum what it computes from pieces
        said = {U: "an unfinished sum", M: "an unfinished maximum"}[kind]
        raise Unsound(f"it reads {said} and is not linear in it")

    # pieces --------------------------------------------------------------------------------------
    def _cut(self, rule: Rule, ins: Sequence[Known]) -> list[Known]:
        """Follow the rule's letters: a cut dim gives a cut dim, or an unfinished sum."""
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
