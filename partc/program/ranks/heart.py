"""Lets a watchdog beside the ranks see that this process lives, and where its main thread is.

A thread writes a heartbeat each half second, whatever the main thread does: it stops where the
whole process does, and shows where that was. `partc watchdog` sets the folder; without it there is
no thread.
"""

from __future__ import annotations

import atexit
import linecache
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

from partc.frames import seen
from partc.heartbeats import BEAT_S, FOLDER, Heartbeat, write
from partc.program import Program
from partc.program.ranks.places import Sight, called
from partc.program.ranks.waiting import Waiting, known_waiting
from partc.program.user_lines import TEXT, file_of

_ENDS_S = 2.0  # so long the interpreter waits for the thread at its end


class Heart(threading.Thread):
    """Writes the heartbeats of the rank whose main thread is ``of``."""

    def __init__(self, folder: Path, of: int, predicted_s: float) -> None:
        super().__init__(daemon=True, name="partc heart")
        self.folder, self.of, self.predicted_s = folder, of, predicted_s
        self.rank, self.number, self.over = int(os.environ["RANK"]), 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(BEAT_S if self.number else 0.0):
            with suppress(OSError):  # a full disk is no reason to end a training
                write(self.folder, self.beat())
            self.number += 1

    def beat(self) -> Heartbeat:
        """What there is to say now."""
        sight, site = seen(self.of, lambda frame: (Sight.of(frame), _program_line(frame)))
        waits = sight.waits or ".wait()" in site
        told = Heartbeat(
            self.rank, os.getpid(), self.number, site=site, line=sight.line, waits=waits,
            step_s=self.predicted_s,
        )  # fmt: skip
        known = known_waiting(self.of)
        return told if known is None else _of_steps(told, known)

    def stop(self) -> None:
        self.over.set()
        self.join(_ENDS_S)


def begin(program: Program) -> None:
    """Beat from now on, if a watchdog has set a folder, and this process does not yet."""
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK", "")
    beats = any(isinstance(each, Heart) for each in threading.enumerate())
    if not folder or not rank.isdecimal() or beats:
        return
    heart = Heart(Path(folder), threading.get_ident(), _predicted_s(program))
    heart.start()
    atexit.register(heart.stop)


# inside --------------------------------------------------------------------------------------
def _of_steps(told: Heartbeat, known: Waiting) -> Heartbeat:
    """A heartbeat with the rank's last call, and when that was."""
    fields = {
        "call": called(known.call), "inside": known.inside, "moves": known.moves,
        "moved_at": known.since,
        "step_s": max(known.steps_s, default=told.step_s),
    }  # fmt: skip
    return Heartbeat(**{**vars(told), **fields})


def _program_line(frame: FrameType | None) -> str:
    """The innermost line of a program, which names the user's: ``... # <- h.1.mlp at net.py:9``."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(TEXT):
            text, _, at = linecache.getline(file, frame.f_lineno or 0).partition("  # <- ")
            text = " ".join(text.partition("  # ")[0].split())
            place = f" for {at.strip()}" if at else ""
            return f"{file_of(file)}:{frame.f_lineno} {text}{place}"
        frame = frame.f_back
    return ""


def _predicted_s(program: Program) -> float:
    try:
        return float(program.cost.as_json()["prediction"]["seconds"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return 0.0
