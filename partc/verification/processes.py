"""Start gloo processes for verification and tests; they take several jobs and always end.

with Processes(4) as world:
    losses = world.run(function, argument)            # function(argument) on ranks 0..3
    losses = world.run(function, argument, num=2)     # on the first two, as a world of two
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from partc.errors import RunError
from partc.verification.fork_server import fork_server, start_message

# What ranks need; modules that jobs need besides may be added before the first start.
PRELOADED = [
    "partc.verification.processes",
    "partc.program.stage.runtime",
    "torch.distributed.tensor",
]
GRACE_S = 5.0  # after one rank's failure, for the others to reply too


class Processes:
    """``num`` processes that wait for jobs; an error in a job is raised in the caller."""

    def __init__(self, num: int, *, timeout: float = 60.0, quiet: bool = False) -> None:
        self.num, self.timeout, self.quiet = num, timeout, quiet
        self._jobs = 0
        self._ranks: list[Rank] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *arguments: Any, num: int | None = None
    ) -> list[Any]:
        """Run ``function(*arguments)`` on the ranks of a new process group; return results by rank.

        Raises the error of the first rank that failed by itself, or RunError if ranks hang.
        """
        num = num or self.num
        self._start()
        self._jobs += 1
        job = pickle.dumps((self._jobs, num, self.timeout, function, arguments))
        for rank in self._ranks[:num]:
            rank.pipe.send_bytes(job)
        replies = self._collect(self._ranks[:num])
        failures = {r: reply for r, reply in replies.items() if not reply[0]}
        if len(replies) < num:
            self.close()  # a rank hangs, so none can take the next job
        if failures or len(replies) < num:
            raise _failure(failures, sorted(set(range(num)) - set(replies)), self.timeout)
        return [replies[rank][1] for rank in range(num)]

    def close(self) -> None:
        """End every process: ask first, then terminate."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.pipe.send_bytes(b"")
        deadline = time.monotonic() + 1.0
        for rank in self._ranks:
            rank.end(max(0.0, deadline - time.monotonic()))
        self._ranks = []

    def _start(self) -> None:
        if self._ranks and all(rank.process.is_alive() for rank in self._ranks):
            return
        self.close()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.num):  # one by one: those that were started are ended in any case
            self._ranks.append(Rank(rank, self._store.port, self.quiet))

    def _collect(self, ranks: list[Rank]) -> dict[int, tuple[bool, Any]]:
        """The replies by rank; returns early at the timeout, and ``GRACE_S`` after a failure."""
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + self.timeout
        waiting = {rank.pipe: rank for rank in ranks}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                replies[rank.number] = rank.reply()
                if not replies[rank.number][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies


class Rank:
    """One rank's process, seen from the parent."""

    def __init__(self, number: int, port: int, quiet: bool) -> None:
        self.number = number
        start = start_message(_serve, number, port)
        self.pipe, theirs = multiprocessing.Pipe()
        read, write = os.pipe()
        self.process = fork_server(PRELOADED).fork(theirs, write)
        theirs.close()
        os.close(write)
        self.pipe.send_bytes(start)
        self._tagging = threading.Thread(target=_tag, args=(read, number, quiet), daemon=True)
        self._tagging.start()

    def reply(self) -> tuple[bool, Any]:
        """The reply to a job: (True, result) or (False, (error, traceback text))."""
        try:
            done: tuple[bool, Any] = pickle.loads(self.pipe.recv_bytes())
            return done
        except (EOFError, OSError):
            self.process.join(1.0)
            return False, (_ended(self.number, self.process.exitcode), "")

    def end(self, patience: float) -> None:
        self.process.join(patience)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.is_alive():
                self.process.kill(number)
                self.process.join(1.0)
        self._tagging.join(1.0)
        self.pipe.close()


def _serve(pipe: Connection, output: int, rank: int, port: int) -> None:
    """A rank's main loop: receive a job, send the result or error; an empty message ends it."""
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while job := pipe.recv_bytes():
            pipe.send_bytes(_reply(rank, store, job))


def _reply(rank: int, store: Any, job: bytes) -> bytes:
    """Run one job; return the pickled result, or the pickled error and traceback."""
    try:
        number, num, timeout, function, arguments = pickle.loads(job)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num))
        dist.init_process_group(
            "gloo", store=PrefixStore(f"job {number}", store), rank=rank, world_size=num,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip
        try:
            dist.barrier()  # a rank that is done early would close connections others still open
            return pickle.dumps((True, function(*arguments)))
        finally:
            dist.destroy_process_group()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        text = traceback.format_exc()
        try:
            return pickle.dumps((False, (error, text)))
        except Exception:
            return pickle.dumps((False, (RuntimeError(str(error)), text)))


def _tag(read: int, rank: int, quiet: bool) -> None:
    """Print each line of a rank's output with the rank's number in front."""
    with open(read, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not quiet:
                sys.stderr.write(f"[rank {rank}] {line}")


def _failure(
    failures: dict[int, tuple[bool, Any]], silent: list[int], timeout: float
) -> BaseException:
    """The error to raise: of the first rank that failed by itself, not due to another's end."""
    if not failures:
        return RunError(
            where=f"ranks {silent}",
            what=f"did not answer within {timeout:g} s",
            why="they hang, or the job is too long",
            do="Look at what they printed last, or give more time.",
        )
    rank, (_, (error, text)) = min(failures.items(), key=lambda item: (_is_echo(item[1]), item[0]))
    error.add_note(f"on rank {rank}; failed ranks {sorted(failures)}, silent {silent}\n{text}")
    raised: BaseException = error
    return raised


def _ended(rank: int, code: int | None) -> RunError:
    return RunError(
        where=f"rank {rank}",
        what="its process ended",
        why=f"exit code {code}",
        do="Look at what it printed last; -9 often means that memory ran out. A process of a rank "
        "runs the script anew: what starts it stands under if __name__ == '__main__'.",
    )


def _is_echo(reply: tuple[bool, Any]) -> bool:
    """Whether a rank failed only because another rank's process ended."""
    return "Connection" in str(reply[1][0]) or "peer" in str(reply[1][0])
