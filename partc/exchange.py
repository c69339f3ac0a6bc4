"""Put a folder in the place of another one in one step, so that no moment has neither."""

import ctypes
import os
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux: paths as they are; both names change places


def exchange(new: Path, target: Path, old: Path) -> None:
    """Rename `new` to `target`; what stood there is afterwards at `new` or at `old`.

    Where the system cannot do it in one step there are two, and the first is undone if the second
    fails. OSError if `target` cannot be replaced.
    """
    if _in_one_step(new, target):
        return
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        if not target.exists():
            old.rename(target)
        raise


def _in_one_step(new: Path, target: Path) -> bool:
    """Whether the system has exchanged the two; False also where it has no such call."""
    call = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if call is None:
        return False
    done: int = call(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(target), RENAME_EXCHANGE)
    return done == 0
