"""The log of a server: what each update is made of, and the proof that none breaks a promise."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from partc.errors import CheckError


@dataclass(frozen=True)
class Update:
    """One update of the parameters.

    ``version``: how many updates there were before. ``read``: by worker the version of the
    parameters with which it computed its gradient. ``given``: to how many workers this server has
    sent the parameters of the version; a replica sends none.
    """

    version: int
    read: dict[int, int]
    given: int = 0

    @property
    def late(self) -> int:
        """How many versions late the latest gradient of the update is."""
        return max((self.version - read for read in self.read.values()), default=0)


def read_log(file: str | Path) -> list[Update]:
    """The updates that a server has written into its ``log_file``."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    entries = map(json.loads, lines)
    return [
        Update(entry["version"], {int(k): v for k, v in entry["read"].items()}, entry["given"])
        for entry in entries
    ]


def line_of(update: Update) -> str:
    """An update as a line of a log file."""
    return json.dumps(asdict(update)) + "\n"


def check_log(
    log: Iterable[Update], max_steps_late: int, acknowledged: Iterable[tuple[int, int]] = ()
) -> int:
    """How many versions late a gradient was at most; CheckError if it breaks a promise.

    Args:
        log: of the server that is left in the end.
        max_steps_late: the bound.
        acknowledged: worker and step of every push that workers were told is safe.
    """
    every = list(log)
    for number, update in enumerate(every):
        if update.version != every[0].version + number:
            raise _broken(
                f"version {update.version} follows {every[number - 1].version}",
                "each update is one of the parameters behind the one before",
            )  # fmt: skip
        if update.late > max_steps_late:
            raise _broken(
                f"the update of version {update.version} has a gradient {update.late} versions "
                "late", f"the bound is {max_steps_late}",
            )  # fmt: skip
    taken = {(worker, update.version) for update in every for worker in update.read}
    lost = sorted({*acknowledged} - taken)
    if lost:
        raise _broken(
            f"the push of worker {lost[0][0]} for step {lost[0][1]} is in no update",
            "it was acknowledged",
        )  # fmt: skip
    return max((update.late for update in every), default=0)


def _broken(what: str, why: str) -> CheckError:
    return CheckError(
        where="log of a server", what=what, why=why,
        do="Keep the log, and report it: training does not go on from these parameters.",
    )  # fmt: skip
