"""Attempts that may kill their process: a function of a number in, the answers it gave out.

A native kernel that is fed wrong shapes can corrupt memory or abort, so attempts run in a forked
child. It says on a pipe which attempt it starts; the next child goes on behind the fatal one.
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
    """The answer of every attempt, None where it crashes or says nothing for ``seconds``.

    A fatal attempt is made once more alone: an earlier one may have done the damage.
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
    """Make attempts in one child and note the answers; gives the fatal number, None without one."""
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
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _be_the_child(attempt: Attempt, numbers: Sequence[int], writing: int) -> None:
    """Never returns: no clean-up of the parent's may run twice."""
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)  # the parent's pool of threads does not survive the fork
        for number in numbers:
            os.write(writing, f"start {number}\n".encode())
            os.write(writing, f"answer {number} {attempt(number)}\n".encode())
    finally:
        os._exit(0)


def _listen(
    pipe: BinaryIO, numbers: Sequence[int], answers: dict[int, str], seconds: float
) -> int | None:
    """Read what a child says until it ends or is silent for too long."""
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
