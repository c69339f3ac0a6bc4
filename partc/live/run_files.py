"""Read what a run writes: lines of JSON per rank, checkpoints, and the program that it runs.

Nothing is locked and nothing is written, so that a run may go on meanwhile: a line that is written
half counts as none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partc.errors import UsageError

LINES, MANIFEST, CHECKPOINT = "*.jsonl", "program.json", "checkpoint.json"
STEP_S, DATA_S = "time_metrics/end_to_end(s)", "time_metrics/data_loading(s)"
WAITS_S = "time_metrics/waiting(s)"  # what `partc.measure.step_waits` measures
LOSSES = ("loss_metrics/global_avg_loss", "loss", "train_loss")
MEMORY = ("memory/max_reserved(GiB)", "memory/max_active(GiB)")
LONG = 60  # characters of a line that a message quotes
DEEP = 4  # folders below that of the run in which a program is looked for
_RANK = re.compile(r"(\d+)\D*\Z")
_SAVED = re.compile(r"step-(\d+)\Z")
Numbers = Mapping[str, float]


class NotBegun(UsageError):
    """A run has written no line yet, or is elsewhere."""


@dataclass(frozen=True)
class RankLog:
    """The lines of one file: numbers by step, as they hold in the end.

    ``restarts``: the steps from which the run went on again; ``unread``: lines that are no JSON
    with a step, and ``first_unread`` the number of the first.
    """

    rank: int
    file: Path
    steps: Mapping[int, Numbers]
    restarts: tuple[int, ...]
    unread: int
    written_at: float
    first_unread: int = 0

    def last(self, name: str, count: int = 1) -> list[float]:
        """The last numbers of a name, oldest first; fewer where there are fewer."""
        found = [each[name] for _, each in sorted(self.steps.items()) if name in each]
        return found[-count:]


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint: its step, its bytes on disk, and when it was written."""

    step: int
    num_bytes: int
    written_at: float


@dataclass(frozen=True)
class Promise:
    """What was predicted of the program that runs; ``sent_bytes``: of a rank in a step, None where
    the cost has no such sum.
    """

    folder: Path
    mesh: str
    step_s: float
    exposed_s: float
    peak_bytes: int
    sent_bytes: int | None
    trains: bool  # whether the step has a backward; an evaluation's has none


@dataclass(frozen=True)
class Run:
    """All that is read of a run's folder."""

    folder: Path
    ranks: tuple[RankLog, ...]
    checkpoints: tuple[SavedStep, ...]
    promise: Promise | None

    @property
    def step(self) -> int:
        """The last step that any rank has told of."""
        return max((max(each.steps, default=0) for each in self.ranks), default=0)

    @property
    def written_at(self) -> float:
        return max((each.written_at for each in self.ranks), default=0.0)

    @property
    def leader(self) -> RankLog:
        """The log with a loss, or the first."""
        return next(
            (each for each in self.ranks if any(each.last(n) for n in LOSSES)), self.ranks[0]
        )


def read_run(folder: str | Path, program: str | Path | None = None) -> Run:
    """Read a run's folder.

    Args:
        folder: of the run, or one of its files of JSON lines.
        program: the folder of the program that runs; None: the newest in or below the run's.

    Raises:
        UsageError: there is no such folder, or no line of JSON in it.
    """
    path = Path(folder)
    files = [path] if path.is_file() else [*_files(path)]
    logs = sorted((_log(each) for each in files), key=lambda each: (each.rank, str(each.file)))
    logs = [each for each in logs if each.steps]
    if not logs:
        begun = any(each.stat().st_size for each in files)
        raise (UsageError if begun else NotBegun)(
            where=str(folder), what="there is no run to watch", why=_without_steps(path, files),
            do="Name the folder in which JsonLines(...) writes, as examples/train.py does; on a "
            "terminal `partc watch` waits for the first line of a run.",
        )  # fmt: skip
    place = path.parent if path.is_file() else path
    return Run(place, tuple(logs), tuple(_checkpoints(place)), _promise(place, program))


