"""What differs between two texts, line by line, in bounded time."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

Change = tuple[str, int, int, int, int]  # as of difflib.SequenceMatcher.get_opcodes
MOST_PAIRS = 3_000_000  # of equal lines; a program of 10,000 lines has a tenth of it


def line_changes(old: Sequence[str], new: Sequence[str]) -> Sequence[Change]:
    """How one text becomes the other; one replacement of all lines where texts from strangers
    repeat a line so often that a comparison would take minutes.
    """
    if not comparable(old, new):
        return [("replace", 0, len(old), 0, len(new))]
    return difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()


def comparable(old: Sequence[str], new: Sequence[str]) -> bool:
    """Whether the pairs of equal lines, which difflib looks at, are few enough."""
    before, after = Counter(old), Counter(new)
    return sum(num * after[line] for line, num in before.items()) <= MOST_PAIRS
