"""What a loop goes through, as text: the calls of a module, their numbers, slices of lists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from partc.codegen.repeats.runs import Loop
from partc.quoting import literal


def head_of_calls(loop: Loop, items: Sequence[str], lists: Sequence[str]) -> str:
    """The ``for`` line of a loop over the calls of a module: ``for x_t in xs:``."""
    if not items:
        return f"for _ in range({len(loop.groups)}):"
    over = lists[0] if len(lists) == 1 else f"zip({', '.join(lists)}, strict=True)"
    return f"for {', '.join(items)} in {over}:"


def numbers_in(loop: Loop, name: str) -> str:
    """The numbers of a loop's calls, in the order in which these run: ``range(12)``."""
    row = next(row for row in loop.run.numbers if row.name == name)
    known = dict(zip(loop.run.layers, row.values, strict=True))
    values = [known[group.layer] for group in loop.groups]
    steps = {b - a for a, b in pairwise(values)}
    if row.type_name != "int" or len(steps) > 1 or steps == {0}:
        return literal(tuple(values))
    return _range(int(values[0]), len(values), int(steps.pop()))


def _range(first: int, num: int, step: int) -> str:
    """The text of a range of numbers.

    >>> _range(0, 12, 1), _range(11, 12, -1), _range(1, 3, 2)
    ('range(12)', 'reversed(range(12))', 'range(1, 6, 2)')
    """
    if step == -1:
        return f"reversed({_range(first - num + 1, num, 1)})"
    end = first + num * step if step == 1 else first + (num - 1) * step + (1 if step > 0 else -1)
    start = f"{first}, " if first or step != 1 else ""
    return f"range({start}{end}{f', {step}' if step != 1 else ''})"


def sliced(texts: Sequence[str]) -> str:
    """Texts that are the entries of one list, in order or in reverse, written as a slice.

    One other text may stand before or behind them. "" if the texts are not of this kind.

    >>> sliced(["x", "kept[0]", "kept[1]"])
    '[x, *kept[:2]]'
    """
    for first, last in ((0, 0), (1, 0), (0, 1)):
        middle = texts[first : len(texts) - last]
        name = middle[0].partition("[")[0]
        for text, indices in (
            (f"{name}[:{len(middle)}]", range(len(middle))),
            (f"reversed({name}[:{len(middle)}])", reversed(range(len(middle)))),
        ):
            if list(middle) == [f"{name}[{i}]" for i in indices]:
                return f"[{', '.join([*texts[:first], f'*{text}', *texts[len(texts) - last :]])}]"
    return ""
