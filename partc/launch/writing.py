"""Write the files of a launch into a folder, beside others and without harm to them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from partc.atomic import atomic_files
from partc.errors import UsageError
from partc.file_text import Unreadable, file_text
from partc.wrong_calls import did_you_mean

PLAIN = re.compile(r"[A-Za-z0-9_.@+=][A-Za-z0-9_.@+=/-]*\Z", re.ASCII)


def seen_path(option: str, given: str) -> str:
    """A path below the current folder, as all nodes and the image see it from there.

    UsageError for a path elsewhere, and for one with characters that shells or YAML read.
    """
    here, path = Path.cwd().resolve(), Path(given).resolve()
    if not path.is_relative_to(here) or path == here:
        raise UsageError(
            where=f"{option}{given}", what="it does not lie below the current folder",
            why="jobs start in that folder, on every node and in the image",
            do="Run partc launch in a folder that has the program, the script and their files.",
        )  # fmt: skip
    seen = path.relative_to(here).as_posix()
    if not PLAIN.match(seen):
        raise UsageError(
            where=f"{option}{seen}", what="files of a launch cannot name it",
            why="shells, YAML and Dockerfiles read its blanks or signs in ways of their own",
            do="Rename it: letters, digits and any of _ . @ + = - are good.",
        )  # fmt: skip
    return seen


def check_places(program: str, script: str, out: str) -> None:
    """UsageError for a script that there is not, and for files inside of a program's folder."""
    if script and not Path(script).is_file():
        raise UsageError(
            where=f"--script {script}", what="there is no such file",
            why="it is what each rank would run", do="Name a script that is there.",
        )  # fmt: skip
    if Path(out).resolve().is_relative_to(Path(program).resolve()):
        raise UsageError(
            where=f"-o {out}", what="it lies in the program's folder",
            why="run.py refuses a folder with code that program.json does not list",
            do="Name a folder beside it.",
        )  # fmt: skip


def check_run_options(program: str, words: Sequence[str]) -> None:
    """UsageError for an option that the program's run.py, which would be given it, has not."""
    try:
        text = file_text(Path(program) / "run.py")
    except Unreadable:
        return
    known = re.findall(r'add_argument\("(--[\w-]+)"', text)
    for option in (each.partition("=")[0] for each in words if each.startswith("--")):
        if not any(each.startswith(option) for each in known):
            raise UsageError(
                where=f"--args, {option}", what="the program's run.py has no such option",
                why=f"it has {', '.join(known)}",
                do=f"{did_you_mean(option, known)} A script of yours is named by --script.".strip(),
            )  # fmt: skip


def write_files(folder: str, files: Mapping[str, str], force: bool) -> None:
    """Write files, all or none; other files of the folder stay.

    UsageError, unless ``force``, where one exists with another text.
    """
    changed = [name for name in files if _differs(Path(folder) / name, files[name])]
    if changed and not force:
        raise UsageError(
            where=str(Path(folder) / changed[0]), what="will not be replaced",
            why="it exists, with another text than would be written",
            do="Name another folder with -o, or replace it with --force.",
        )  # fmt: skip
    atomic_files(folder, files)


def _differs(path: Path, text: str) -> bool:
    """Whether something else stands at a path than a file with this text."""
    try:
        return (path.exists() or path.is_symlink()) and file_text(path) != text
    except Unreadable:
        return True
