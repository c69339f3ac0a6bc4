"""Signals by which a scheduler says that it will end this run, and how much time it gives."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from partc.errors import UsageError
from partc.wrong_calls import quoted

NEVER_S = 1e18
Handler = Any


class Notices:
    """Takes signals until it is closed; a second one of a number does what it did before.

    ``seconds``: by signal, how long a process lives behind it.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self.seconds = check_notices(seconds)
        self.ends_at, self.came = NEVER_S, ""
        self._before: dict[int, Handler] = {
            number: signal.signal(number, self._note) for number in self.seconds
        }

    def left_s(self, predicted_s: float, group: Any) -> tuple[float | None, float]:
        """How long the run still has, of all ranks' the shortest; None without a notice. And the
        longest time that a rank predicts. All ranks call this together.
        """
        beyond_s = time.monotonic() - self.ends_at  # the largest is of the rank that ends first
        told = torch.tensor([beyond_s, predicted_s], dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
        beyond_s, longest_s = told.tolist()
        return (None if beyond_s < -NEVER_S / 2 else -beyond_s), longest_s

    def close(self) -> None:
        """Let signals do what they did before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = signal.Signals(number).name
        self.ends_at = min(self.ends_at, time.monotonic() + self.seconds[number])
        signal.signal(number, self._before.get(number) or signal.SIG_DFL)


def check_notices(seconds: object) -> dict[int, float]:
    """The seconds by signal; UsageError for what is none, or cannot be taken here."""
    if not isinstance(seconds, Mapping):
        raise _refusal(f"it is {quoted(seconds)}", "Pass {signal.SIGTERM: 30}.")
    for pair in seconds.items():
        _check_notice(*pair)
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            where="Checkpoints(notices=...)", what="this is not the main thread",
            why="Python takes signals in its main thread alone",
            do="Make the Checkpoints there.",
        )  # fmt: skip
    return {int(number): float(each) for number, each in seconds.items()}


def _check_notice(number: object, seconds: object) -> None:
    """UsageError for a pair that is not a signal and the seconds behind it."""
    pair = f"{_shown(number)}: {_shown(seconds)} is no signal with its seconds"
    if name := _named(seconds):  # the other way round
        raise _refusal(pair, f"Write {name}: {number if _is_time(number) else 30}.")
    if not _is_signal(number):
        name = _named(number) or "signal.SIGTERM"
        after = seconds if _is_time(seconds) else 30
        raise _refusal(pair, f"Write {name}: {after}, behind import signal.")
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise _refusal(f"{pair}: no process can catch it", "Write signal.SIGTERM: 30.")
    if not _is_time(seconds):
        raise _refusal(pair, f"Write how many seconds, {_shown(number)}: 30.")


def _refusal(what: str, do: str) -> UsageError:
    return UsageError(
        where="Checkpoints(notices=...)", what=what,
        why="it says by signal how many seconds the run lives behind it", do=do,
    )  # fmt: skip


def _is_signal(given: object) -> bool:
    return isinstance(given, int) and type(given) is not bool and given in signal.valid_signals()


def _is_time(given: object) -> bool:
    """Whether a value is a number of seconds; a signal, which is a number too, is none."""
    if isinstance(given, bool | signal.Signals) or not isinstance(given, int | float):
        return False
    return 0 < given < NEVER_S


def _named(given: object) -> str:
    """The signal of a name such as ``"SIGTERM"`` or ``"term"``, or of itself; "" for another."""
    if isinstance(given, signal.Signals):
        return _shown(given)
    name = str(given).upper().rpartition(".")[2]
    names = (name, f"SIG{name}")
    return next((f"signal.{each}" for each in names if each in signal.Signals.__members__), "")


def _shown(given: object) -> str:
    return f"signal.{given.name}" if isinstance(given, signal.Signals) else quoted(given)
