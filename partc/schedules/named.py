"""The registry of named schedules, such as ``1f1b``: how orders are made, stages per rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from partc.errors import UsageError
from partc.installed import load_installed
from partc.registry import Registry, is_again
from partc.schedules.actions import looped, v_shaped
from partc.schedules.blocks import Orders
from partc.schedules.options import check_name, checked_options
from partc.wrong_calls import did_you_mean, known_arguments, quoted

MakeOrders = Callable[[int, int, int], Orders]  # (ranks, microbatches, chunks)
GROUP = "partc.schedules"  # the entry points of packages with schedules


@dataclass(frozen=True)
class Needs:
    """What a named schedule needs: its function, stages per rank, split backwards, placement.

    ``orders`` makes the orders of all ranks. ``chunks`` has the least and the most stages per rank
    (most None: any number). ``split`` says whether backwards may be split into ``I`` and ``W``;
    rows that have these are refused without it. ``placement`` says which rank runs a stage:
    ``looped`` or ``v`` (see `actions.py`).
    """

    orders: MakeOrders
    chunks: tuple[int, int | None] = (1, 1)
    split: bool = False
    placement: Literal["looped", "v"] = "looped"

    @property
    def usual_chunks(self) -> int:
        """The stages per rank if the user gives no number."""
        return self.chunks[0]

    @property
    def of_partc(self) -> bool:
        """Whether every process with partc has the schedule."""
        return self.orders.__module__.partition(".")[0] == "partc"

    @property
    def function(self) -> str:
        """The schedule's function, as messages name it."""
        return f"{self.orders.__module__}.{self.orders.__qualname__}"

    def rank_of(self, ranks: int, chunks: int) -> tuple[int, ...]:
        """The rank of every stage."""
        return v_shaped(ranks) if self.placement == "v" else looped(ranks, chunks)


NAMES: Registry[Needs] = Registry("schedule")


@known_arguments
def schedule(name: str, **options: Any) -> Callable[[MakeOrders], MakeOrders]:
    """A decorator that registers a function as a named schedule.

    ``options`` are fields of Needs: ``chunks``, ``split``, ``placement``. ::

        @schedule("zb-v", chunks=(2, 2), split=True, placement="v")
        def orders(ranks: int, microbatches: int, chunks: int = 2) -> Orders: ...
    """

    check_name(name)
    said = checked_options(name, options)

    def add(orders: MakeOrders) -> MakeOrders:
        if not callable(orders) or not hasattr(orders, "__qualname__"):
            raise UsageError(
                where=f"@schedule({name!r})", what=f"the schedule is {quoted(orders)}",
                why="a schedule is a function, known by its module and name",
                do=f"Write a def, and @schedule({name!r}) above it.",
            )  # fmt: skip
        is_new = name not in NAMES or not is_again(orders, NAMES[name].orders)
        (NAMES.add if is_new else NAMES.replace)(name, Needs(orders, **said))
        return orders

    return add


def is_known(name: str) -> bool:
    """Whether there is a schedule of a name, here or in a package that is installed.

    Packages are imported where nothing else has the name: who does not ask for their schedules is
    served without them.
    """
    if name not in NAMES:
        load_installed(GROUP, "schedule")
    return name in NAMES


def is_of_partc(name: str) -> bool:
    """Whether a name is that of a schedule which comes with partc."""
    return name in NAMES and NAMES[name].of_partc


def what_to_do(name: str, known: list[str], otherwise: str) -> str:
    """What somebody does who names a schedule that there is not; ``otherwise`` if none is alike."""
    return (
        f"{did_you_mean(name, known) or otherwise} If it is yours, import the module whose "
        f"@schedule({quoted(name)}) makes it, or have its package name it as an entry point of "
        f"{GROUP}."
    )
