"""A finding of `partc doctor`: what was looked at, whether it is right, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, WRONG = "ok", "note", "wrong"  # a note is no fault, but worth to be known


@dataclass(frozen=True)
class Finding:
    """One line of the result: ``what`` was looked at, what was ``found``, and what to ``do``."""

    state: str
    what: str
    found: str
    do: str = ""


@dataclass(frozen=True)
class Findings:
    """The result: ``str`` is a table, ``as_json`` the same as data."""

    rows: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(row.state != WRONG for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        wide = max((len(row.what) for row in self.rows), default=0)
        lines = [
            f"{row.state:<5}  {row.what:<{wide}}  {row.found}{'. ' + row.do if row.do else ''}"
            for row in self.rows
        ]
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        wrong = sum(row.state == WRONG for row in self.rows)
        notes = sum(row.state == NOTE for row in self.rows)
        return f"{wrong or 'nothing'} wrong, {notes} to note, {len(self.rows)} looked at"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"ok": self.ok, "findings": [asdict(row) for row in self.rows]}


def merged(of_ranks: Sequence[Sequence[Finding]]) -> list[Finding]:
    """The findings of all ranks: one that several made stands once, with their numbers if not all
    made it.
    """
    makers: dict[Finding, list[int]] = {}
    for rank, found in enumerate(of_ranks):
        for row in found:
            makers.setdefault(row, []).append(rank)
    return [
        row if len(ranks) == len(of_ranks) else
        Finding(row.state, f"{row.what} ({named_ranks(ranks)})", row.found, row.do)
        for row, ranks in makers.items()
    ]  # fmt: skip


def named_ranks(ranks: Iterable[int]) -> str:
    """Numbers of ranks in words: ``rank 3``, ``ranks 0-3, 6``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    told = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(runs) > 1 or len(runs[0]) > 1)} {', '.join(told)}"
