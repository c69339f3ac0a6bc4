"""Scripts on ranks, as torchrun starts them, in processes that are forked: none imports torch.

A script is ``__main__`` of its process, with the variables and arguments that torchrun gives it,
and ends as a script does: what it does not catch is printed, then what it has registered for its
exit runs. A test about how processes are started, or end with their launcher, starts torchrun.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import IO, Any, NamedTuple

import torch
from torch._C._distributed_c10d import TCPStore

from partc.verification.fork_server import Forked, fork_server, start_message
from partc.verification.processes import PRELOADED
from tests.patience import patience

LOOK_S = 0.02


class Ended(NamedTuple):
    """How a script has ended, and what it has printed."""

    code: int
    text: str


@dataclass
class Script:
    """A script that runs; ``pipe`` is held, as the process ends where it closes."""

    process: Forked
    pipe: Connection
    printed: IO[bytes]

    @classmethod
    def begun(
        cls, path: Path, words: tuple[str, ...], given: Mapping[str, str], printed: IO[bytes]
    ) -> Script:
        pipe, theirs = multiprocessing.Pipe()
        process = fork_server(PRELOADED).fork(theirs, printed.fileno())
        theirs.close()
        pipe.send_bytes(start_message(_run, str(path), words, dict(given)))
        return cls(process, pipe, printed)

    def ended(self) -> Ended:
        self.pipe.close()
        code = self.process.exitcode
        assert code is not None
        self.printed.seek(0)
        return Ended(code, self.printed.read().decode(errors="replace"))


def run_script(path: Path, *words: str) -> Ended:
    """Run a script by itself, in its folder, until it has ended."""
    (ended,) = _run_all(path, words, [{}])
    return ended


def run_ranks(
    path: Path, *words: str, num: int = 2, ends_all: bool = True, **more: str
) -> list[Ended]:
    """Run a script on ranks of this machine, in the script's folder, until all have ended.

    ``ends_all``: where one fails the others are ended, as torchrun does. ``more``: variables that
    all of them have besides, or have otherwise.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {
        "WORLD_SIZE": f"{num}", "LOCAL_WORLD_SIZE": f"{num}", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{store.port}", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_RESTART_COUNT": "0", **more,
    }  # fmt: skip
    ranks = [{**given, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(num)]
    return _run_all(path, words, ranks, ends_all)


def _run_all(
    path: Path, words: tuple[str, ...], given: list[dict[str, str]], ends_all: bool = False
) -> list[Ended]:
    with ExitStack() as files:
        scripts = [
            Script.begun(path, words, each, files.enter_context(TemporaryFile())) for each in given
        ]
        _wait([script.process for script in scripts], ends_all)
        return [script.ended() for script in scripts]


def _wait(processes: list[Forked], ends_all: bool) -> None:
    deadline = time.monotonic() + patience()
    while alive := [each for each in processes if each.is_alive()]:
        if time.monotonic() > deadline or (ends_all and any(each.exitcode for each in processes)):
            for each in alive:
                each.kill(signal.SIGKILL)  # which a stopped process gets too
        time.sleep(LOOK_S)


# in a rank -----------------------------------------------------------------------------------
def _run(
    pipe: Connection, output: int, path: str, words: tuple[str, ...], given: dict[str, str]
) -> None:
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)
    os.environ.update(given)
    os.chdir(Path(path).parent)
    sys.path.insert(0, str(Path(path).parent))
    sys.argv[:] = [path, *words]
    main = ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main  # it holds what the script has made until all is over
    os._exit(_code_of(path, main))


def _code_of(path: str, main: ModuleType) -> int:
    """The exit code of a script, behind all that an interpreter does at its end."""
    code: Any = 0
    try:
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), vars(main))
    except SystemExit as end:
        code = end.code
    except BaseException:
        told = sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*told)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code if isinstance(code, int) else int(code is not None)
