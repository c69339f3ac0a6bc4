"""Which files of a saved program's folder partc wrote: those that its ``program.json`` lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partc.atomic import CACHED, refusal
from partc.program import manifest
from partc.program.hooks import NAME as HOOKS
from partc.program.outcomes import NAME as OUTCOMES

CODE = (".py", ".pyc", ".pyo", ".so", ".pyd")  # files that Python could import


def written_files(folder: Path) -> set[str]:
    """The files of a saved program, as ``"role0.py"`` or ``"programs/0/role0.py"``.

    UsageError if there is no program, or its list cannot be read: then nothing may be deleted.
    """
    path = folder / manifest.NAME
    if not path.is_file():
        raise refusal(folder, f"it has no {manifest.NAME}, so partc did not write it")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        known = {manifest.NAME, HOOKS, OUTCOMES}
        return {*known, *_listed(fields), *_of_others(folder, fields)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"its {manifest.NAME} does not say which files are partc's own: {error!r}"
        raise refusal(folder, why) from None


def refuse_code_beside(folder: Path) -> None:
    """LoadError if a program's folder holds code that its list does not name.

    ``python build/run.py`` could import it in the place of a library.
    """
    known = {*written_files(folder), manifest.OTHERS, CACHED}
    for path in sorted(folder.iterdir()):
        if path.name not in known and _is_code(path):
            manifest.refuse(
                path,
                "is no part of the program",
                f"it is code that {manifest.NAME} does not list, and Python could import it",
                "Move it to another folder.",
            )


def _is_code(path: Path) -> bool:
    return path.name.endswith(CODE) or (
        path.is_dir() and any(each.name.endswith(CODE) for each in path.iterdir())
    )


def _listed(fields: Mapping[str, Any]) -> set[str]:
    """The names in a list of files; ValueError for one that no program has."""
    strange = [name for name in fields["files"] if not manifest.FILE_NAME.match(name)]
    if strange or not isinstance(fields["schema"], int) or "sha256" not in fields:
        raise ValueError("it is no list of a program's files")
    return {*fields["files"].keys()}


def _of_others(folder: Path, fields: Mapping[str, Any]) -> set[str]:
    """The files of the programs of other shapes and modes."""
    found = set()
    for number in fields.get("others", ()):
        place = Path(manifest.OTHERS) / str(int(number))
        found |= {f"{place.as_posix()}/{name}" for name in written_files(folder / place)}
    return found
