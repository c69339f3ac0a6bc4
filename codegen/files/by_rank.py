"""Merges the lines of several pipeline ranks into one text that all of them run.

Lines can be merged if they differ in whole numbers alone and each number is linear in the pipeline
rank: ``range(3)`` on rank 1 and ``range(2)`` on rank 2 become ``range(4 - pp_rank)``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from partc.codegen.text import Line

RANK = "pp_rank"  # the variable of a program that holds the rank's place in the pipeline
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


def merged(lines: Mapping[int, Sequence[Line]]) -> list[Line] | None:
    """One text for the lines of all ranks (by pipeline rank); None if there is no such text.

    With ``pp_rank`` set to a rank's number the text does what this rank's lines do.
    """
    if len({len(own) for own in lines.values()}) > 1:
        return None
    found = [_merged_line(row, tuple(lines)) for row in zip(*lines.values(), strict=True)]
    return None if None in found else [line for line in found if line is not None]


def _merged_line(row: Sequence[Line], ranks: Sequence[int]) -> Line | None:
    """One line for the same line of all ranks, its numbers as expressions of the rank."""
    first = row[0]
    if all(line == first for line in row):
        return first
    rest = {(_NUMBER.sub("0", line.code), line.remark, line.indent) for line in row}
    if len(rest) > 1 or first.code.startswith("#"):
        return None
    codes = [line.code for line in row]
    columns = zip(*(map(int, _NUMBER.findall(code)) for code in codes), strict=True)
    texts = [linear(numbers, ranks) for numbers in columns]
    if None in texts:
        return None
    code, at = "", 0
    for text, number in zip(texts, _NUMBER.finditer(first.code), strict=True):
        code += first.code[at : number.start()]
        code += _operand(str(text), first.code, number)
        at = number.end()
    return replace(first, code=code + first.code[at:])


def _operand(text: str, code: str, number: re.Match[str]) -> str:
    """An expression for a number in ``code``, in parentheses behind ``-`` and beside ``*``."""
    before, after = code[: number.start()].rstrip()[-1:], code[number.end() :].lstrip()[:1]
    bound = before in ("-", "*") or after == "*"
    return f"({text})" if bound and " " in text else text


def linear(numbers: Sequence[int], ranks: Sequence[int]) -> str | None:
    """The expression ``a * pp_rank + b`` that gives each rank its number; None if there is none.

    >>> linear([3, 2], [1, 2]), linear([0, 128], [1, 2]), linear([5, 5], [1, 2])
    ('4 - pp_rank', '128 * pp_rank - 128', '5')
    """
    slope = 0
    if len(ranks) > 1:
        slope = (numbers[1] - numbers[0]) // (ranks[1] - ranks[0])
    base = numbers[0] - slope * ranks[0]
    if any(base + slope * rank != number for number, rank in zip(numbers, ranks, strict=True)):
        return None
    if slope == 0:
        return str(base)
    scaled = RANK if abs(slope) == 1 else f"{abs(slope)} * {RANK}"
    if slope < 0:
        return f"{base} - {scaled}"
    return scaled if base == 0 else f"{scaled} {'+' if base > 0 else '-'} {abs(base)}"
