"""Amounts and times as text, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[str, str, str]  # what, how much, remark


def amount(number: int, unit: str) -> str:
    """``1536`` bytes as ``1.54 kB``; the unit stands apart so that columns align."""
    for prefix, size in (("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 1000)):
        if number >= size:
            return f"{number / size:.2f} {prefix}{unit}"
    return f"{number} {unit}"


def time_text(seconds: float) -> str:
    """``0.0015`` as ``1.5 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def table(rows: Sequence[Row]) -> list[str]:
    """Rows in columns, the middle one to the right."""
    wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return [f"  {a:<{wide[0]}}  {b:>{wide[1]}}  {c}".rstrip() for a, b, c in rows]
