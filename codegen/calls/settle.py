"""Which names the values of complete functions get, so that each has one that no other value has.

Of values that want the same name those that the user's code does not name get a longer one: first
that of their module (``attn_mul``), then of what they are made of (``query_states_cat``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from torch import fx

from partc.codegen.calls.qualify import gradient_names, longer_names, told_names
from partc.codegen.calls.wishes import GIVEN, OP, Wishes
from partc.quoting import identifier

# The mark of a value in functions that are still being written: ``mul__v3__`` is value 3.
MARK = re.compile(r"[A-Za-z_]\w*?__v(\d+)__")
Span = tuple[int, int]  # the first and the last line of a function in which a value stands


@dataclass(eq=False)
class Marked:
    """A value that stands in functions under a mark, until it gets a name."""

    node: fx.Node | None  # None for a list or dict, whose name may be used again behind it
    wish: str
    number: int
    wishes: Wishes
    first: bool = False  # an argument or weight: it gets its name before all others

    @property
    def value(self) -> object:
        """What is equal for a value and its recomputations: these may share a name."""
        node = self.here
        return self.wish if node is None else self.wishes.same.get(node, node)

    @property
    def here(self) -> fx.Node | None:
        """The value to which what the wishes say of it belongs."""
        return None if self.node is None else self.wishes.here(self.node)

    @property
    def mark(self) -> str:
        return f"{self.wish}__v{self.number}__"


@dataclass(eq=False)
class Claim:
    """A value and its recomputations, which share a name; ``index`` is the name now claimed."""

    members: list[Marked]
    of: str = ""  # the name of the value whose gradient this is, if that has one
    index: int = 0
    spans: dict[int, Span] = field(default_factory=dict)

    @property
    def main(self) -> Marked:
        return self.members[0]

    @property
    def rank(self) -> int:
        node = self.main.node
        first = self.main.first or node is None
        known = OP - 1 if self.of else OP  # the gradient of a value with a line is first of all
        if not first and self.main.wishes.is_part(node):  # type: ignore[arg-type]
            known = OP
        return GIVEN if first else min(known, self.main.wishes.rank(node))  # type: ignore[arg-type]

    @property
    def is_gradient(self) -> bool:
        node = self.main.node
        return node is not None and not self.main.first and self.main.wishes.is_gradient(node)

    @cached_property
    def names(self) -> list[str]:
        """The names that the value can have, the best first."""
        node, wish, wishes = self.main.node, self.main.wish, self.main.wishes
        if node is None or not wishes.names:
            return [_no_handle(wish)]
        if self.is_gradient:
            names = gradient_names(node, wish, wishes, self.of)
        else:
            longer = longer_names(node, wish, wishes)  # "d_" begins the names of gradients
            longer = (name for name in longer if not name.startswith("d_"))
            names = chain(told_names(node, wish, wishes), [wish], longer)
        return list(dict.fromkeys(map(_no_handle, map(identifier, names))))

    @property
    def is_of_path(self) -> bool:
        """Whether the name now claimed is the path of the value's module."""
        path = self.main.wishes.module(self.main.node).replace(".", "_")  # type: ignore[arg-type]
        return bool(path) and self.name.removeprefix("d_") == path

    @property
    def name(self) -> str:
        """The name now claimed; behind the last one come numbered ones."""
        behind = self.index - len(self.names)
        return self.names[self.index] if behind < 0 else f"{self.names[0]}_{behind + 1}"


def _no_handle(name: str) -> str:
    """A name that is not that of a transfer's handle, ``x_done``."""
    return f"{name}_value" if name.endswith("_done") else name


def unmarked(text: str) -> str:
    """A text with wishes in place of marks: about as long as it will be with names.

    >>> unmarked("mul__v3__ + x")
    'mul + x'
    """
    return re.sub(r"__v\d+__", "", text)


