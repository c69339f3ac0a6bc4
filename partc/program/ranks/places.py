"""Where a rank stands, in words that other ranks read, and what is said of those that wait."""

from __future__ import annotations

import linecache
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from partc.errors import RunError

PROGRAMS = ("step", "eval_step", "forward", "backward")  # calls that are told by their number
_TRANSFERS = ("distributed_c10d.py", "_functional_collectives.py")  # torch's that wait for others
_DEPTH = 4  # of torch's own frames inside of these
_OF_ALL = "each rank holds a part of what the others need there"
_ON_ALL = (
    "Make the call on every rank, and not behind `if rank == 0` or is_main_process; only what is "
    "then written may be of one rank."
)
_HERE, _PYTHON = str(Path(__file__).parents[2]), str(Path(os.__file__).parent)


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    ``call``: its last call of all ranks, ``"step 7"``; ``inside``: whether it is in it still.
    ``line``: of the script. ``waits``: whether it is in a transfer of torch's. ``moves``: how often
    it has begun and ended calls; ``beat``: how often it has said so. ``begun``: how many calls of
    each kind it has begun.
    """

    call: str
    inside: bool
    line: str
    waits: bool
    moves: int
    beat: int
    begun: Mapping[str, int] = field(default_factory=dict)

    @property
    def told(self) -> str:
        """``its last was step 7, and it is at train.py:31 (dist.barrier())``, in words."""
        line = f", and it is at {self.line}" if self.line else ""
        return f"its last was {called(self.call) or 'none'}{line}"


def called(call: str) -> str:
    """A call in words: a step by its number, and ``full_state_dict`` without."""
    kind, _, _ = call.rpartition(" ")
    return call if kind in PROGRAMS or not kind else kind


def apart(call: str, others: Mapping[int, Place]) -> dict[int, Place]:
    """The ranks that have not begun a call; a pipeline's first may have ended it long before."""
    kind, _, number = call.rpartition(" ")
    outside = {rank: place for rank, place in others.items() if not place.inside}
    return {
        rank: place
        for rank, place in outside.items()
        if place.call != call and place.begun.get(kind, 0) < int(number)
    }


def elsewhere(line: str, others: Mapping[int, Place]) -> dict[int, Place]:
    """The ranks that wait in no transfer at a line of the script."""
    return {r: place for r, place in others.items() if not (place.waits and place.line == line)}


def stand(before: Mapping[int, Place], now: Mapping[int, Place], num: int) -> bool:
    """Whether all others wait, in a step or in a transfer, and have since the last look."""
    return len(now) == num and all(
        (place.inside or place.waits)
        and (was := before.get(rank)) is not None
        and was.moves == place.moves
        and was.beat < place.beat
        for rank, place in now.items()
    )


def told_of(rank: int, mine: Place, away: Mapping[int, Place], seconds: float) -> RunError:
    """What is said of ranks that are away from where this one waits."""
    few = [*away.items()][:4]
    if not mine.inside:
        return RunError(
            where=f"rank {rank}, {mine.line}",
            what=f"it has waited {seconds:g} s for what other ranks hold; "
            + "; ".join(f"rank {other} is not there: {place.told}" for other, place in few),
            why=_OF_ALL, do=_ON_ALL,
        )  # fmt: skip
    each = [f"rank {other} has not begun it: {place.told}" for other, place in few]
    told = f"it has waited {seconds:g} s; {'; '.join(each)}"
    where = f"rank {rank}, {called(mine.call)}"
    if called(mine.call) != mine.call:
        at = f", at {mine.line}" if mine.line else ""
        return RunError(where=where + at, what=told, why=_OF_ALL, do=_ON_ALL)
    return RunError(
        where=where, what=told,
        why="all ranks compute a step together, so that each of them takes as many",
        do="Give every rank as many batches: stage.loader(dataset) does, or a DistributedSampler "
        "over program.data_world with DataLoader(drop_last=True); or let all ranks leave the loop "
        "behind the shortest, for batch, _ in zip(loader, range(fewest)). A loop that goes on "
        "behind an error of one rank, except ...: continue, leaves out its step: let it end.",
    )  # fmt: skip


def forsaken(rank: int, call: str, line: str, seconds: float) -> RunError:
    last = called(call) or "none"
    return RunError(
        where=f"rank {rank}" + (f", {line}" if line else ""),
        what=f"it has waited for other ranks for {seconds:g} s; its last call was {last}",
        why="torch's store is gone: the launcher has ended, which else ends all ranks",
        do="Look at what the ranks printed before, and start the job again.",
    )


def is_in_transfer(frame: FrameType | None) -> bool:
    """Whether a thread is in a function of torch's that waits for other ranks."""
    if frame is not None and ".wait()" in _text_of(frame):
        return True
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith(_TRANSFERS):
            return True
        frame = frame.f_back
    return False


def _is_of_partc(frame: FrameType | None) -> bool:
    """Whether a thread is in a transfer that a line of partc has begun, and none of the script."""
    sends = is_in_transfer(frame)
    while sends and frame is not None and not _is_of_script(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_HERE):
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class Sight:
    """What another thread sees of a rank's own.

    ``spot``: stays as long as it stands at one place. ``line``: of the script. ``waits``: whether
    it is in a transfer of torch's, and ``sends``: one that partc has begun.
    """

    spot: int
    line: str
    waits: bool
    sends: bool

    @classmethod
    def of(cls, frame: FrameType | None) -> Sight:
        return cls(_spot_of(frame), script_line(frame), is_in_transfer(frame), _is_of_partc(frame))


def _spot_of(frame: FrameType | None) -> int:
    """A number that stays as long as a thread stands at one place."""
    at = 0
    while frame is not None:
        at = hash((at, id(frame), frame.f_lasti))
        frame = frame.f_back
    return at


def _text_of(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)


def _is_of_script(file: str) -> bool:
    return "site-packages" not in file and not file.startswith((_HERE, _PYTHON, "<"))


def script_line(frame: FrameType | None) -> str:
    """``train.py:31: dist.barrier()``, the innermost line of the script."""
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_of_script(file):
            text = linecache.getline(file, frame.f_lineno or 0).strip()
            return f"{Path(file).name}:{frame.f_lineno}" + (f" ({text})" if text else "")
        frame = frame.f_back
    return ""
