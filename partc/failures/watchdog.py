"""Run a launcher, and end the rank that stands still, so that the launcher starts all ranks again.

torchrun sees a process that has ended. One that is stopped, or hangs, it does not see: the other
ranks wait for it until their transfers time out, and then torchrun waits for it too. SIGKILL ends
such a process at once, and what follows is torchrun's own: all ranks begin again, as often as its
``--max-restarts`` says.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partc.errors import UsageError
from partc.failures.rank_processes import (
    RankProcess,
    has_variable,
    is_runnable,
    looked_at,
    rank_processes,
)
from partc.failures.standing import Limits, Seen, Standing, standing, told
from partc.heartbeats import FOLDER, Heartbeat, read
from partc.wrong_calls import did_you_mean

LAUNCHERS = ("torchrun", "python", "accelerate", "lightning", "srun", "mpirun")
LOOK_S = 0.25  # from one look to the next
LATE_S = 2.0  # behind which this process itself has stood still, or the host has slept
PASSED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # the launcher passes them to its ranks
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # which would end a launcher: they go to the ranks


@dataclass
class Watchdog:
    """Watches the ranks below one launcher.

    ``step_timeout_s``, ``stall_s``: as of ``Limits``; 0 means that they follow from the steps.
    """

    command: Sequence[str]
    step_timeout_s: float = 0.0
    stall_s: float = 0.0
    say: Callable[[str], object] = field(
        default=lambda text: print(f"partc watchdog: {text}", file=sys.stderr, flush=True)
    )
    known: dict[int, Seen] = field(default_factory=dict)
    folder: str = ""  # of the heartbeats
    ended: list[dict[str, Any]] = field(default_factory=list)  # the ranks that it has killed

    def run(self) -> int:
        """Run the command until it ends; its exit code, 128 + N for signal N.

        UsageError where it cannot be started.
        """
        with tempfile.TemporaryDirectory(prefix="partc-heartbeats-") as folder:
            self.folder, launcher = folder, self._started(folder)
            before = {each: signal.getsignal(each) for each in (*PASSED, *NOTICES, signal.SIGINT)}
            self._pass_signals(launcher)
            try:
                code = self._watch(launcher, Path(folder))
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        return 128 - code if code < 0 else code

    def _started(self, folder: str) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(self.command, env={**os.environ, FOLDER: folder})
        except (OSError, ValueError) as error:
            raise UsageError(
                where="partc watchdog", what=f"{self.command[0]!r} cannot be started",
                why=getattr(error, "strerror", None) or str(error), do=_as_started(self.command),
            ) from None  # fmt: skip

    def _pass_signals(self, launcher: subprocess.Popen[bytes]) -> None:
        for each in PASSED:
            signal.signal(each, lambda number, _: launcher.send_signal(number))
        for each in NOTICES:
            signal.signal(each, lambda number, _: self._notify(launcher.pid, number))
        signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to all by itself

    def _notify(self, launcher: int, number: int) -> None:
        """Tell the ranks themselves of a notice."""
        for each in rank_processes(launcher):
            _send(each, number)

    def _watch(self, launcher: subprocess.Popen[bytes], folder: Path) -> int:
        looked = time.monotonic()
        while (code := launcher.poll()) is None:
            time.sleep(LOOK_S)
            now = time.monotonic()
            if now - looked > LATE_S:
                self._forgive(now - looked)
            looked = now
            self.look(rank_processes(launcher.pid), read(folder), now)
        return code

    def _forgive(self, seconds: float) -> None:
        """Time that passed while this process stood still counts for nobody."""
        for seen in self.known.values():
            seen.spoke_at += seconds
            if seen.stopped_at is not None:
                seen.stopped_at += seconds

    # looks -----------------------------------------------------------------------------------
    def look(
        self, processes: Sequence[RankProcess], beats: dict[int, Heartbeat], now: float
    ) -> None:
        """Take in where the ranks are, and end one that stands still."""
        known = {each.pid for each in processes}
        told = [self._told_by(beat) for beat in beats.values() if beat.pid not in known]
        found = [*processes, *filter(None, told)]
        self.known = {each.pid: self._seen(each, now) for each in found}
        for pid, seen in self.known.items():
            seen.look(seen.process, beats.get(pid), now)
        steps = [seen.beat.step_s for seen in self.known.values() if seen.beat]
        limits = Limits.of(max(steps, default=0.0), self.step_timeout_s, self.stall_s)
        for pid, seen in self.known.items():
            if now - seen.spoke_at > limits.step_timeout_s and is_runnable(pid):
                seen.spoke_at = now  # its thread has had no core, or none of Python's turns
        for first in standing(self.known, limits, now)[:1]:
            self._end(first, limits, now)

    def _told_by(self, beat: Heartbeat) -> RankProcess | None:
        """The process of a heartbeat, if it runs: a fork has no RANK in what /proc tells of it, and
        not every system has /proc.
        """
        if Path("/proc/self/stat").exists():
            ours = has_variable(beat.pid, FOLDER, self.folder)
            return looked_at(beat.pid, beat.rank) if ours else None
        return RankProcess(beat.pid, beat.rank, "?", 0) if _runs(beat.pid) else None

    def _seen(self, process: RankProcess, now: float) -> Seen:
        known = self.known.get(process.pid)
        if known is None or known.process.began != process.began:
            return Seen(process, now)
        known.process = process
        return known

    def _end(self, found: Standing, limits: Limits, now: float) -> None:
        process, text = found.seen.process, told(found, self.known, now)
        self.say(
            f"{text}\n  A step's time-out is {limits.step_timeout_s:.1f} s. Rank {process.rank} is "
            "ended by SIGKILL; torchrun starts all ranks again, if it has --max-restarts left."
        )
        _send(process, signal.SIGKILL)
        beat = found.seen.beat
        self.ended.append(
            {"rank": process.rank, "why": found.why, "place": beat.place if beat else ""}
        )
        del self.known[process.pid]


def _as_started(command: Sequence[str]) -> str:
    """What to do about a command that cannot be started."""
    if len(command) == 1 and " " in command[0]:
        return f"Leave out its quotation marks: partc watchdog -- {command[0]}."
    near = did_you_mean(command[0], LAUNCHERS)
    if near:
        return near
    return (
        "Write the launcher's command line behind --: partc watchdog -- torchrun "
        "--nproc-per-node 4 --max-restarts 3 train.py."
    )


def _send(process: RankProcess, number: int) -> None:
    """Send a signal to a process, unless another has its number by now."""
    now = looked_at(process.pid, process.rank)
    if process.state == "?" or (now is not None and now.began == process.began):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
