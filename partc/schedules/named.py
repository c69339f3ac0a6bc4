"""The registry of named schedules, such as ``1f1b``: how orders are made, stages per rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from partc.errors import UsageError
from partc.registry import Registry
from partc.schedules.actions import looped, v_shaped
from partc.schedules.blocks import Orders
from partc.wrong_calls import quoted

MakeOrders = Callable[[int, int, int], Orders]  # (ranks, microbatches, chunks)


@dataclass(frozen=True)
class Needs:
    """What a named schedule needs: its function, stages per rank, split backwards, placement.

    ``orders`` makes the orders of all ranks. ``chunks`` has the least and the most stages per rank
    (most None: any number). ``split`` says whether backwards are split into ``I`` and ``W``.
    ``placement`` says which rank runs a stage: ``looped`` or ``v`` (see `actions.py`).
    """

    orders: MakeOrders
    chunks: tuple[int, int | None] = (1, 1)
    split: bool = False
    placement: Literal["looped", "v"] = "looped"

    @property
    def usual_chunks(self) -> int:
        """The stages per rank if the user gives no number."""
        return self.chunks[0]

    def rank_of(self, ranks: int, chunks: int) -> tuple[int, ...]:
        """The rank of every stage."""
        return v_shaped(ranks) if self.placement == "v" else looped(ranks, chunks)


NAMES: Registry[Needs] = Registry("schedule")


def schedule(name: str, **needs: Any) -> Callable[[MakeOrders], MakeOrders]:
    """A decorator that registers a function as a named schedule; ``needs`` are fields of Needs.

    ::

        @schedule("zb-v", chunks=(2, 2), split=True, placement="v")
        def orders(ranks: int, microbatches: int, chunks: int = 2) -> Orders: ...
    """

    if not isinstance(name, str) or not name:
        raise UsageError(
            where="@schedule", what=f"the name is {quoted(name)}", why="it is a text",
            do='Write @schedule("my-schedule") above the function.',
        )  # fmt: skip

    def add(orders: MakeOrders) -> MakeOrders:
        NAMES.add(name, Needs(orders, **needs))
        return orders

    return add
