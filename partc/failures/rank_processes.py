"""The processes of ranks below a launcher, and whether they are stopped: Linux tells in /proc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
STOPPED, ENDED = "T", "ZX"  # by SIGSTOP; a debugger's is "t"


class RankProcess(NamedTuple):
    """The process of a rank.

    ``state``: a letter as in ``ps``. ``began``: when, in ticks since the host began, so that a
    number which is used again is told apart.
    """

    pid: int
    rank: int
    state: str
    began: int


def rank_processes(launcher: int) -> list[RankProcess]:
    """The processes below a launcher's that it has given a rank; none on other systems than Linux.

    A process that a rank has started, as the worker of a DataLoader, has the same number, and is
    no rank.
    """
    return list(_below(launcher, None))


def looked_at(pid: int, rank: int) -> RankProcess | None:
    """A process as it is now; None where it has ended."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ENDED else RankProcess(pid, rank, fields[0], int(fields[19]))


def is_runnable(pid: int) -> bool:
    """Whether a thread of a process computes, or would on a host that is less busy."""
    for task in PROC.glob(f"{pid}/task/*/stat"):
        try:
            if task.read_text().rpartition(")")[2].split()[0] == "R":
                return True
        except OSError:  # the thread has ended meanwhile
            continue
    return False


def has_variable(pid: int, name: str, value: str) -> bool:
    """Whether a process was started with a variable in its environment."""
    return f"{name}={value}" in _environment(pid)


def _below(pid: int, rank: str | None) -> Iterator[RankProcess]:
    for child in _children(pid):
        given = _rank_of(child)
        if given is not None and given != rank:
            found = looked_at(child, int(given))
            if found is not None:
                yield found
        else:
            yield from _below(child, given)


def _children(pid: int) -> list[int]:
    found = []
    for task in PROC.glob(f"{pid}/task/*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:  # the thread has ended meanwhile
            continue
    return found


def _rank_of(pid: int) -> str | None:
    """The text of RANK in a process's environment, if it is a number."""
    texts = [each[5:] for each in _environment(pid) if each.startswith("RANK=")]
    return texts[0] if texts and texts[0].isdecimal() else None


def _environment(pid: int) -> list[str]:
    try:
        return (PROC / str(pid) / "environ").read_text(errors="replace").split("\0")
    except OSError:
        return []
