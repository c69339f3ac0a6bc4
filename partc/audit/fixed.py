"""Check that what no run can judge of a program's text stands as it was printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from partc.errors import CheckError
from partc.program import Program
from partc.program.fixed_text import Fixed, FixedText, Part, parts_of


def check_fixed(program: Program) -> int:
    """The number of statements and functions that have to stay, and do; else CheckError.

    These decide on the device, the library of collectives, dtypes, random numbers, and on which
    tensors are tied (``program/fixed_text.py``).
    """
    known = (program.fixed or FixedText()).found.files
    return sum(
        _check_file(name, text, known.get(name, Fixed()))
        for name, text in sorted(program.sources.items())
    )


def _check_file(file: str, text: str, known: Fixed) -> int:
    parts = [*parts_of(text)]
    for part in _unknown(parts, known):
        raise CheckError(
            where=f"{file}:{part.line}, {part.name or part.text}",
            what=f"the edited text decides on {part.reason}",
            why="the check runs on one processor, in float64 and with fixed numbers in place of "
            "random ones, and cannot judge that",
            do="Undo the edit: lines and functions that decide on it have to stand as partc "
            "printed them, at their place. Comments are free.",
        )
    left = Counter(known.lines) - Counter(part.key for part in parts if not part.name)
    for key in left:
        *path, line = key.split("; ")
        raise CheckError(
            where=", ".join([file, *path]),
            what=f"the line `{line}` is gone, or stands elsewhere",
            why="it decides on the device, a dtype, random numbers or tied tensors, which the "
            "check cannot judge",
            do="Put it back.",
        )
    return len(parts)


def _unknown(parts: list[Part], known: Fixed) -> Iterator[Part]:
    """The parts that were not printed, or once more than that."""
    seen: Counter[str] = Counter()
    for part in parts:
        seen[part.name or part.key] += 1
        if part.name:
            if known.functions.get(part.name) != part.key or seen[part.name] > 1:
                yield part
        elif seen[part.key] > known.lines.get(part.key, 0):
            yield part
