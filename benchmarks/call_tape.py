"""A step's calls of torch.distributed, recorded once: to repeat them alone, or to leave them out.

A generated program says ``dist.all_reduce(...)`` and so on; each name is replaced while a step is
recorded or runs without its transfers. PyTorch's own wrappers call from C++ and are not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partc.measure.timed_calls import Function, replaced_calls, start_call

MESSAGES = ("irecv", "isend")


@dataclass
class Call:
    """One call; its first argument is where the result is put, or what is sent."""

    name: str
    arguments: tuple[Any, ...]  # tensors stand for the step's own, of the same shape
    keywords: dict[str, Any]
    result: Tensor | None = None

    @property
    def is_message(self) -> bool:
        return self.name in MESSAGES

    def start(self) -> dist.Work:
        """Call it again, with tensors of its own."""
        work: dist.Work = start_call(self.name, self.arguments, self.keywords)
        return work


@dataclass(frozen=True)
class Event:
    """A call begins, or what it moves is waited for, ``at_s`` of computing into the step."""

    call: int
    waits: bool
    at_s: float = 0.0


@dataclass
class Tape:
    """The calls of a step, and the order in which they begin and are waited for."""

    calls: list[Call] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def replay(self) -> float:
        """Repeat all transfers in the program's order with nothing between them; the seconds."""
        start = time.perf_counter()
        under_way: dict[int, dist.Work] = {}
        for event in self.events:
            if event.waits:
                under_way.pop(event.call).wait()
            else:
                under_way[event.call] = self.calls[event.call].start()
        return time.perf_counter() - start

    def replay_each(self) -> list[float]:
        """Repeat all transfers one by one; the seconds of each. Not for messages between ranks:
        one may begin only when another is under way.
        """
        return [_seconds(call) for call in self.calls]


@dataclass
class Handle:
    """What a replaced call returns: ``wait`` acts once."""

    act: Callable[[], None]
    waited: bool = False

    def wait(self) -> bool:
        if not self.waited:
            self.waited = True
            self.act()
        return True


def record(step: Callable[[], object]) -> Tape:
    """Run a step as it is and note its calls, with what each has brought."""
    tape = Tape()

    def replace(name: str, original: Function) -> Function:
        def noted(*arguments: Any, **keywords: Any) -> Handle | None:
            number = len(tape.calls)
            is_async = name in MESSAGES or keywords.get("async_op", False)
            tape.calls.append(_twin(name, arguments, keywords))
            tape.events.append(Event(number, waits=False))
            work = original(*arguments, **keywords)

            def wait() -> None:
                if is_async:
                    work.wait()
                tape.calls[number].result = arguments[0].clone()
                tape.events.append(Event(number, waits=True))

            return _handle(wait, is_async)

        return noted

    with replaced_calls(replace):
        step()
    return tape


def compute_alone(tape: Tape, step: Callable[[], object]) -> tuple[float, list[Event]]:
    """Run a step whose transfers take no time; its seconds, and its events by that clock.

    Results are those that were recorded, and the time it takes to put them in place does not
    count. Of a message between two ranks one element is sent, so that a rank of a pipeline still
    waits for what another has to compute first.
    """
    events: list[Event] = []
    number = -1
    start, aside_s = time.perf_counter(), 0.0

    def note(call: int, waits: bool) -> None:
        events.append(Event(call, waits, time.perf_counter() - start - aside_s))

    def replace(name: str, original: Function) -> Function:
        def at_once(*arguments: Any, **keywords: Any) -> Handle | None:
            nonlocal number
            number += 1
            this, call = number, tape.calls[number]
            note(this, waits=False)
            token = torch.zeros(1)
            work = original(token, *arguments[1:], **keywords) if call.is_message else None

            def wait() -> None:
                nonlocal aside_s
                if work is not None:
                    work.wait()
                begin = time.perf_counter()
                if name != "isend" and call.result is not None:
                    arguments[0].copy_(call.result)
                aside_s += time.perf_counter() - begin
                note(this, waits=True)

            return _handle(wait, call.is_message or keywords.get("async_op", False))

        return at_once

    with replaced_calls(replace):
        step()
    return time.perf_counter() - start - aside_s, events


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call.start().wait()
    return time.perf_counter() - start


def _handle(wait: Callable[[], None], is_async: bool) -> Handle | None:
    if is_async:
        return Handle(wait)
    wait()
    return None


def _twin(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
    """The same call on tensors of its own, to be started without waiting."""
    own = tuple(torch.zeros_like(a) if isinstance(a, Tensor) else a for a in arguments)
    return Call(name, own, keywords if name in MESSAGES else keywords | {"async_op": True})
