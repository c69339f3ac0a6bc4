"""Output that appears whole or not at all, whatever interrupts the writing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

from partc.errors import UsageError

MANIFEST = "program.json"
WRITTEN = (
    "*.py",
    "*.toml",
    "*.json",
    "constants.safetensors",
    "schedule.csv",
    "programs",  # a folder of such folders, checked like them
    "__pycache__",
)  # file names of a saved program; __pycache__ appears when the program has run


@contextmanager
def atomic_directory(
    path: str | Path, written: Sequence[str] = WRITTEN, sign: str = MANIFEST
) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `path` on success and vanishes otherwise.

    An earlier directory at `path` is replaced only if all its file names match the patterns
    `written` and the file `sign` is among them (with sign "" no such file is needed). UsageError
    for any other content, which stays as it is.
    """
    target = Path(path).resolve()
    refuse_strangers(target, written, sign)
    with _beside(target) as holder:
        new = holder / "new"
        new.mkdir()
        yield new
        refuse_strangers(target, written, sign)  # it may have been filled while we wrote
        # The old directory moves into the holder, so that it is deleted only after the new stands.
        _swap(new, target, holder / "old")


def atomic_write(path: str | Path, text: str) -> None:
    """Replace the content of the file at `path` by `text`; a failure leaves the old content."""
    target = Path(path).resolve()
    with _beside(target) as holder:
        new = holder / "new"
        new.write_text(text, encoding="utf-8", newline="\n")
        target.parent.mkdir(parents=True, exist_ok=True)
        new.replace(target)


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A temporary directory on the target's file system, so that a rename is enough."""
    parent = next(folder for folder in target.parents if folder.is_dir())
    with TemporaryDirectory(prefix=f".{target.name}-", dir=parent) as holder:
        yield Path(holder)


def _swap(new: Path, target: Path, old: Path) -> None:
    """Rename `new` to `target`, moving what is there to `old`, and back if that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if target.exists():
            target.rename(old)
        new.rename(target)
    except BaseException:  # also Ctrl-C: between the two renames there is no directory at `target`
        if old.exists() and not target.exists():
            old.rename(target)
        raise


def refuse_strangers(target: Path, written: Sequence[str] = WRITTEN, sign: str = MANIFEST) -> None:
    """UsageError unless `target` is absent, empty, or holds what partc wrote and nothing else."""
    if not target.exists():
        return
    if not target.is_dir():
        raise _refusal(target, "it is a file")
    names = sorted(entry.name for entry in target.iterdir())
    if names and sign and sign not in names:
        raise _refusal(target, f"it has no {sign}, so partc did not write it")
    strangers = [n for n in names if not any(fnmatch(n, pattern) for pattern in written)]
    if strangers:
        raise _refusal(target, f"it also holds {strangers[0]}, which partc did not write")
    if "programs" in names and "programs" in written:
        for folder in sorted((target / "programs").iterdir()):
            refuse_strangers(folder, written, sign)


def _refusal(target: Path, why: str) -> UsageError:
    do = "Choose another output directory, or move that away."
    return UsageError(where=str(target), what="will not be replaced", why=why, do=do)
