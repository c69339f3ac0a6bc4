"""Pipeline schedules: which stage computes what, in which order, on every pipeline rank.

One file per schedule makes the orders; ``timing`` says when everything runs, ``picture`` draws it,
``csv_form`` reads and writes a user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from partc.errors import PlanError
from partc.schedules import (
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from partc.schedules.actions import Action, Schedule, looped, v_shaped
from partc.schedules.blocks import Orders

__all__ = ["NAMES", "Action", "Needs", "Schedule", "make", "needs_of"]


@dataclass(frozen=True)
class Needs:
    """What a named schedule asks for.

    ``chunks`` are the stages per rank it takes, least and most (None: any number). ``split`` says
    whether it has backwards in two parts, ``I`` and ``W``.
    """

    orders: Callable[[int, int, int], Orders]  # (ranks, microbatches, chunks)
    chunks: tuple[int, int | None] = (1, 1)
    split: bool = False
    placement: Literal["looped", "v"] = "looped"

    @property
    def usual_chunks(self) -> int:
        """The stages per rank when nobody asks for a number."""
        return self.chunks[0]

    def rank_of(self, ranks: int, chunks: int) -> tuple[int, ...]:
        """The rank of every stage."""
        return v_shaped(ranks) if self.placement == "v" else looped(ranks, chunks)


NAMES: dict[str, Needs] = {
    "gpipe": Needs(gpipe.orders),
    "1f1b": Needs(one_f_one_b.orders),
    "interleaved-1f1b": Needs(interleaved.orders, chunks=(2, None)),
    "looped-bfs": Needs(looped_bfs.orders, chunks=(2, None)),
    "zb-h1": Needs(zb_h1.orders, split=True),
    "zb-h2": Needs(zb_h2.orders, split=True),
    "zb-v": Needs(zb_v.orders, chunks=(2, 2), split=True, placement="v"),
    "v-half": Needs(v_half.orders, chunks=(2, 2), split=True, placement="v"),
    "v-min": Needs(v_min.orders, chunks=(2, 2), split=True, placement="v"),
    "dualpipe-v": Needs(dualpipe_v.orders, chunks=(2, 2), split=True, placement="v"),
    "forward-only": Needs(forward_only.orders, chunks=(1, None)),
}


def needs_of(name: str) -> Needs:
    """What a named schedule asks for; PlanError if there is no such schedule."""
    if name not in NAMES:
        raise PlanError(
            where=f"schedule={name!r}", what="no such schedule", why="",
            do=f"Known are {', '.join(NAMES)}.",
        )  # fmt: skip
    return NAMES[name]


def make(name: str, *, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A named schedule for any number of ranks and microbatches from 1 on.

    ``chunks`` are the stages per rank; None takes the schedule's usual number. PlanError if there
    is no such schedule, or it does not take so many.
    """
    needs = needs_of(name)
    for count, what in ((ranks, "pipeline ranks"), (microbatches, "microbatches")):
        if count < 1:
            raise PlanError(
                where=f"schedule={name!r}", what=f"it cannot be made for {count} {what}", why="",
                do="Ask for at least 1.",
            )  # fmt: skip
    chunks = needs.usual_chunks if chunks is None else chunks
    least, most = needs.chunks
    if chunks < least or (most is not None and chunks > most):
        raise _wrong_chunks(name, needs, chunks)
    orders = tuple(needs.orders(ranks, microbatches, chunks))
    return Schedule(name, orders, needs.rank_of(ranks, chunks), microbatches)


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
