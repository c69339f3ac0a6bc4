"""How a file of a saved program differs from what was saved, and what to do: it was edited, or git
wrote it with other line ends."""

from __future__ import annotations

import hashlib
from pathlib import Path
from shlex import quote

TEXTS = (".py", ".toml", ".csv", ".json")


def has_other_line_ends(path: Path, digest: str) -> bool:
    """Whether a text has CRLF where it was saved with LF, and nothing else differs."""
    if path.suffix not in TEXTS or b"\r\n" not in (content := path.read_bytes()):
        return False
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest() == digest


def other_line_ends(path: Path) -> tuple[str, str, str]:
    """What, why and what to do of such a file."""
    folder = path.parent
    kinds = [each for each in TEXTS if next(folder.glob(f"*{each}"), None)]
    names = " ".join(f"{quote(str(folder))}/*{each}" for each in kinds)
    return (
        "only its line ends differ from what was saved",
        "it has CRLF, as git with core.autocrlf writes it, and digests are of texts with LF",
        f"Write LF: sed -i 's/\\r$//' {names}; the line `{folder.name}/** -text` in .gitattributes "
        "keeps git from it.",
    )


def changed(path: Path) -> tuple[str, str, str]:
    """The same of a file whose digest differs."""
    do = f"Undo the change, or accept it with `partc check {path.parent} --accept-edits`."
    if path.name == "plan.toml":
        do = (
            f"Undo the change, or compile again: plan={str(path)!r}. The programs here are "
            "of the plan as it was."
        )
    return "was changed or damaged after it was saved", "its digest differs", do
