"""What the compiler is at: the names of the passes that run now, outermost first.

The runner of passes says it, who shows progress reads it; nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_names: list[str] = []  # of this process; a search in threads has several at once


@contextmanager
def running(name: str) -> Iterator[None]:
    """Say that ``name`` runs, for as long as the ``with`` takes."""
    _names.append(name)
    try:
        yield
    finally:
        _names.remove(name)


def what_runs() -> str:
    """``choose_plan: propagate``: the outermost pass and the innermost; "" where none runs."""
    names = [*_names]
    return ": ".join(dict.fromkeys([*names[:1], *names[-1:]]))
