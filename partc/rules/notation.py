"""The einsum-like language of sharding rules, such as ``"...k,nk->...n"`` for ``linear``.

A term describes one tensor: operands stand left of ``->``, results right of it. In a term

- a letter is a factor, the same index in all terms: sharding it shards all dims with the letter;
- ``(h d)`` is one dim made of several factors, the first one slowest; a number among them, as in
  ``(3 d)``, is a factor of this size that is not sharded;
- ``...`` is any number of leading dims, broadcast as torch does;
- ``_`` is a dim of any size that is never sharded;
- ``!k`` or ``!...`` may not be sharded, in any term with the letter;
- ``@v`` at the end says that the tensor has indices into the factor ``v``;
- ``=c`` at the end of a result says that the result is replicated although ``c`` is sharded.

A letter that a result does not have is summed in this result, so sharding the letter leaves an
unfinished sum: with ``mk,kn->mn``, sharding ``k`` over tp gives ``{U:tp}``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType

from partc.amounts import counted
from partc.errors import RuleError

Dim = tuple[str, ...]  # the factors of one dim, slowest first
ELLIPSIS = "..."
_NONE: Mapping[str, int] = MappingProxyType({})
_TOKEN = re.compile(r"\s*(\.\.\.|!|[A-Za-z]|_|\d+|\(|\)|@[A-Za-z]|=[A-Za-z])\s*")


@dataclass(frozen=True)
class Term:
    """One tensor of a rule: the factors of its dims; ``...`` counts as one dim."""

    dims: tuple[Dim, ...]
    index_of: str = ""  # the letter that this tensor's values are indices into
    kept: str = ""  # letters whose sharding leaves this result replicated

    @property
    def letters(self) -> list[str]:
        return [letter for dim in self.dims for letter in dim]


@dataclass(frozen=True)
class Notation:
    """A parsed rule: its operands, its results, and the letters that may not be sharded."""

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    frozen: frozenset[str]


@dataclass(frozen=True)
class Factors:
    """A rule applied to the shapes of a call: each tensor's dims as factors, each factor's size."""

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: dict[str, int]
    frozen: frozenset[str]

    def before(self, dim: Dim, letter: str) -> int:
        """The product of a dim's factors before a letter: ``outer`` of a shard of this letter."""
        return prod(self.sizes[f] for f in dim[: dim.index(letter)])


