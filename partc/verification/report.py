"""The result of a verification: the error of each tensor that was compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

from partc.errors import CheckError, UsageError
from partc.verification.lossy import SentError, told
from partc.wrong_calls import frozen, known_arguments, quoted

ROUNDING = 1e-4  # in float32 errors below it may be those of another order of sums
TOLERANCE = 1e-9  # for float64; one matmul with a sharded sum has an error of 2e-15


@dataclass(frozen=True, order=True)
class Row:
    """The worst error of one tensor over all ranks."""

    error: float
    kind: str
    name: str
    rank: int
    noise: bool = False  # rounding noise: divided by the largest value of its kind

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.error:.1e} on rank {self.rank}"

    def as_json(self) -> dict[str, Any]:
        """The fields as plain data; an infinite error becomes null, as JSON has no infinity."""
        return {**vars(self), "error": self.error if isfinite(self.error) else None}


class Verdict(partial[bool]):
    """A call that gives a verdict, and is as true as it: ``assert report.ok`` would hold of any
    report else.
    """

    def __bool__(self) -> bool:
        return self()


@frozen
@dataclass(frozen=True)
class Verification:
    """The result of a verification: one row per compared tensor; the title says how they ran.

    ``suspects``: passes and rules of others, of which one may be at fault where tensors differ.
    ``mode``: that of the program, ``"train"`` or ``"eval"``, if the model is in the other one.
    ``sent``: how far gradients that are sent in fewer bytes are from exact ones, where asked for.
    ``without_number``: the first input or weight that has NaN or infinite numbers.
    """

    title: str
    rows: tuple[Row, ...]
    suspects: str = ""
    mode: str = ""
    sent: tuple[SentError, ...] = ()
    without_number: str = ""

    @property
    def worst(self) -> Row:
        return max(self.rows)

    @property
    def ok(self) -> Verdict:
        """``ok(tolerance=1e-9)``: whether something was compared, every relative error is at most
        the tolerance, and those of gradients that are sent in fewer bytes at most their bounds.

        UsageError if the tolerance is no number from 0.
        """
        return Verdict(ok, self)

    def __bool__(self) -> bool:
        """The verdict of ``ok()``, for ``assert partc.verify(...)``."""
        return self.ok()

    @known_arguments
    def check(self, tolerance: float = TOLERANCE) -> Verification:
        """Return this report; CheckError with the worst tensors if it is not ``ok``."""
        if self.ok(tolerance):
            return self
        if beyond := [each for each in self.sent if not each.holds]:
            raise self._beyond(beyond)
        wrong = sorted((row for row in self.rows if not row.error <= tolerance), reverse=True)
        least = min((row.error for row in wrong), default=0.0)
        if not isfinite(least) and self.without_number:
            raise self._of_no_number(len(wrong))
        last = f"look at what is yours. {self.suspects}" if self.suspects else (
            "report it with the plan."
        )  # fmt: skip
        if "float64" not in self.title and wrong and wrong[0].error < ROUNDING:
            last = f"rounding may be all: check(tolerance={10 * wrong[0].error:.0e})."
        begin = f"Bring the model into {self.mode} mode, as the program is. " if self.mode else ""
        hint = "" if isfinite(least) else " No number of them is finite: are weights and batch?"
        raise CheckError(
            where=self.title,
            what=f"{len(wrong)} tensors differ from the model's",
            why=f"the tolerance is {tolerance:.1e}",
            do=f"{begin}Verify with the model, the batch and the loss that were compiled; if these "
            f"are the same, {last}{hint} These differ most:\n"
            + "\n".join(f"  {row}" for row in wrong[:10]),
        )

    def _of_no_number(self, num: int) -> CheckError:
        """What follows from NaN cannot be compared: it equals nothing, itself neither."""
        return CheckError(
            where=self.title, what=self.without_number,
            why=f"{num} tensors that follow from it are no numbers, with the model alone too",
            do=f"Give {self.without_number.rpartition(' has ')[0]} finite numbers.",
        )  # fmt: skip

    def _beyond(self, beyond: Sequence[SentError]) -> CheckError:
        first = beyond[0]
        return CheckError(
            where=f"{self.title}, {first.name}",
            what=f"what arrives is {first.error:.2%} from the exact one",
            why=f"its scheme promises {first.bound:.2%} at most",
            do="Numbers beyond what the wire can hold (65504 in fp16) do that: take another wire; "
            "if there are none, report it with the plan.",
        )  # fmt: skip

    def kinds(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.kind, []).append(row)
        return found

    def __str__(self) -> str:
        lines = [self.title, f"{'':<22}{'tensors':>8}  {'worst error':>11}  of"]
        for kind, rows in self.kinds().items():
            worst = max(rows)
            lines.append(
                f"{kind:<22}{len(rows):>8}  {worst.error:>11.1e}  {worst.name} (rank {worst.rank})"
            )
        noise = sorted({row.name for row in self.rows if row.noise})
        if noise:
            more = f" and {len(noise) - 4} more" if len(noise) > 4 else ""
            names = ", ".join(noise[:4]) + more
            lines.append(f"zero but for rounding, measured against the largest: {names}")
        lines += told(self.sent) if self.sent else []
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "worst": self.worst.as_json(),
            "rows": [row.as_json() for row in self.rows],
            "sent": [each.as_json() for each in self.sent],
        }

    def outcome(self, tolerance: float = TOLERANCE) -> dict[str, Any]:
        """What a program's report shows of this: the verdict, and the worst error."""
        return {
            "ok": self.ok(tolerance), "tolerance": tolerance, "title": self.title,
            "tensors": len(self.rows), "worst": self.worst.as_json() if self.rows else None,
        }  # fmt: skip


@known_arguments
def ok(self: Verification, tolerance: float = TOLERANCE) -> bool:
    """What ``Verification.ok`` asks."""
    if not isinstance(tolerance, int | float) or not tolerance >= 0:
        raise UsageError(
            where="tolerance", what=f"{quoted(tolerance)} is no such number",
            why="relative errors are compared with it", do="Give a number from 0, as 1e-9.",
        )  # fmt: skip
    is_kept = all(each.holds for each in self.sent)
    return bool(self.rows) and self.worst.error <= tolerance and is_kept


def held_nowhere(trained: Iterable[str], rows: Sequence[Row]) -> Iterator[Row]:
    """Rows with infinite error for trained parameters that no rank has, as of a lost stage."""
    compared = {row.name for row in rows if row.kind == "gradient"}
    for name in trained:
        if name not in compared:
            yield Row(float("inf"), "gradient", name, 0)


def merged(found: Sequence[Sequence[Row]]) -> tuple[Row, ...]:
    """The worst row of each tensor over all ranks, in the order of comparison."""
    worst: dict[tuple[str, str], Row] = {}
    for row in (row for rows in found for row in rows):
        key = row.kind, row.name
        worst[key] = max(worst.get(key, row), row, key=lambda r: r.error)
    return tuple(worst.values())


Report = Verification  # its name before there was a report of a program
