"""What a rank writes into a local folder now and then, and a watchdog beside it reads.

A file for each rank, ``rank-00003.json``, which appears whole. The folder is that of the
environment's ``PARTC_HEARTBEATS``; where it is not set, nothing is written.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "PARTC_HEARTBEATS"
BEAT_S = 0.5  # from one to the next


@dataclass(frozen=True)
class Heartbeat:
    """Where the main thread of a rank is.

    Attributes:
        rank: its number, of all.
        pid: of its process.
        number: how many came before from this process.
        call: the rank's last call of a program, ``"step 7"``; empty before the first.
        inside: whether it is in that call still.
        moves: how often it has begun and ended calls.
        moved_at: when it did so last, by the clock of ``time.monotonic()``, which the processes of
            a host share.
        site: the line of the program with its place in the model, if it is in one.
        line: the line of the script.
        waits: whether it waits for other ranks there.
        step_s: the slowest of the last steps, from begin to begin; before there are any what was
            predicted; 0 where nothing is known.
    """

    rank: int
    pid: int
    number: int = 0
    call: str = ""
    inside: bool = False
    moves: int = 0
    moved_at: float = 0.0
    site: str = ""
    line: str = ""
    waits: bool = False
    step_s: float = 0.0

    @property
    def place(self) -> str:
        """``in step 7, at h.1.mlp ...``, in words."""
        call = f"{'in' if self.inside else 'behind'} {self.call}" if self.call else "before a step"
        return ", ".join(filter(None, [call, self.site and f"at {self.site}", self.line]))


def write(folder: Path, beat: Heartbeat) -> None:
    """Put a rank's file in the place of its last one."""
    path = folder / f"rank-{beat.rank:05d}.json"
    new = path.with_suffix(f".{beat.pid}")
    new.write_text(json.dumps(asdict(beat)), encoding="utf-8")
    os.replace(new, path)


def read(folder: Path) -> dict[int, Heartbeat]:
    """The last heartbeat of each process, by its number; what cannot be read counts for nothing."""
    found = {}
    for path in folder.glob("rank-*.json"):
        try:
            beat = Heartbeat(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        found[beat.pid] = beat
    return found
