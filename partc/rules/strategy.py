"""The strategies of a call: the layouts along one mesh axis that its op's rule allows."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from partc.errors import RuleError
from partc.graph import tensor_args, value
from partc.graph.fake_calls import forget
from partc.plan.sharding import Layout, M, R, U, cut
from partc.rules.call import Call, likeness, whole_call
from partc.rules.notation import Dim, Factors, Notation, parse, resolve
from partc.rules.rows import has_rows, permuted_layouts
from partc.rules.table import Rule, find, name_of

Seen = Collection[tuple[int, Layout]]
MOST = 4096  # calls whose strategies are remembered; a GPT on three axes has about 1,000


@dataclass(frozen=True)
class Strategy:
    """One way to shard a call along one mesh axis: layouts of its operands and results.

    For ``mm`` (``mk,kn->mn``), sharding ``k`` is ``cut 1, cut 0 -> U``. ``variant`` says that the
    call on pieces differs: ``"window"`` (indices count from this rank's first row), ``"mean"`` (the
    sum divided by the whole's count) or ``"local"`` (`local_batch_norm.py`).
    """

    ins: tuple[Layout, ...]  # one per entry of graph.tensor_args(node), same order
    outs: tuple[Layout, ...]  # one per entry of graph.results_of(node)
    variant: str = ""

    def __str__(self) -> str:
        ins, outs = (", ".join(map(str, side)) for side in (self.ins, self.outs))
        return f"{ins} -> {outs}" + (f" ({self.variant})" if self.variant else "")


def has_rule(target: Any) -> bool:
    """Whether the table has a rule for the op, even if the rule allows no sharding."""
    return find(target) is not None


def strategies(node: fx.Node, num: int, seen: Seen = ()) -> list[Strategy]:
    """All strategies of a call on an axis of ``num`` ranks but all-replicated, in a fixed order.

    ``seen`` has ``(position, layout)`` pairs; positions count the operands and then the results.
    Strategies with the ``outer`` factors of these layouts are given beside those with ``outer=1``.
    """
    entry = find(node.target)
    if entry is None:
        return []
    if has_rows(node):  # an order of rows is of this graph alone
        return _strategies(entry, node, num, seen)
    key = id(entry), num, tuple(seen), likeness(node)
    known = _FOUND.get(key)
    if known is None:
        known = _FOUND[key] = entry, _strategies(entry, node, num, seen)
        forget(_FOUND, MOST)
    return [*known[1]]


# By call: blocks repeat the same few, and every pass that chooses asks again. The rule stands
# beside what it gave, so that no other rule gets its ``id``.
_FOUND: dict[Hashable, tuple[Rule, list[Strategy]]] = {}


def _strategies(entry: Rule, node: fx.Node, num: int, seen: Seen) -> list[Strategy]:
    call = whole_call(node)
    view = _View(entry, call, *applied(entry, call, value(node).source), num)
    order = _operand_order(node, call)
    wishes = [(_wished(position, order, call), layout) for position, layout in seen]
    # dict.fromkeys drops repeats and keeps the order, so that equal calls give equal lists.
    found = dict.fromkeys([*view.cuts(wishes), *view.sums(), *view.unread(wishes)])
    picked = [_by_operand(s, order) for s in found]
    picked += [Strategy(*layouts) for layouts in permuted_layouts(node, num, list(seen))]
    return [s for s in dict.fromkeys(picked) if any(layout != R for layout in s.ins + s.outs)]


def _by_operand(found: Strategy, order: Sequence[int | None]) -> Strategy:
    """Change a strategy from one layout per slot to one layout per operand."""
    ins = tuple(R if i is None else found.ins[i] for i in order)
    return Strategy(ins, found.outs, found.variant)


def letter_cut(
    node: fx.Node, dims: Mapping[int, int]
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]] | None:
    """The operands' and results' layouts if a call is sharded along the letter of these dims.

    ``dims`` maps positions of operands to dims, which must all be the same single letter of the
    rule. None if they are not, or if the rule does not allow to shard the letter.
    """
    entry = find(node.target)
    if entry is None:
        return None
    call = whole_call(node)
    # One rank, as the caller checks whether sizes divide: it knows the `outer` factor of the rows.
    view = _View(entry, call, *applied(entry, call), 1)
    order = _operand_order(node, call)
    letters = set()
    for position, dim in dims.items():
        slot = order[position]
        factors = view.factors.operands[slot] if slot is not None else ()
        letters.add(factors[dim] if dim < len(factors) else ())
    letter = letters.pop()
    if letters or len(letter) != 1 or letter[0] in view.factors.frozen:
        return None
    # The rows have to be a dim by themselves in every tensor: no dim may mix them with others.
    tensors = [*view.factors.operands, *view.factors.results]
    if any(len(dim) > 1 and letter[0] in dim for dims_of in tensors for dim in dims_of):
        return None
    found = [s for s in view._cut(letter[0], 1) if s.variant != "window"]
    return (_by_operand(found[0], order).ins, found[0].outs) if found else None


def applied(entry: Rule, call: Call, source: str = "") -> tuple[Notation, Factors]:
    """The notation of a rule for a call, and its factors.

    RuleError if the rule does not fit: it has another number of operands or results than the call,
    or a term with another number of dims than its tensor. ``source``: the model's line, as a Value
    has it.
    """
    text = entry.written(call)
    where = f'rule("{name_of(call.target)}", "{text}")'
    try:
        notation = parse(text)
        _check_terms(notation, call)
        num = len(notation.operands)
        shapes = (*call.shapes, *[None] * num)[:num]
        return notation, resolve(notation, shapes, call.results)
    except RuleError as error:
        line = source.partition(": ")[0]
        this = f"this call, at {line}," if line else "this call"
        told = f"{this} has the shapes {_shapes(call.shapes)} -> {_shapes(call.results)}"
        why = "; ".join(filter(None, [error.why, told]))
        raise RuleError(where=where, what=error.what, why=why, do=error.do) from None


def _check_terms(notation: Notation, call: Call) -> None:
    """RuleError unless every tensor of a call has a term, and every term a place in the call.

    A missing optional tensor, such as a bias at the end, needs no term.
    """
    terms = [term for term in notation.operands if term.dims or call.slots]  # none in "->ab"
    given = max((i + 1 for i, slot in enumerate(call.slots) if slot is not None), default=0)
    sides = (
        ("operands", len(terms), given, len(call.slots)),
        ("results", len(notation.results), len(call.results), len(call.results)),
    )
    for side, num, least, most in sides:
        if not least <= num <= most:
            raise RuleError(
                where="rule",
                what=f"the number of {side} is {num} in the rule and {most} in the op",
                why="",  # the shapes, which are told of any rule that does not fit
                do=f"Write a term for each of the {side}, with commas between them.",
            )


def _shapes(shapes: Iterable[tuple[int, ...] | None]) -> str:
    return ", ".join("none" if shape is None else str(list(shape)) for shape in shapes)


def _operand_order(node: fx.Node, call: Call) -> list[int | None]:
    """The slot of every entry of ``tensor_args(node)``; None for a node that is a number."""
    free = list(enumerate(call.slots))
    order: list[int | None] = []
    for operand in tensor_args(node):
        pair = next((p for p in free if p[1] is operand), None)
        if pair is not None:
            free.remove(pair)
        order.append(None if pair is None else pair[0])
    return order


def _wished(position: int, order: Sequence[int | None], call: Call) -> int:
    """A position in ``_View``'s numbering: an operand's slot, or the number of slots plus the
    result's number; -1 for an operand that is a number."""
    if position < len(order):
        slot = order[position]
        return -1 if slot is None else slot
    return len(call.slots) + position - len(order)


@dataclass(frozen=True)
class _View:
    """A rule applied to one call on one axis of ``num`` ranks; its layouts are by slot."""

    rule: Rule
    call: Call
    notation: Notation
    factors: Factors
    num: int

    def cuts(self, wishes: Sequence[tuple[int, Layout]]) -> Iterator[Strategy]:
        """One strategy per letter that may be sharded and per wished ``outer`` factor."""
        for letter, size in self.factors.sizes.items():
            if letter in self.factors.frozen:
                continue
            for outer in sorted({1, *self._outers(letter, wishes)}):
                if size % (outer * self.num) == 0:
                    yield from self._cut(letter, outer)

    def _cut(self, letter: str, outer: int) -> Iterator[Strategy]:
        """The strategy that shards a letter, if its results can have the layouts that follow.

        A result without the letter becomes an unfinished sum (or max, or mean).
        """
        ins = [self._layout(dims, letter, outer) for dims in self.factors.operands]
        num = len(self.call.slots)
        ins = [*ins, *[R] * num][:num]
        variant = ""
        outs = []
        for i, term in enumerate(self.notation.results):
            layout = self._layout(self.factors.results[i], letter, outer)
            if layout == R and letter not in term.kept and self.call.results[i] is not None:
                layout = M if self.rule.reduce == "max" else U
                variant = "mean" if self.rule.reduce == "mean" else ""
            outs.append(layout)
        if any(term.index_of == letter for term in self.notation.operands):
            if outer > 1:
                return
            variant = "window"
        # An addend such as a bias must be an unfinished sum as well: added by every rank, a
        # replicated addend would count once per rank.
        added = self.rule.added
        if added is not None and U in outs and self.call.slots[added] is not None:
            if ins[added] != R:
                return
            ins[added] = U
        if all(self._expresses(i, layout) for i, layout in enumerate(outs)):
            yield Strategy(tuple(ins), tuple(outs), variant)

    def _layout(self, dims: tuple[Dim, ...], letter: str, outer: int) -> Layout:
        """The layout of a tensor with these dims if a letter is sharded."""
        for i, dim in enumerate(dims):
            if letter in dim:
                return cut(i, outer * self.factors.before(dim, letter))
        return R

    def _outers(self, letter: str, wishes: Sequence[tuple[int, Layout]]) -> Iterator[int]:
        """The ``outer`` factors for a letter that follow from the wished layouts."""
        num = len(self.call.slots)
        operands = [*self.factors.operands, *[()] * num][:num]  # slots that the rule does not name
        tensors = [*operands, *self.factors.results]
        for position, layout in wishes:
            if layout.kind != "cut" or position < 0 or layout.dim >= len(tensors[position]):
                continue
            dim = tensors[position][layout.dim]
            if letter in dim and layout.outer % self.factors.before(dim, letter) == 0:
                yield layout.outer // self.factors.before(dim, letter)

    def sums(self) -> Iterator[Strategy]:
        """The strategies that pass an unfinished sum from a linear group of slots to the results.

        Rules that only move elements (``moves``) also pass unfinished maxima.
        """
        for group in self.rule.groups(self.call):
            for layout in (U, M) if self.rule.moves else (U,):
                ins = tuple(layout if i in group else R for i in range(len(self.call.slots)))
                outs = tuple(R if shape is None else layout for shape in self.call.results)
                if self._passes(group, layout):
                    yield Strategy(ins, outs)

    def _passes(self, group: Sequence[int], layout: Layout) -> bool:
        """Whether the dtypes allow to pass a sum or maximum; rounding each part is not allowed."""
        ins = [self.call.dtypes[i] for i in group]
        outs = [dtype for dtype in self.call.result_dtypes if dtype is not None]
        truncates = any(map(_has_fractions, ins)) and not all(map(_has_fractions, outs))
        return not truncates and all(_adds_up(dtype, layout) for dtype in (*ins, *outs))

    def unread(self, wishes: Sequence[tuple[int, Layout]]) -> Iterator[Strategy]:
        """The strategies for an operand of which only shape and dtype matter (``zeros_like``).

        The operand may be an unfinished sum or maximum, and the results replicated. If an argument
        gives the result's size, the operand may also be sharded, and the results replicated or
        sharded like the operand. Without this argument the op takes the result's size from the
        operand, so a sharded operand gives a sharded result (as the rule's letters say).
        """
        slot = self.rule.unread
        if slot is None:
            return
        replicated = [R] * len(self.call.slots)
        wished = {layout for position, layout in wishes if position == slot}
        for layout in sorted({U, M, *(wished if self.rule.sizes else ())}):
            ins = tuple(layout if i == slot else R for i in range(len(replicated)))
            yield Strategy(ins, tuple(R for _ in self.call.results))
            if layout.kind == "cut" and not layout.permuted and self._has_dim_of(slot, layout.dim):
                yield Strategy(ins, tuple(layout for _ in self.call.results))

    def _has_dim_of(self, slot: int, dim: int) -> bool:
        """Whether all results have a dim of the same number and size as this operand's dim."""
        sizes = [
            shape[dim : dim + 1] for shape in (self.call.shape(slot), *self.call.results) if shape
        ]
        return len(set(sizes)) == 1

    def _expresses(self, result: int, layout: Layout) -> bool:
        """Whether a result's dtype allows it to be an unfinished sum or max."""
        return _adds_up(self.call.result_dtypes[result], layout)


def _has_fractions(dtype: torch.dtype | None) -> bool:
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def _adds_up(dtype: torch.dtype | None, layout: Layout) -> bool:
    """Whether a dtype allows unfinished sums or maxima.

    Sums of bools or narrow integers overflow; complex numbers and bools have no maximum.
    """
    if dtype is None or layout not in (U, M):
        return True
    if layout == M:
        return dtype != torch.bool and not dtype.is_complex
    return _has_fractions(dtype) or dtype in (torch.int64, torch.int32)
