"""Which files of a saved program's folder partc wrote: those that its ``program.json`` lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partc.errors import UsageError
from partc.program import manifest


def written_files(folder: Path) -> set[str]:
    """The files of a saved program, as ``"role0.py"`` or ``"programs/0/role0.py"``.

    UsageError if there is no program, or its list cannot be read: then nothing may be deleted.
    """
    path = folder / manifest.NAME
    if not path.is_file():
        raise _refusal(folder, f"it has no {manifest.NAME}, so partc did not write it")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return {manifest.NAME, *_listed(fields), *_of_others(folder, fields)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"its {manifest.NAME} does not say which files are partc's own: {error!r}"
        raise _refusal(folder, why) from None


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


def _refusal(folder: Path, why: str) -> UsageError:
    return UsageError(
        where=str(folder),
        what="will not be replaced",
        why=why,
        do="Choose another output directory, or move that away.",
    )
