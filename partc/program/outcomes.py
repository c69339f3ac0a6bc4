"""What was found of a saved program: ``outcomes.json`` beside its files, which a report shows.

``partc check``, ``verify`` and ``bench`` write it. An outcome holds for the text, plan and mesh for
which it was found: those of an earlier text are left out when they are read, and go with the folder
when another program is saved into it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from partc.atomic import atomic_write
from partc.errors import LoadError
from partc.file_text import Unreadable, file_text

if TYPE_CHECKING:
    from partc.program import Program

NAME = "outcomes.json"
SCHEMA = 1
MAX_BYTES = 8_000_000
OF = "of"  # the entry with the digests of what an outcome was found for
Kind = Literal["checked", "verified", "measured"]
KINDS: tuple[Kind, ...] = ("checked", "verified", "measured")
Json = dict[str, Any]


def read_outcomes(program: Program) -> Json:
    """What was found of a loaded program, by its kind: nothing of a program that is not saved, and
    nothing that was found for another text. LoadError for a file that is no such list.
    """
    if not program.saved_in:
        return {}
    here = program.digests()
    found = _read(Path(program.saved_in))
    return {
        kind: {name: each for name, each in found[kind].items() if name != OF}
        for kind in KINDS
        if kind in found and found[kind].get(OF) == here
    }


def write_outcome(program: Program, kind: Kind, told: Json) -> None:
    """Save what was found of a loaded program in the place of an earlier finding of the kind.

    UsageError where it cannot be written. A file that cannot be read is replaced.
    """
    folder = Path(program.saved_in)
    try:
        others = _read(folder)
    except LoadError:
        others = {}
    found = {**others, kind: {OF: program.digests(), **told}}
    kept = {each: found[each] for each in KINDS if each in found}
    atomic_write(folder / NAME, json.dumps({"schema": SCHEMA, **kept}, indent=1) + "\n")


def _read(folder: Path) -> Json:
    path = folder / NAME
    if not path.exists():
        return {}
    try:
        found = json.loads(file_text(path, MAX_BYTES))
        if found["schema"] != SCHEMA:
            raise ValueError(f"it has schema {found['schema']!r}, this partc reads {SCHEMA}")
        for kind in KINDS:
            if kind in found and not isinstance(found[kind], dict):
                raise ValueError(f"{kind} is no table")
    except (Unreadable, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LoadError(
            where=str(path), what="cannot be read", why=str(error) or repr(error),
            do="Delete it, and run partc verify and partc bench again: nothing else needs it.",
        ) from None  # fmt: skip
    return dict(found)
