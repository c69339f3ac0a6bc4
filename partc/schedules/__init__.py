"""Pipeline schedules: the order of forwards and backwards of microbatches on every pipeline rank.

In: the numbers of pipeline ranks, microbatches and stages; the seconds of each forward and
backward. Out: a `Schedule` (an order of actions per rank) and the start time of every action.
Start: `actions.py`, then `orders/gpipe.py`; `lower.py` adds sends and receives, and `simulate.py`
runs the result in simulated time. Never: a graph or torch.

`timing` gives the start and end of every action, `picture` draws them as a grid or an SVG, and
`csv_form` reads and writes a user's schedule as CSV.
"""

from __future__ import annotations

from partc.errors import PlanError
from partc.schedules import orders as _orders  # noqa: F401  (each file there registers its schedule)
from partc.schedules.actions import Action, Schedule
from partc.schedules.made_rows import Call
from partc.schedules.named import NAMES, Needs, is_known, what_to_do
from partc.wrong_calls import quoted

__all__ = ["NAMES", "Action", "Needs", "Schedule", "make", "needs_of"]


def needs_of(name: str) -> Needs:
    """The requirements of a named schedule, such as its stages per rank; PlanError if unknown."""
    if not is_known(name):
        raise PlanError(
            where=f"schedule={name!r}", what="no such schedule",
            why=f"there are {', '.join(NAMES)}",
            do=what_to_do(name, [*NAMES], "Take one of these."),
        )  # fmt: skip
    return NAMES[name]


def make(name: str, *, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Make a named schedule for at least one rank and at least one microbatch.

    ``chunks`` is the number of stages per rank (Megatron's virtual stages); None takes the
    schedule's usual number. PlanError if the schedule is unknown or cannot take that number, or if
    what the function of a user gives is no schedule that finishes.
    """
    needs = needs_of(name)
    for count, what in ((ranks, "pipeline ranks"), (microbatches, "microbatches")):
        if not isinstance(count, int) or count < 1:
            raise PlanError(
                where=f"schedule={name!r}", what=f"it cannot be made for {quoted(count)} {what}",
                why="it is a whole number", do="Ask for at least 1.",
            )  # fmt: skip
    chunks = needs.usual_chunks if chunks is None else chunks
    least, most = needs.chunks
    if chunks < least or (most is not None and chunks > most):
        raise _wrong_chunks(name, needs, chunks)
    return Call(name, needs, ranks, microbatches, chunks).schedule()


def _wrong_chunks(name: str, needs: Needs, chunks: int) -> PlanError:
    least, most = needs.chunks
    takes = f"exactly {least}" if most == least else f"at least {least}"
    others = [
        other for other, its in NAMES.items()
        if its.chunks[0] <= chunks and (its.chunks[1] is None or chunks <= its.chunks[1])
    ]  # fmt: skip
    instead = f", or a schedule that takes {chunks}: {', '.join(others)}" if others else ""
    return PlanError(
        where=f"schedule={name!r}",
        what=f"it does not take {chunks} stages per pipeline rank",
        why=f"it takes {takes}",
        do=f"Ask for {least}{instead}.",
    )
