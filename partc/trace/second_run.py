"""Run a step a second time on fakes, and refuse it if it computes something else than the first.

A program computes the same in every step. A step that keeps something outside of parameters and
buffers, such as a hidden state, a counter or a cache, would not: the second run reads what the
first one left. What is written and never read makes no difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from partc.errors import PartcError, TraceError
from partc.graph.fake_calls import call_on_fakes, tensors_in
from partc.trace.contents import Call, Contents
from partc.trace.known_numbers import READS
from partc.trace.places import NUMBERS, Place, places
from partc.trace.python_random import Lines, states
from partc.trace.source_lines import source_here

Outcome = tuple[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor]]
Run = Callable[[TorchDispatchMode], Outcome]  # results, gradients, buffers behind the step


class Reads:
    """The number attributes that modules' code has read, as pairs of class and attribute."""

    def __init__(self) -> None:
        self.found: set[tuple[type, str]] = set()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Note every attribute of a module that is read."""
        found = self.found

        def noted(module: nn.Module, name: str) -> Any:
            found.add((type(module), name))
            return object.__getattribute__(module, name)

        nn.Module.__getattribute__ = noted  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__  # type: ignore[misc]


@dataclass
class History:
    """What a step leaves behind for the next one, looked at around its first and second run."""

    model: nn.Module
    objective: Callable[..., Any]
    contents: Contents = field(default_factory=Contents)
    reads: Reads = field(default_factory=Reads)
    left: list[str] = field(default_factory=list)  # names of what the first run has changed

    def __post_init__(self) -> None:
        self.random, self.begun = states(), self._numbers()

    def outcome(self, outcome: Outcome) -> Hashable:
        """What a run gave: equal for two runs that computed the same."""
        results, grads, buffers = outcome
        every = (*results, *grads, *buffers)
        return tuple(None if each is None else self.contents.described(each) for each in every)

    def check_second(self, first: Hashable, run: Run) -> None:
        """Run the step again; TraceError if it is not what the first run was."""
        random, known = states(), self._numbers()
        self.left = [place.name for place in self._written(self.contents.run)]
        self.left += [name for name, number in known.items() if self.begun.get(name) != number]
        again, lines = Again(self.contents), Lines()
        try:
            with self.reads.open(), lines.open() if random != self.random else nullcontext():
                second = self.outcome(run(again))
        except PartcError:
            raise
        except Exception as error:
            raise self._differs(again, f"{type(error).__name__}: {error}") from error
        if random not in (self.random, states()):
            raise _random(lines.found, random, self.random)
        if first != second:
            raise self._differs(again, "")
        self._check_numbers(known)

    def left_notes(self) -> list[str]:
        """Sentences on attributes and variables that the step sets, and a program does not."""
        names = (re.sub(r"\.\d+\.", ".*.", each.name) for each in self._written(self.contents.run))
        return [f"the step sets {name}; a program does not" for name in dict.fromkeys(names)]

    def _check_numbers(self, before: dict[str, Any]) -> None:
        for name, number in self._numbers().items():
            if before.get(name, number) != number:
                raise TraceError(
                    where=name,
                    what="it changes with every step",
                    why=f"{before[name]} behind one step, {number} behind the next",
                    do="A program runs no Python of the model: count in a buffer, or change it "
                    "outside of the step.",
                )

    def _numbers(self) -> dict[str, Any]:
        """Numbers and the lengths of lists by name."""
        found = {}
        for place in places(self.model, self.objective):
            if isinstance(place.value, NUMBERS):
                found[place.name] = repr(place.value)
            elif isinstance(place.value, list | dict | set):
                found[f"len({place.name})"] = repr(len(place.value))
        return found

    def _written(self, run: int) -> Iterator[Place]:
        """The places with a tensor that this run has computed from parameters or inputs."""
        for place in places(self.model, self.objective):
            if isinstance(place.value, FakeTensor) and self.contents.is_computed(place.value, run):
                yield place

    def _differs(self, again: Again, error: str) -> TraceError:
        why = ["this line reads what the step before has left"] if again.stale else []
        why += [f"a step sets {', '.join(self.left[:4])}"] if self.left else []
        why += [error] if error else []
        return TraceError(
            where=again.where or type(self.model).__name__,
            what="the second step computes something else than the first",
            why="; ".join(why) or "something outside of parameters and buffers has changed",
            do="Make what is kept a buffer (register_buffer in __init__), which programs carry "
            "from step to step, or give it as an input.",
        )


class Again(TorchDispatchMode):
    """Runs calls on fakes, and notes the first one that the first run had not."""

    def __init__(self, contents: Contents) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.contents, self.where, self.stale = contents, "", False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func in READS:
            asked = self.contents.question(func, args)
            if asked in self.contents.answers:
                return self.contents.answers[asked]
        call = self.contents.before(func, args, kwargs)
        self._note(call)
        result = call_on_fakes(func, args, kwargs)
        self.contents.behind(call, func, args, kwargs, result)
        return result

    def _note(self, call: Call) -> None:
        if not self.where and call.digest not in self.contents.calls:
            self.where, self.stale = source_here(), call.stale


def _random(line: str, now: dict[str, Any], before: dict[str, Any]) -> TraceError:
    name = next(name for name, state in now.items() if state != before.get(name))
    return TraceError(
        where=line or "the step",
        what=f"it draws from {name}",
        why="the number drawn while tracing would be that of every step",
        do="Draw with torch, or draw outside of the step and give the number as an input.",
    )
