"""A checkpoint is one folder of all ranks: what is said where ranks name several, or see several
disks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from partc.errors import PartcError, RunError
from partc.program.ranks.together import Together

WHY = "a checkpoint is one folder of all ranks"


@contextmanager
def of_one_folder(ranks: Together, folder: Path) -> Iterator[None]:
    """Say of what fails inside, on all ranks, that they name other folders, where they do.

    Names alone are no reason: hosts may see one disk under several.
    """
    named = ranks.exchange(str(folder))
    try:
        yield
    except PartcError as error:
        other = next((rank for rank, each in enumerate(named) if each != named[0]), None)
        if other is None:
            raise
        raise ranks.error(
            where=ranks.call,
            what=f"rank 0 names the folder {named[0]!r}, and rank {other} {named[other]!r}",
            why=WHY, do="Give all ranks the same folder: leave the rank out of its name.",
        ) from error  # fmt: skip


def check_seen(made: Path) -> None:
    """RunError on a rank that does not see the directory that rank 0 has made to write in."""
    if not made.is_dir():
        raise RunError(
            where=str(made.parent), what="this rank does not see what rank 0 has made there",
            why=WHY, do="Name a folder on a file system that all hosts share.",
        )  # fmt: skip
