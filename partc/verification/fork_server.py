"""A process that imports once and forks ranks, each in a fraction of a second.

``multiprocessing`` has such a server too. This one leaves nothing behind, however its parent ends:
it listens to a socket without a name, so that there is no folder; it and its ranks end as soon as
the parent's end of their sockets closes, while they still import too; nothing else watches them.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing.process
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection

from partc.errors import RunError

_REQUEST = struct.Struct("=cq")  # what is asked, and a process id
_ANSWER = struct.Struct("=?q")  # whether the process has ended, and its exit code or its id
_FORK, _STATE = b"f", b"s"
_POLL_MS = 200
_CODE = (
    "import sys; sys.path[:] = {path!r}\n"
    "from partc.verification.fork_server import serve; serve({number}, {preloaded!r})"
)

Run = Callable[..., None]  # what a rank does with its pipe, its output, and further arguments


# in the parent -------------------------------------------------------------------------------
class ForkServer:
    """The parent's side of one server."""

    def __init__(self, preloaded: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        number = theirs.fileno()
        code = _CODE.format(path=sys.path, number=number, preloaded=list(preloaded))
        with theirs:
            self._process = subprocess.Popen(
                [spawn.get_executable(), "-c", code], pass_fds=[number], stdin=subprocess.DEVNULL
            )
        self._owner = os.getpid()  # a forked copy of the parent has another server

    def is_alive(self) -> bool:
        return os.getpid() == self._owner and self._process.poll() is None

    def fork(self, theirs: Connection, output: int) -> Forked:
        """Start a process that has one end of a pipe, and a file that its output goes to.

        It does what the first message on the pipe says (``start_message``).
        """
        socket.send_fds(self._socket, [_REQUEST.pack(_FORK, 0)], [theirs.fileno(), output])
        _, pid = self._answer()
        return Forked(self, pid)

    def state(self, pid: int) -> tuple[bool, int]:
        """Whether a process has ended, and its exit code, negative for a signal."""
        self._socket.sendall(_REQUEST.pack(_STATE, pid))
        return self._answer()

    def _answer(self) -> tuple[bool, int]:
        answer = self._socket.recv(_ANSWER.size, socket.MSG_WAITALL)
        if len(answer) < _ANSWER.size:
            raise ConnectionError("the server of ranks has ended")
        ended, number = _ANSWER.unpack(answer)
        return ended, number

    def close(self) -> None:
        """End the server; its ranks end when their pipes close."""
        if os.getpid() == self._owner:
            self._socket.close()
            self._process.wait()


class Forked:
    """One process that a server has forked, seen from the parent."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.exitcode: int | None = None

    def is_alive(self) -> bool:
        if self.exitcode is None:
            try:
                ended, code = self._server.state(self.pid)
            except OSError:  # no server: nobody knows how it ended, but its pipe has closed
                ended, code = True, -signal.SIGKILL
            self.exitcode = code if ended else None
        return self.exitcode is None

    def join(self, seconds: float) -> None:
        """Wait for its end, but not longer."""
        deadline = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def kill(self, number: int) -> None:
        """Send a signal; the server keeps the id of a process that has ended from being reused."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


_servers: list[ForkServer] = []


def fork_server(preloaded: Sequence[str]) -> ForkServer:
    """The server of this process, which is started where there is none."""
    if not hasattr(os, "fork"):
        raise RunError(
            where="ranks on this machine", what="this system cannot fork a process",
            why="ranks are forked from one process that has imported torch",
            do="Use Linux or macOS, or start the ranks by torchrun.",
        )  # fmt: skip
    if not _servers or not _servers[-1].is_alive():
        _servers[:] = [ForkServer(preloaded)]
        atexit.register(_servers[-1].close)
    return _servers[-1]


def start_message(run: Run, *arguments: object) -> bytes:
    """The first message to a rank: what it needs of the parent's main module, and what it runs."""
    prepared = spawn.get_preparation_data("rank")
    prepared.pop("authkey")  # a secret, and of processes that connect by themselves
    return pickle.dumps((prepared, pickle.dumps((run, arguments))))


# in the server -------------------------------------------------------------------------------
def serve(number: int, preloaded: Sequence[str]) -> None:
    """Import modules, then fork a rank for each request on socket ``number``, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and decides
    with socket.socket(fileno=number) as parent:
        with _ends_with(number):
            for name in preloaded:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        with contextlib.suppress(ConnectionError):
            while _answered(parent):
                pass


def _answered(parent: socket.socket) -> bool:
    """Answer one request; False where there is none, as the parent has ended."""
    request, handles, *_ = socket.recv_fds(parent, _REQUEST.size, 2)
    if len(request) < _REQUEST.size:
        return False
    what, pid = _REQUEST.unpack(request)
    if what == _FORK:
        parent.sendall(_ANSWER.pack(False, _forked(parent, *handles)))
    else:
        ended, status = os.waitpid(pid, os.WNOHANG)
        parent.sendall(_ANSWER.pack(ended, os.waitstatus_to_exitcode(status) if ended else 0))
    return True


def _forked(parent: socket.socket, pipe: int, output: int) -> int:
    """Fork a rank; return its id in the server. The rank itself never returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the server has one thread
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            parent.close()
            _be_rank(pipe, output)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(code)  # what the server has to do at its end is not the rank's to do
    os.close(pipe)
    os.close(output)
    return pid


# in a rank -----------------------------------------------------------------------------------
def _be_rank(number: int, output: int) -> None:
    """Do what the first message says; end when the parent's end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with _ends_with(number), Connection(number) as pipe:
        prepared, job = pickle.loads(pipe.recv_bytes())
        process = multiprocessing.process.current_process()
        process._inheriting = True  # type: ignore[attr-defined]  # no ranks of ranks while it imports
        try:
            spawn.prepare(prepared)
        finally:
            del process._inheriting  # type: ignore[attr-defined]
        run, arguments = pickle.loads(job)
        run(pipe, output, *arguments)


@contextlib.contextmanager
def _ends_with(number: int) -> Iterator[None]:
    """Inside, this process ends as soon as the other end of a socket or pipe closes.

    A thread waits for that and reads nothing; it is over when this returns, since a process that
    forks may have one thread alone.
    """
    done = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(number, 0)  # asks for nothing, and is told of a hang-up all the same
        while not done.is_set():
            if poll.poll(_POLL_MS) and not done.is_set():
                os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
