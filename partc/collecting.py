"""Python's garbage collector, put off while graphs grow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collecting() -> Iterator[None]:
    """While this lasts, the collector does not look for cycles: it would go through the objects of
    every library again and again, for about a tenth of a compile, and find next to nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
