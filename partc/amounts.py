"""Numbers of bytes, FLOPs and seconds as text, and aligned tables of them."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[str, str, str]  # what, how much, remark


def amount(number: int, unit: str) -> str:
    """A number with its unit and a decimal prefix: ``amount(1536, "B")`` is ``1.54 kB``."""
    for prefix, size in (("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 1000)):
        if number >= size:
            return f"{number / size:.2f} {prefix}{unit}"
    return f"{number} {unit}"


def counted(number: int, what: str) -> str:
    """A number of things: ``1 line``, ``2 lines``."""
    return f"{number} {what}{'s' * (number != 1)}"


def time_text(seconds: float) -> str:
    """Seconds as text: ``0.0015`` is ``1.5 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of a table of three aligned columns; the middle one is aligned to the right."""
    wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return [f"  {a:<{wide[0]}}  {b:>{wide[1]}}  {c}".rstrip() for a, b, c in rows]