def _without_steps(path: Path, files: Sequence[Path]) -> str:
    """Why no file has a step: there is none, or the first line of it that tells none."""
    if not path.exists():
        return "it does not exist"
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                return f'{file.name}:{number} is no line {{"step": 10, ...}}: {line.strip()[:LONG]}'
    return "it is empty" if path.is_file() else "no file *.jsonl with steps is in it"


def _files(folder: Path) -> Iterator[Path]:
    """The files of JSON lines in a folder and in those directly below it."""
    yield from sorted(folder.glob(LINES))
    yield from sorted(folder.glob(f"*/{LINES}"))


def _log(file: Path) -> RankLog:
    steps: dict[int, dict[str, float]] = {}
    restarts, unread, before = [], list[int](), 0
    text = file.read_text(encoding="utf-8", errors="replace")
    for at, line in enumerate(text.splitlines(), 1):
        told = _line(line)
        if told is None:
            unread += [at] if line.strip() else []
            continue
        step = told[0]
        if step <= before:  # what came after the checkpoint that it went on from does not hold
            restarts.append(step - 1)
            steps = {number: each for number, each in steps.items() if number < step}
        steps.setdefault(step, {}).update(told[1])
        before = step
    rank = _RANK.search(file.stem)
    number = int(rank[1]) if rank else 0
    return RankLog(
        number, file, steps, tuple(restarts), len(unread), file.stat().st_mtime, *unread[:1]
    )


def _line(text: str) -> tuple[int, dict[str, float]] | None:
    """The step of a line and its numbers; None for what is no such line."""
    with suppress(ValueError, RecursionError):
        told = json.loads(text)
        if isinstance(told, dict) and type(step := told.pop("step", None)) is int and step >= 0:
            numbers = {n: float(x) for n, x in told.items() if type(x) in (int, float)}
            return step, numbers
    return None


def _checkpoints(folder: Path) -> Iterator[SavedStep]:
    for path in sorted(folder.glob("step-*")):
        found = _SAVED.match(path.name)
        if found and (path / CHECKPOINT).is_file():
            with suppress(OSError):  # a step may be deleted meanwhile
                size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
                yield SavedStep(int(found[1]), size, (path / CHECKPOINT).stat().st_mtime)


def _promise(folder: Path, program: str | Path | None) -> Promise | None:
    """What was predicted; UsageError where a named program cannot be read."""
    if program is not None:
        return _read_promise(Path(program))
    found: list[Path] = []
    for depth in range(DEEP):
        found += folder.glob("/".join(["*"] * depth + [MANIFEST]))
    read: list[Promise] = []
    for each in sorted(found, key=lambda path: -path.stat().st_mtime):
        with suppress(UsageError):
            read.append(_read_promise(each.parent))
    return next((each for each in read if each.trains), read[0] if read else None)


def _read_promise(folder: Path) -> Promise:
    try:
        fields = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        cost, step = fields["cost"]["data"], fields["cost"]["data"]["prediction"]
        peaks = [each["peak_bytes"] for each in cost.get("ranks", [cost])]
        mesh = " ".join(f"{name}={size}" for name, size in fields["mesh"])
        return Promise(
            folder, mesh, float(step["seconds"]),
            sum(float(each["exposed_s"]) for each in step["axes"]), max(map(int, peaks)),
            _sent(cost), any(each["name"] == "backward" for each in step["phases"]),
        )  # fmt: skip
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            where=str(folder), what="it has no prediction of a step",
            why=f"{type(error).__name__} in {MANIFEST}",
            do="Name the folder that program.save() wrote.",
        ) from None  # fmt: skip


def _sent(cost: Mapping[str, Any]) -> int | None:
    if "traffic" not in cost:  # of a pipeline: messages depend on the rank
        return None
    return sum(int(each["sent_bytes"]) for each in cost["traffic"])