@cache
def parse(text: str) -> Notation:
    """Read a rule from text; RuleError if the text is malformed."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise _malformed(text, "there is no '->'")
    frozen: set[str] = set()
    operands = [_parse_term(term, text, frozen) for term in left.split(",")]
    results = [_parse_term(term, text, frozen) for term in right.split(",")]
    return Notation(tuple(operands), tuple(results), frozenset(frozen))


def _parse_term(term: str, text: str, frozen: set[str]) -> Term:
    """Read one term; letters that may not be sharded are added to ``frozen``."""
    dims: list[Dim] = []
    group: list[str] | None = None
    marks = {"@": "", "=": ""}
    freeze = False
    for token in _tokens(term, text):
        if token[0] in marks:
            marks[token[0]] += token[1]
        elif token == "!":
            freeze = True
        elif token == "(":
            if group is not None:
                raise _malformed(text, "a '(' stands inside of another")
            group = []
        elif token == ")":
            if group is None:
                raise _malformed(text, "a ')' closes nothing")
            dims.append(tuple(group))
            group = None
        else:
            factors = () if token == "_" else (token,)
            if freeze or token.isdigit():
                frozen.update(factors)
            freeze = False
            if group is None:
                dims.append(factors)
            else:
                group.extend(factors)
    if group is not None or freeze:
        raise _malformed(
            text, "a '(' is not closed" if group is not None else "nothing follows a '!'"
        )
    return Term(tuple(dims), marks["@"], marks["="])


def _tokens(term: str, text: str) -> list[str]:
    """The tokens of one term."""
    found, at = [], 0
    term = term.strip()
    while at < len(term):
        match = _TOKEN.match(term, at)
        if match is None:
            raise _malformed(text, f"{term[at:]!r} is not understood")
        found.append(match.group(1))
        at = match.end()
    return found


def resolve(
    notation: Notation,
    operands: Sequence[tuple[int, ...] | None],
    results: Sequence[tuple[int, ...] | None],
    known: Mapping[str, int] = _NONE,
) -> Factors:
    """The factors of a call's dims with their sizes; the shape of an absent tensor is None.

    ``known``: sizes that the shapes may leave open. RuleError if no sizes fit the shapes.

    >>> resolve(parse("a b -> (a b)"), [(2, 3)], [(6,)]).sizes
    {'a': 2, 'b': 3}
    """
    ins = [_dims_of(t, s, True) for t, s in zip(notation.operands, operands, strict=True)]
    outs = [_dims_of(t, s, False) for t, s in zip(notation.results, results, strict=True)]
    pairs = [
        (dim, size)
        for dims, shape in zip([*ins, *outs], [*operands, *results], strict=True)
        if shape is not None
        for dim, size in zip(dims, shape, strict=True)
    ]
    sizes = _solve(pairs, known)
    # an empty dim (size 0) is not sharded either
    frozen = {f for f, size in sizes.items() if f in notation.frozen or not size}
    if ELLIPSIS in notation.frozen:
        frozen |= {f for f in sizes if f[0] == "."}
    fit = [
        _without_broadcast(dims, shape, sizes) for dims, shape in zip(ins, operands, strict=True)
    ]
    return Factors(tuple(fit), tuple(outs), sizes, frozenset(frozen))


def _dims_of(term: Term, shape: tuple[int, ...] | None, broadcasts: bool) -> tuple[Dim, ...]:
    """A term's dims for a shape: ``...`` becomes factors ``.1``, ``.0``, counted from the right.

    Counting from the right aligns the leading dims of operands as torch's broadcasting does.
    """
    if shape is None:
        return ()
    dims = list(term.dims)
    if (ELLIPSIS,) in dims:
        at, num = dims.index((ELLIPSIS,)), len(shape) - len(dims) + 1
        dims[at : at + 1] = [(f".{i}",) for i in reversed(range(num))]
    if len(dims) > len(shape) and broadcasts:
        dims = dims[len(dims) - len(shape) :]
    if len(dims) != len(shape):
        raise RuleError(
            where="rule",
            what=f"term {''.join(term.letters)!r} has {counted(len(dims), 'dim')} and the tensor "
            f"{len(shape)}",
            why=f"the tensor's shape is {list(shape)}",
            do="Correct the rule's letters, or use '...' for leading dims.",
        )
    return tuple(dims)


def _solve(pairs: Sequence[tuple[Dim, int]], known: Mapping[str, int]) -> dict[str, int]:
    """The sizes of all factors, from pairs of a dim and its size.

    A dim of size 1 may be broadcast to any size, even to 0. RuleError if no sizes fit.
    """
    sizes = {f: int(f) for dim, _ in pairs for f in dim if f.isdigit()}
    for dim, size in pairs:
        if len(dim) == 1:
            before = sizes.get(dim[0], 1)
            sizes[dim[0]] = max(size, before) if size and before else 0
    sizes = {**known, **sizes}
    # A dim of several factors gives the size of one factor when all its others are known; so the
    # dims are solved in the order in which that becomes true.
    open_pairs = [(dim, size) for dim, size in pairs if len(dim) > 1]
    while open_pairs:
        unknown = [[f for f in dim if f not in sizes] for dim, _ in open_pairs]
        at = next((i for i, names in enumerate(unknown) if len(names) <= 1), None)
        if at is None:
            raise _unsolved(open_pairs)
        dim, size = open_pairs.pop(at)
        for name in unknown[at]:
            rest = prod(sizes[f] for f in dim if f != name)
            sizes[name] = max(min(size, 1), size // rest) if rest else 1
    for dim, size in pairs:
        if dim and size not in (1, prod(sizes[f] for f in dim)):
            raise _unsolved([(dim, size)], {f: sizes[f] for f in dim})
    return sizes


def _without_broadcast(
    dims: tuple[Dim, ...], shape: tuple[int, ...] | None, sizes: dict[str, int]
) -> tuple[Dim, ...]:
    """The dims of an operand; a broadcast dim of size 1 has no factors, as it is never sharded."""
    kept = zip(dims, shape or (), strict=True)
    return tuple(d if n == prod(sizes[f] for f in d) else () for d, n in kept)


def dims(num: int, frozen: Collection[int] = ()) -> list[str]:
    """Letters for the dims of a tensor, for rules made by a function: ``dims(3, {1}) -> a !b c``.

    The letter k is left out, since some rules use it for a summed dim.
    """
    return [("!" if i in frozen else "") + "abcdefghijlmopqrstuvwxyz"[i] for i in range(num)]


def _malformed(text: str, why: str) -> RuleError:
    return RuleError(
        where=f"rule {text!r}",
        what="it is not well formed",
        why=why,
        do="Write the dims of the operands, an arrow, and those of the results, a letter for each "
        "dim: 'mk,kn->mn'; help(partc.rules.notation) has all signs.",
    )


def _unsolved(
    pairs: Sequence[tuple[Dim, int]], known: Mapping[str, int] = MappingProxyType({})
) -> RuleError:
    """``known``: the sizes that letters have by other dims."""
    dims_text = ", ".join(f"({' '.join(dim)}) = {size}" for dim, size in pairs)
    others = ", ".join(f"{letter} is {size}" for letter, size in known.items())
    return RuleError(
        where="rule", what=f"no sizes fit {dims_text}",
        why=f"by other dims {others}, and a letter is one size everywhere" if known
        else "several letters of one dim are known by no other",
        do="Give dims of different sizes letters of their own." if known
        else "Write their sizes, as (3 d), or give each of the letters a dim in another tensor.",
    )  # fmt: skip
