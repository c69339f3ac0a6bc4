"""Pipeline schedules: the order of forwards and backwards of microbatches on every pipeline rank.

In: the numbers of pipeline ranks, microbatches and stages; the seconds of each forward and
backward. Out: a `Schedule` (an order of actions per rank) and the start time of every action.
Start: `actions.py`, then `orders/gpipe.py`; `lower.py` adds sends and receives, and `simulate.py`
runs the result in simulated time. Never: a graph or torch.

`timing` gives the start and end of every action, `picture` draws them as a grid or an SVG, and
`csv_form` reads and writes a user's schedule as CSV.
"""

from __future__ import annotations

from partc.errors import PartcError, PlanError
from partc.schedules import orders as _orders  # noqa: F401  (each file there registers its schedule)
from partc.schedules.actions import Action, Schedule
from partc.schedules.named import NAMES, Needs
from partc.wrong_calls import failed_at, quoted

__all__ = ["NAMES", "Action", "Needs", "Schedule", "make", "needs_of"]


def needs_of(name: str) -> Needs:
    """The requirements of a named schedule, such as its stages per rank; PlanError if unknown."""
    if name not in NAMES:
        raise PlanError(
            where=f"schedule={name!r}", what="no such schedule", why="",
            do=f"Known are {', '.join(NAMES)}.",
        )  # fmt: skip
    return NAMES[name]


def make(name: str, *, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Make a named schedule for at least one rank and at least one microbatch.

    ``chunks`` is the number of stages per rank (Megatron's virtual stages); None takes the
    schedule's usual number. PlanError if the schedule is unknown or cannot take that number.
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
    orders = _orders_of(name, needs, ranks, microbatches, chunks)
    return Schedule(name, orders, needs.rank_of(ranks, chunks), microbatches)


def _orders_of(
    name: str, needs: Needs, ranks: int, microbatches: int, chunks: int
) -> tuple[tuple[Action, ...], ...]:
    """What a schedule's function gives; PlanError names the function that fails, or what is no
    action in it.
    """
    at = f"schedule={name!r}, {needs.orders.__module__}.{needs.orders.__qualname__}"
    try:
        rows = tuple(map(tuple, needs.orders(ranks, microbatches, chunks)))
    except PartcError:
        raise
    except Exception as error:
        raise PlanError(
            where=at, what=f"the function failed: {failed_at(error, needs.orders)}",
            why=f"it was called as orders({ranks}, {microbatches}, {chunks}): the ranks, the "
            "microbatches and the stages on each rank",
            do="Mend it: it gives a row of actions for each rank.",
        ) from error  # fmt: skip
    wrong = [one for row in rows for one in row if not _is_action(one)]
    if wrong:
        raise PlanError(
            where=at, what=f"{_shown(wrong[0])} is no action",
            why="a row has partc.schedules.actions.Action of stage, kind and microbatch",
            do='Write Action(0, "F", 2), or Action.parse("0F2").',
        )  # fmt: skip
    return rows


def _shown(given: object) -> str:
    return f"{given}" if isinstance(given, Action) else quoted(given)


def _is_action(given: object) -> bool:
    return isinstance(given, Action) and given.kind in ("F", "B", "I", "W")


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
