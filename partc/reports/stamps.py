"""What was found of a saved program, as sentences of its report: checked, verified, measured.

What nobody has done yet is told with the command that does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from partc.amounts import counted, time_text
from partc.errors import LoadError
from partc.program import Program
from partc.program.outcomes import NAME, read_outcomes

YES, NO, OPEN = "yes", "no", "open"  # of a stamp: it holds, it was refuted, nobody has looked
Json = dict[str, Any]


def stamps_of(program: Program) -> tuple[list[Json], Json | None]:
    """A sentence for each kind of finding, and what a bench measured, None if there was none.

    LoadError where the saved findings are malformed.
    """
    found = read_outcomes(program)
    folder = program.saved_in or "build"
    try:
        stamps = [*_stamps(found, folder)]
        return stamps, found.get("measured")
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise LoadError(
            where=f"{folder}/{NAME}", what="it has entries that are missing or malformed",
            why=repr(error), do="Delete it, and run partc verify and partc bench again.",
        ) from None  # fmt: skip


def _stamps(found: Json, folder: str) -> Iterator[Json]:
    """One stamp for each kind, in the order in which one would do them."""
    kinds = {"checked": _checked, "verified": _verified, "measured": _measured}
    commands = {
        "checked": f"partc check {folder}",
        "verified": f"partc verify {folder} --model ...",
        "measured": f"partc bench {folder}",
    }
    for kind, tell in kinds.items():
        state, text = tell(found[kind]) if kind in found else (OPEN, commands[kind])
        yield {"kind": kind, "state": state, "text": text}


def _checked(told: Json) -> tuple[str, str]:
    more = len(told["unchecked"])
    left = f"; {more} of it could not be checked" if more else ""
    return YES, f"the text of every rank, and that their transfers meet{left}"


def _verified(told: Json) -> tuple[str, str]:
    """``equal to the model to 1.2e-15: 46 tensors, the worst gradient w1``."""
    worst = told["worst"]
    error = "no number" if worst["error"] is None else f"{worst['error']:.1e}"
    of = f"{worst['kind']} {worst['name']}"
    if told["ok"]:
        return YES, f"equal to the model to {error} ({counted(told['tensors'], 'tensor')})"
    return NO, f"DIFFERENT from the model: {of} by {error}"


def _measured(told: Json) -> tuple[str, str]:
    step = told["figures"]["step"]
    measured, predicted = (
        time_text(float(f"{step[k]:.4g}")) for k in ("measured_s", "predicted_s")
    )
    on = f"{counted(told['ranks'], 'rank')} on {told['machine']}"
    return YES, f"{measured} a step, {predicted} predicted ({on}, {told['steps']} steps)"
