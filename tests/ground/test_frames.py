"""A look at another thread keeps nothing of it alive."""

from __future__ import annotations

import threading
import weakref
from types import FrameType

from partc.frames import none_held, seen


class Thing:
    pass


def test_what_a_function_had_is_gone_where_no_frame_is_held() -> None:
    """As a trace that ends while another thread looks at the one that traces."""
    over, looks = threading.Event(), [0]

    def walk(frame: FrameType | None) -> None:
        looks[0] += 1
        while frame is not None:
            frame = frame.f_back

    def look(of: int) -> None:
        while not over.is_set():
            seen(of, walk)

    looker = threading.Thread(target=look, args=(threading.get_ident(),))
    looker.start()
    left = 0
    for _ in range(2000):
        made = step()
        with none_held():
            left += made() is not None
    over.set()
    looker.join()
    assert looks[0]
    assert not left


def step() -> weakref.ref[Thing]:
    thing = Thing()
    return weakref.ref(thing)
