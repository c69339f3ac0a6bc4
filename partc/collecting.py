"""Switch Python's cyclic garbage collector off while a compile builds graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ENTERED: list[tuple[int, ...]] = []  # the collector's counts, of each context that is open


@contextmanager
def no_collecting() -> Iterator[None]:
    """A context in which the garbage collector does not look for cycles.

    Growing graphs trigger the collector again and again; each time the collector visits the objects
    of every loaded library, for about a tenth of a compile, and frees next to nothing.
    """
    was_on = gc.isenabled()
    if was_on:
        gc.collect(0)  # so that the youngest objects are those made from here on
    gc.disable()
    _ENTERED.append(collections())
    try:
        yield
    finally:
        _ENTERED.pop()
        if was_on:
            gc.collect(0)  # what was dropped goes, before all that was made counts for a full look
            gc.enable()


def made_inside() -> list[Any]:
    """All objects made since the outermost ``no_collecting`` was entered, and maybe older ones."""
    return made_since(_ENTERED[0]) if _ENTERED else gc.get_objects()


def made_since(before: tuple[int, ...]) -> list[Any]:
    """All objects made since the collector had these counts, and older ones.

    As long as the collector has moved nothing on, all that is new is among the youngest.
    """
    now = collections()
    if now[1:] != before[1:]:
        return gc.get_objects()
    moved = gc.get_objects(1) if now != before else []
    return gc.get_objects(0) + moved


def collections() -> tuple[int, ...]:
    """How often the collector has looked at each generation of objects."""
    return tuple(each["collections"] for each in gc.get_stats())
