"""Run one case in a forked process of its own, with a limit of time and memory, and see what stays.

The process begins a session, so that whatever it starts can be found when it has ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

MORE_BYTES = 6_000_000_000  # beyond what the parent has mapped
SAID = "said.txt"  # what a case prints
GRACE_S = 5.0  # for processes that end by themselves


class Ended(NamedTuple):
    """How a case's process ended."""

    session: int  # of that process, and of what it started
    lines: list[Any]  # what it told
    late: bool  # it was killed at its limit


def alone(work: Callable[[Callable[[Any], None]], None], place: Path, limit_s: float) -> Ended:
    """Fork, and call ``work`` with a function that tells the parent something JSON can say.

    The process works in ``place/work``, and has its temporary files in ``place/tmp``.
    """
    for name in ("work", "tmp"):
        (place / name).mkdir(parents=True, exist_ok=True)
    ear, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ear)
        _child(work, place, mouth)
    os.close(mouth)
    lines: list[bytes] = []
    try:
        late = _is_late(ear, child, limit_s, lines)
    except BaseException:  # the command is interrupted
        end_session(child)
        raise
    os.waitpid(child, 0)
    return Ended(child, [json.loads(line) for line in b"".join(lines).splitlines()], late)


def _child(work: Callable[[Callable[[Any], None]], None], place: Path, mouth: int) -> NoReturn:
    """What the forked process does; it never returns to what the parent did."""
    code = 1
    try:
        os.setsid()
        _enter(place)
        with os.fdopen(mouth, "w", buffering=1, encoding="utf-8") as file:
            work(lambda said: print(json.dumps(said), file=file))
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter(place: Path) -> None:
    """Limit the memory, and move files, temporary files and output into the case's folder."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MORE_BYTES,) * 2)
    os.chdir(place / "work")
    os.environ["TMPDIR"] = tempfile.tempdir = str(place / "tmp")
    said = os.open(place / SAID, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, nothing), (1, said), (2, said)):
        os.dup2(file, number)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _is_late(ear: int, child: int, limit_s: float, lines: list[bytes]) -> bool:
    """Read until the child has closed its end; kill it, and what it started, after a time."""
    end, late = time.monotonic() + limit_s, False
    os.set_blocking(ear, False)
    with os.fdopen(ear, "rb", buffering=0) as pipe:
        while True:
            read = pipe.read(65536)
            if read == b"":
                return late
            if read:
                lines.append(read)
            elif time.monotonic() > end:
                late = True
                end_session(child)
                return late
            elif os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                lines.append(pipe.read(65536) or b"")
                return late
            else:
                time.sleep(0.002)


def members(session: int) -> list[int]:
    """The processes of a session that run, without those that ended and were not waited for."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            text = (each / "stat").read_text()
        except OSError:
            continue
        state, _, _, of = text.rpartition(")")[2].split()[:4]
        if int(of) == session and state not in "ZX":
            found.append(int(each.name))
    return found


def staying(session: int, grace_s: float = GRACE_S) -> list[str]:
    """The command lines of a session's processes that still run after a while; they are ended."""
    end = time.monotonic() + grace_s
    while (left := members(session)) and time.monotonic() < end:
        time.sleep(0.05)
    names = [_command(each) for each in left]
    end_session(session)
    return names


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")[:200]
    except OSError:
        return str(process)


def end_session(session: int) -> None:
    for each in members(session):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
