"""Run attempts that may crash their process: in forked children that report over a pipe.

A native kernel with wrong shapes can corrupt memory or abort. So a child process runs the attempts
and writes to a pipe which attempt it starts. If the child dies, the next child goes on with the
attempt after the fatal one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import select
import signal
import warnings
from collections.abc import Callable, Sequence
from typing import BinaryIO

import torch

Attempt = Callable[[int], str]  # its number -> an answer of one line


def answers_of(attempt: Attempt, num: int, seconds: float) -> list[str | None]:
    """The answers of attempts 0 to ``num - 1``; None for one that crashes or hangs for ``seconds``.

    A fatal attempt is repeated alone in a child, since an earlier one may have corrupted memory.
    """
    answers: dict[int, str] = {}
    ended: list[int] = []
    start = 0
    while start < num:
        last = _in_child(attempt, range(start, num), answers, seconds)
        if last is None:
            break
        ended.append(last)
        start = last + 1
    for alone in ended:
        _in_child(attempt, [alone], answers, seconds)
    return [answers.get(i) for i in range(num)]


def _in_child(
    attempt: Attempt, numbers: Sequence[int], answers: dict[int, str], seconds: float
) -> int | None:
    """Run attempts in one child and note their answers; the number of the fatal one, or None."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses one thread only
        child = os.fork()
    if child == 0:
        os.close(reading)
        _be_the_child(attempt, numbers, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            return _listen(pipe, numbers, answers, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):  # SIGKILL, since a kernel may hang
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _be_the_child(attempt: Attempt, numbers: Sequence[int], writing: int) -> None:
    """Run the attempts in the child and exit; never returns.

    ``os._exit`` skips the parent's exit handlers, which must not run twice.
    """
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)  # the parent's pool of threads does not survive the fork
        for number in numbers:
            # unbuffered: the start has to be on the pipe before the attempt can crash
            os.write(writing, f"start {number}\n".encode())
            os.write(writing, f"answer {number} {attempt(number)}\n".encode())
    finally:
        os._exit(0)


def _listen(
    pipe: BinaryIO, numbers: Sequence[int], answers: dict[int, str], seconds: float
) -> int | None:
    """Read the child's answers until it ends or is silent too long; the fatal number, or None."""
    started, text = numbers[0], b""
    while select.select([pipe], [], [], seconds)[0]:
        heard = pipe.read(65536)
        if not heard:
            break
        *lines, text = (text + heard).split(b"\n")
        for line in lines:
            word, number, *answer = line.decode().split(" ", 2)
            started = int(number)
            if word == "answer":
                answers[started] = answer[0]
    return None if numbers[-1] in answers else started