def settle(
    marked: Sequence[Marked], functions: Sequence[Sequence[str]], taken: Collection[str]
) -> list[str]:
    """The name of each marked value, by number; ``functions`` are the lines in which they stand.

    The forward's values get names first, since gradients are named after them.
    """
    claims = _claims(marked, _spans(functions))
    gradients = [claim for claim in claims if claim.is_gradient]
    forward = [c for c in claims if c not in gradients]
    _resolve(forward, taken)
    known = {m.here: c.name for c in forward for m in c.members if m.here is not None}
    for claim in gradients:
        claim.of = known.get(claim.main.wishes.of.get(claim.main.here), "")  # type: ignore[arg-type]
    _resolve(gradients, {*taken, *known.values()})
    _check_apart(claims)
    names = [each.wish for each in marked]
    for claim in claims:
        for member in claim.members:
            names[member.number] = claim.name
    return names


def _spans(functions: Sequence[Sequence[str]]) -> dict[int, dict[int, Span]]:
    """For each mark that stands anywhere its first and last line in each function."""
    found: dict[int, dict[int, Span]] = defaultdict(dict)
    for i, lines in enumerate(functions):
        for at, line in enumerate(lines):
            for match in MARK.finditer(line):
                start, _ = found[int(match[1])].get(i, (at, at))
                found[int(match[1])][i] = (start, at)
    return found


def _claims(marked: Sequence[Marked], spans: dict[int, dict[int, Span]]) -> list[Claim]:
    """One claim for each value that stands anywhere, and for its recomputations.

    A recomputation has a claim of its own where the value itself is still read behind it.
    """
    claims: list[Claim] = []
    by_value: dict[object, list[Claim]] = defaultdict(list)
    for each in marked:
        mine = spans.get(each.number)
        if mine is None:
            continue
        for claim in by_value[each.value]:
            if all(claim.spans[i][1] < mine[i][0] for i in claim.spans.keys() & mine.keys()):
                claim.members.append(each)
                claim.spans |= mine
                break
        else:
            claims.append(Claim([each], spans=dict(mine)))
            by_value[each.value].append(claims[-1])
    return claims


def _resolve(claims: Sequence[Claim], taken: Collection[str]) -> None:
    """Move claims on to longer names until all are different."""
    moved = True
    while moved:
        wanted: dict[str, list[Claim]] = defaultdict(list)
        for claim in claims:
            wanted[claim.name].append(claim)
        losers = [c for name, those in wanted.items() for c in _losers(name, those, taken)]
        for claim in losers:
            claim.index += 1
        moved = bool(losers)
    held = {*taken, *(claim.name for claim in claims)}
    for claim in claims:  # a name may have become free that several wanted
        free = next((i for i, name in enumerate(claim.names) if name not in held), None)
        if claim.index >= len(claim.names) and free is not None:
            claim.index = free
            held.add(claim.name)


def _check_apart(claims: Sequence[Claim]) -> None:
    """Two values of one name would be one, and what reads the first would read the second."""
    held: dict[str, Claim] = {}
    for claim in claims:
        other = held.setdefault(claim.name, claim)
        both = (other.main.mark, claim.main.mark)
        assert other is claim, f"{claim.name} is the name of two values, {both}"


def _losers(name: str, claims: list[Claim], taken: Collection[str]) -> Iterator[Claim]:
    """The claims to a name that have to move on; one may stay that is better than all others."""
    stays = None if name in taken else _winner(claims)
    yield from (claim for claim in claims if claim is not stays)


def _winner(claims: list[Claim]) -> Claim | None:
    """The claim to a name that is better than the others, if there is one.

    It is the one for which the name is the shortest, then the one that the user's code names so,
    then the one for which it is the whole path of its module: ``output.dense`` has ``output_dense``
    before ``attention.output.dense``. Of a variable that is assigned several times the last value
    has the name.
    """
    index = min(claim.index for claim in claims)
    best = [claim for claim in claims if claim.index == index]
    rank = min(claim.rank for claim in best)
    best = [claim for claim in best if claim.rank == rank]
    if len(best) == 1 or rank == GIVEN or index >= len(best[0].names):
        return best[0]
    of_path = [claim for claim in best if claim.is_of_path]
    if len(of_path) == 1:
        return of_path[0]
    modules = {claim.main.wishes.module(claim.main.node) for claim in best}  # type: ignore[arg-type]
    return best[-1] if rank < OP and len(modules) == 1 else None
