"""What installed packages add to partc: the entry points of a group such as ``partc.schedules``.

A package that is installed names a function of its own, or the module that has it, in its
``pyproject.toml``. The import registers what the module decorates.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from partc.errors import PartcError, UsageError
from partc.users_line import failed_at

GROUPS = tuple(f"partc.{kind}" for kind in ("passes", "rules", "schedules"))  # all that are read
RULES = GROUPS[1]


@cache
def every() -> Any:
    """All entry points there are: to look for them reads a file of each installed package."""
    return entry_points()


@cache
def load_installed(group: str, kind: str) -> None:
    """Import what installed packages name in a group, once; UsageError names what cannot be.

    ``kind`` is what a message calls one of them.
    """
    for entry in every().select(group=group):
        loaded(entry, group, kind)


def loaded(entry: EntryPoint, group: str, kind: str) -> Any:
    """What an entry point names; UsageError if it cannot be imported."""
    try:
        return entry.load()
    except PartcError:  # it says itself what is wrong
        raise
    except Exception as error:
        raise UsageError(
            where=f"{kind} {entry.name}",
            what=f"{entry.value!r} cannot be loaded",
            why=failed_at(error),
            do=f"Correct the entry point of the group {group!r}, or the package that names it.",
        ) from error
