"""A folder of compiled programs, which the processes of a machine, or of many, fill together.

In: a key and a program. Out: the program, in this process or a later one. An entry appears whole or
not at all; of several processes that want one that is not there, one compiles while the others
wait.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep, time
from typing import IO, Any

from partc.atomic import atomic_directory, what_helps
from partc.errors import LoadError, PartcError
from partc.program import Program, load
from partc.program.written import written_files
from partc.wrong_calls import as_path

try:
    import fcntl
except ImportError:  # on Windows, where every process compiles for itself
    fcntl = None  # type: ignore[assignment]

LOG = logging.getLogger("partc")
SIGN, PROGRAM = "key.json", "program"  # files of an entry
MOST_ENTRIES = 100  # of a folder; those that were not used for the longest time go
LOCKS = 16  # entries share these files, so that none has to be deleted
POLL_S, LONGEST_S = 0.02, 1800.0  # between two looks at a lock; wait for another process
LEFTOVER_S = 86_400.0  # after which what a killed process has left is deleted

Found = tuple[Program, Mapping[str, Any]]  # with what was noted beside it


class CacheFolder:
    """The entries of a folder, each a saved program by its key."""

    def __init__(self, path: str | Path) -> None:
        self.path, self._told = as_path(path, "cache"), False

    def read(self, key: str) -> Found | None:
        """The program of a key with its notes; None if there is none, or it is damaged."""
        entry = self.path / key
        if not entry.exists():
            return None
        try:
            noted = json.loads((entry / SIGN).read_text(encoding="utf-8"))
            found = replace(load(entry / PROGRAM), hooks=None), dict(noted)  # nobody edits these
        except (LoadError, OSError, ValueError, TypeError) as error:
            if entry.exists():  # and not because another process has replaced it
                note("the cache's entry %s cannot be read, and is made anew: %s", entry, error)
                _delete(entry)
            return None
        with suppress(OSError):
            os.utime(entry / SIGN)  # it was used now
        return found

    def write(self, key: str, program: Program, noted: Mapping[str, Any]) -> None:
        """Keep a program; a note where the folder cannot be written."""
        try:
            with atomic_directory(self.path / key, _written) as entry:
                program.save(entry / PROGRAM)
                (entry / SIGN).write_text(json.dumps(dict(noted)), encoding="utf-8")
            self._prune()
        except (OSError, PartcError) as error:
            if not self._told:  # of the folder, before
                note("the program is not kept in the cache: %s", error)

    def clear_way(self, key: str, wanted: Callable[[Found], bool]) -> None:
        """Delete the entry of a key if it is there and not what is wanted."""
        found = self.read(key)
        if found is not None and not wanted(found):
            shutil.rmtree(self.path / key, ignore_errors=True)

    @contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """Wait until no other process is making this entry, or it is there.

        A process that dies lets the others go on, since the system then frees its lock. Where a
        file system has no locks nobody waits, and of several equal entries one stays.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / f"lock-{int(key[-8:], 16) % LOCKS}").open("a")
        except OSError as error:
            self._told = True
            note("the cache %s cannot be written: %s", self.path, _why(self.path, error))
            yield
            return
        with lock:
            self._wait(lock, key)
            yield

    def _wait(self, lock: IO[str], key: str) -> None:
        begun = monotonic()
        while not _is_taken(lock):
            if (self.path / key / SIGN).is_file():
                return
            if monotonic() - begun > LONGEST_S:
                note("another process has been compiling for %.0f s: compiling here", LONGEST_S)
                return
            sleep(POLL_S)

    def _prune(self) -> None:
        """Delete the entries that were not used for the longest time, and leftovers."""
        used = []
        for entry in self.path.iterdir():
            with suppress(OSError):  # another process may delete it
                if (entry / SIGN).is_file():
                    used.append(((entry / SIGN).stat().st_mtime, entry))
                elif entry.name.startswith(".") and _age_s(entry) > LEFTOVER_S:
                    shutil.rmtree(entry, ignore_errors=True)
        for _, entry in sorted(used)[:-MOST_ENTRIES]:
            shutil.rmtree(entry, ignore_errors=True)


def _written(entry: Path) -> set[str]:
    """The files of an entry."""
    return {SIGN, *(f"{PROGRAM}/{name}" for name in written_files(entry / PROGRAM))}


def _why(path: Path, error: OSError) -> str:
    if path.is_file():
        return "it is a file, and programs are kept in a folder. Name a folder, cache=..."
    return f"{error.strerror or error}: {error.filename}. {what_helps(error)}"


def _age_s(path: Path) -> float:
    return time() - path.stat().st_mtime


def note(text: str, *values: object, level: int = logging.WARNING) -> None:
    """Tell the user, once and not on every rank."""
    first = os.environ.get("RANK", "0") == "0"
    LOG.log(level if first else logging.DEBUG, f"partc: {text}", *values)


def _is_taken(lock: IO[str]) -> bool:
    """Whether this process has the lock now, or there are none."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _delete(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)
