"""Let Ctrl-C and a request to end wait until a short piece of work is done."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WAITING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def not_interrupted() -> Iterator[None]:
    """Inside, signals that would end the process are kept; they take effect at the end.

    Python handles signals in its main thread alone: in others nothing is to be done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {each: signal.getsignal(each) for each in WAITING}
    before = {each: handler for each, handler in before.items() if handler is not None}
    for each in before:
        signal.signal(each, keep)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came:
            os.kill(os.getpid(), number)
