"""What becomes of one case, in a word, and the table of all cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from partc.errors import PartcError

GOOD = {
    "refused": "a PartcError, or an exit code with a sentence",
    "harmless": "accepted, with the same numbers",
    "as it says": "accepted; a file without a digest, or with a forged one, has other values, and "
    "just these were read",
}
BAD = {
    "wrong": "accepted, with other numbers",
    "raw": "any other exception, or control characters on the terminal",
    "wait": "not done in time",
    "lost": "a file that was there before is gone or changed",
    "left": "a process or a temporary file is still there",
    "ran": "code from the file was run",
}
WORST = ("ran", "lost", "wrong", "wait", "raw", "left")


class Verdict(NamedTuple):
    """A word of GOOD or BAD, and why."""

    word: str
    why: str = ""


class Found(NamedTuple):
    """The verdict of one numbered case, and what was damaged how."""

    number: int
    artefact: str
    damage: str
    verdict: Verdict


def told(read: Callable[[], Verdict | None]) -> Verdict:
    """The verdict of one reader: what it returns, or what it raises; None is harmless."""
    try:
        return read() or Verdict("harmless")
    except PartcError as error:
        text = str(error)
        if not text.isprintable() and any(not (c.isprintable() or c == "\n") for c in text):
            return Verdict("raw", f"control characters in {text!r}")
        return Verdict("refused", text)
    except SystemExit as error:  # of run.py, which says why on stderr
        return Verdict("refused" if error.code == 2 else "raw", f"exit code {error.code}")
    except BaseException as error:
        return Verdict("raw", f"{type(error).__name__}: {error} {_place(error)}")


def _place(error: BaseException) -> str:
    """The innermost line of a traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"


def joined(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of several readers of the same file: the worst, or else that one refuses."""
    each = list(verdicts)
    order = (*WORST, "refused", "as it says", "harmless")
    return min(each, key=lambda verdict: order.index(verdict.word))


def table(found: Iterable[Found]) -> str:
    """A row for each artefact with the count of each word, and one for all."""
    counts: dict[str, Counter[str]] = {}
    for each in found:
        counts.setdefault(each.artefact, Counter())[each.verdict.word] += 1
    words = [*GOOD, *BAD]
    width = max([len("artefact"), *map(len, counts)])
    whole = sum(counts.values(), Counter[str]())
    rows = [f"{'artefact':<{width}}  cases  {'  '.join(words)}"]
    for name, row in [*counts.items(), ("all", whole)]:
        cells = [f"{row[word] or '-':>{len(word)}}" for word in words]
        rows.append(f"{name:<{width}}  {row.total():>5}  {'  '.join(cells)}")
    return "\n".join(rows)
