"""The registry of named schedules: a name, how its orders are made, what it asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from partc.registry import Registry
from partc.schedules.actions import looped, v_shaped
from partc.schedules.blocks import Orders

MakeOrders = Callable[[int, int, int], Orders]  # (ranks, microbatches, chunks)


@dataclass(frozen=True)
class Needs:
    """What a named schedule asks for.

    ``chunks`` are the stages per rank it takes, least and most (None: any number). ``split`` says
    whether it has backwards in two parts, ``I`` and ``W``.
    """

    orders: MakeOrders
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


NAMES: Registry[Needs] = Registry("schedule")


def schedule(name: str, **needs: Any) -> Callable[[MakeOrders], MakeOrders]:
    """A decorator that names the function below it as a schedule; ``needs`` are fields of Needs.

    ::

        @schedule("zb-v", chunks=(2, 2), split=True, placement="v")
        def orders(ranks: int, microbatches: int, chunks: int = 2) -> Orders: ...
    """

    def add(orders: MakeOrders) -> MakeOrders:
        NAMES.add(name, Needs(orders, **needs))
        return orders

    return add
