"""Switch Python's cyclic garbage collector off while a compile builds graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collecting() -> Iterator[None]:
    """A context in which the garbage collector does not look for cycles.

    Growing graphs trigger the collector again and again; each time the collector visits the objects
    of every loaded library, for about a tenth of a compile, and frees next to nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
