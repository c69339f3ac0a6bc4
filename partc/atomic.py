"""Output that appears whole or not at all, whatever interrupts the writing.

What is written stands first in a hidden folder beside its target, and takes the target's place in
one step of the file system. A process that is killed meanwhile leaves that folder behind; the next
one that writes to the same target deletes it.
"""

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp

from partc.errors import PartcError, UsageError
from partc.exchange import exchange
from partc.interrupts import not_interrupted
from partc.wrong_calls import refuse_tilde

try:
    import fcntl
except ImportError:  # on Windows, where leftovers stay
    fcntl = None  # type: ignore[assignment]

Ours = Callable[[Path], Collection[str]]  # the files of a folder that partc wrote, as "a/b.py"
CACHED = "__pycache__"  # where Python keeps what it compiled: it appears when a program has run


@contextmanager
def atomic_directory(path: str | Path, ours: Ours) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `path` on success and vanishes otherwise.

    An earlier directory at `path` is replaced only if it has no file but those that `ours` names.
    UsageError for any other content, which stays as it is, and where nothing can be written. Ctrl-C
    takes effect when the writing has ended.
    """
    with _said(path), _beside(target := Path(path).resolve()) as holder:
        refuse_strangers(target, ours)
        new = holder / "new"
        new.mkdir()
        yield new
        refuse_strangers(target, ours)  # it may have been filled while we wrote
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            exchange(new, target, holder / "old")
        else:
            new.rename(target)


def atomic_write(path: str | Path, text: str) -> None:
    """Replace the content of the file at `path` by `text`; a failure leaves the old content.

    UsageError where it cannot be written.
    """
    with _said(path), _beside(target := Path(path).resolve()) as holder:
        new = holder / "new"
        new.write_text(text, encoding="utf-8", newline="\n")
        target.parent.mkdir(parents=True, exist_ok=True)
        new.replace(target)


def atomic_files(folder: str | Path, texts: Mapping[str, str]) -> None:
    """Write files into a folder, each in the place of an earlier one; other files there stay.

    All are written before the first takes its place. Scripts (``.sh``) may be executed.
    UsageError where one cannot be written.
    """
    with _said(folder), _beside(target := Path(folder).resolve()) as holder:
        for name in texts:
            if (target / name).is_dir():
                raise refusal(target / name, "it is a folder")
        for name, text in texts.items():
            new = holder / name
            new.write_text(text, encoding="utf-8", newline="\n")
            new.chmod(0o755 if name.endswith(".sh") else 0o644)
        target.mkdir(parents=True, exist_ok=True)
        for name in texts:
            (holder / name).replace(target / name)


def check_output(path: str | Path, ours: Ours) -> None:
    """UsageError if a directory could not be written at `path`, before the work that it is for."""
    with _said(path):
        target = Path(path).resolve()
        refuse_strangers(target, ours)
        parent = _nearest_folder(target)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13), str(parent))
        blocked = next((each for each in target.parents if os.path.lexists(each)), parent)
        if blocked != parent:
            raise NotADirectoryError(20, os.strerror(20), str(blocked))


def refuse_strangers(target: Path, ours: Ours) -> None:
    """UsageError unless `target` is absent, empty, or holds files that partc wrote alone."""
    if not target.exists():
        return
    if not target.is_dir():
        raise refusal(target, "it is a file")
    if not any(target.iterdir()):
        return
    known = {*ours(target)}
    folders = {parent.as_posix() for name in known for parent in Path(name).parents}
    for name in _content(target):
        if name.rstrip("/") not in (folders if name.endswith("/") else known):
            raise refusal(target, f"it also holds {name}, which partc did not write")


def _content(folder: Path) -> Iterator[str]:
    """The files of a folder and of those in it, and the folders with a slash at the end.

    Without what Python has compiled of the files.
    """
    for place, folders, files in os.walk(folder):
        here = Path(place).relative_to(folder)
        if here.name == CACHED:
            folders.clear()
            files = [n for n in files if not _is_compiled(Path(place).parent, n)]
        yield from ((here / name).as_posix() for name in sorted(files))
        for name in sorted(folders):
            link = (Path(place) / name).is_symlink()
            if link or name != CACHED:
                yield f"{(here / name).as_posix()}{'' if link else '/'}"


def _is_compiled(sources: Path, name: str) -> bool:
    """Whether a file is what Python has compiled of a source in the folder `sources`."""
    return name.endswith(".pyc") and (sources / f"{name.split('.')[0]}.py").is_file()


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A temporary directory on the target's file system, so that a rename is enough.

    Its name is short, as that of the target may be as long as the file system allows. The lock on
    it is free as soon as this process has ended.
    """
    parent = _nearest_folder(target)
    sign = f".partc-{sha256(target.as_posix().encode()).hexdigest()[:8]}-"
    with not_interrupted():
        for left in parent.glob(f"{sign}*"):
            _clear(left, target)
        holder = Path(mkdtemp(prefix=sign, dir=parent))
        lock = _lock(holder, wait=True)
        try:
            yield holder
        finally:
            shutil.rmtree(holder, ignore_errors=True)
            if lock is not None:
                os.close(lock)


def _nearest_folder(target: Path) -> Path:
    return next(folder for folder in target.parents if folder.is_dir())


def _clear(left: Path, target: Path) -> None:
    """Delete what a process has left that was killed, and put back what it had moved away."""
    with suppress(OSError):
        lock = _lock(left, wait=False)
        if lock is None:
            return
        if (left / "old").exists() and not target.exists():
            (left / "old").rename(target)
        shutil.rmtree(left, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Take the lock of a folder; None if another process has it, or there are no locks."""
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # the other process lives, or the file system has no locks
        os.close(handle)
        return None
    return handle


@contextmanager
def _said(path: str | Path) -> Iterator[None]:
    """Say in a sentence why `path` cannot be written."""
    refuse_tilde(path, str(path))
    try:
        yield
    except PartcError:
        raise
    except IsADirectoryError as error:
        raise UsageError(
            where=str(path), what="it is a folder", why="a file is written",
            do="Name a file in it.",
        ) from error  # fmt: skip
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        if isinstance(error, ValueError) and "\0" not in str(path):
            raise
        why = getattr(error, "strerror", None) or str(error)
        at = getattr(error, "filename", None)
        raise UsageError(
            where=repr(str(path)) if "\0" in str(path) else str(path),
            what="cannot be written",
            why=why if at is None or Path(str(at)) == Path(path) else f"{why}: {at}",
            do=f"{what_helps(error)} What was there before is as it was.",
        ) from error


def what_helps(error: Exception) -> str:
    """What to do about an error of the system that kept something from being written."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "Make room on its disk, or name a place on another one."
    if number in (errno.EEXIST, errno.ENOTDIR):
        return "A file stands where a folder is needed: move it away, or name another folder."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Name a place where you may write."
    return "Name a place where you may write, with room on its disk."


def refusal(target: Path, why: str) -> UsageError:
    """What is said of a folder or file that is not partc's own to replace."""
    do = "Choose another output directory, or move that away."
    return UsageError(where=str(target), what="will not be replaced", why=why, do=do)
