"""Run a step a second time on fakes, and refuse it if it computes something else than the first.

A program computes the same in every step. A step that keeps something outside of parameters and
buffers, such as a hidden state, a counter or a cache, would not: the second run reads what the
first one left. What is written and never read makes no difference.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_autocast_cache
from torch.utils._python_dispatch import TorchDispatchMode

from partc.errors import PartcError, TraceError
from partc.graph.fake_calls import as_torch_has_it
from partc.trace.contents import Call, Contents
from partc.trace.frozen_numbers import FrozenNumbers
from partc.trace.known_values import UnknownValueError, computed, needs_values
from partc.trace.places import LENGTH, Reach, State
from partc.trace.process_state import process_states
from partc.trace.python_random import Lines, generators
from partc.trace.ran import Ran
from partc.trace.reachable import Place, Reads
from partc.trace.source_lines import source_here
from partc.trace.states import NUMBERS
from partc.trace.watched_calls import WatchedCalls

Outcome = tuple[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor]]
_COUNTED = "count in a buffer, or change it outside of the step."
_COLLECTED = (
    "clear it where the step begins, and return what it collects beside the loss, (loss, extras); "
    "or remove the hook or the line that adds to it."
)
Run = Callable[[TorchDispatchMode], Outcome]  # results, gradients, buffers behind the step


class WatchedReads:
    """The attributes that a step has read of modules and of objects of the user's classes."""

    def __init__(self) -> None:
        self.found: Reads = set()
        self.watched: frozenset[type] = frozenset()

    @contextmanager
    def open(self, classes: Iterable[type]) -> Iterator[None]:
        """Note every attribute that is read of a module or of an object of these classes."""
        with ExitStack() as stack:
            stack.enter_context(_noting(nn.Module, self.found))
            for kind in classes:
                with suppress(TypeError, AttributeError):  # of a class that lets none be set
                    stack.enter_context(_noting(kind, self.found))
                    self.watched |= {kind}
                if kind is SimpleNamespace:
                    stack.enter_context(_noting_made_up(self.found))
            yield


@contextmanager
def _noting(kind: type, found: Reads) -> Iterator[None]:
    """Add class and name of every attribute that is read of a class's objects."""
    before = vars(kind).get("__getattribute__")
    read: Any = kind.__getattribute__

    def noted(owner: Any, name: str) -> Any:
        found.add((type(owner), name))
        return read(owner, name)

    type.__setattr__(kind, "__getattribute__", noted)
    try:
        yield
    finally:
        if before is None:
            type.__delattr__(kind, "__getattribute__")
        else:
            type.__setattr__(kind, "__getattribute__", before)


@contextmanager
def _noting_made_up(found: Reads) -> Iterator[None]:
    """Add what ``getattr(x, name)`` and ``vars(x)`` read of a ``SimpleNamespace``, whose class lets
    nothing be set; other reads of it stand in the code.
    """

    def noted(owner: Any, name: str, *default: Any) -> Any:
        if type(owner) is SimpleNamespace:
            found.add((SimpleNamespace, name))
        return getattr(owner, name, *default)

    def all_of(*owner: Any) -> Any:
        if owner and type(owner[0]) is SimpleNamespace:
            found.add((SimpleNamespace, "__dict__"))
        return vars(*owner) if owner else sys._getframe(1).f_locals

    getattr, vars = builtins.getattr, builtins.vars
    with patch.object(builtins, "getattr", noted), patch.object(builtins, "vars", all_of):
        yield


@dataclass
class History:
    """What a step leaves behind for the next one, looked at around its first and second run."""

    model: nn.Module
    objective: Callable[..., Any]
    begun: Reach  # before the first run
    contents: Contents = field(default_factory=Contents)
    reads: WatchedReads = field(default_factory=WatchedReads)
    ran: Ran = field(default_factory=dict)  # in the first run
    states: dict[str, State] = field(default_factory=dict)  # behind the first run
    random: dict[str, Any] = field(default_factory=generators)
    changed: list[str] = field(default_factory=list)  # by the first run: names
    left: list[str] = field(default_factory=list)  # tensors that the second run leaves: names

    def outcome(self, outcome: Outcome) -> Hashable:
        """What a run gave: equal for two runs that computed the same."""
        results, grads, buffers = outcome
        every = (*results, *grads, *buffers)
        return tuple(None if each is None else self.contents.described(each) for each in every)

    def check_second(self, first: Hashable, run: Run) -> None:
        """Run the step again; TraceError if it is not what the first run was."""
        random, behind = generators(), self._reach()
        states, begun = behind.states(), self.begun.states()
        self.changed = [place.name for place in self._written(behind)]
        self.changed += [name for name in begun if states.get(name, begun[name]) != begun[name]]
        self.changed += self._new(behind)
        self.states, process = states, process_states()
        again, lines = Again(self.contents), Lines()
        try:
            looking = lines.open() if random != self.random else nullcontext()
            with (
                disable_autocast_cache(),
                self.reads.open(behind.classes),
                looking,
            ):  # as make_fx has it
                second = self.outcome(run(again))
        except PartcError:
            raise
        except Exception as error:
            raise self._differs(again, f"{type(error).__name__}: {error}") from error
        if random not in (self.random, generators()):
            raise _random(lines.found, random, self.random)
        if first != second:
            raise self._differs(again, "")
        behind = self._reach()
        _check_states(states, behind.states(), behind.line_of)
        _check_process(process, process_states())
        self.left = [place.name for place in self._written(behind) if not _of_rnn(place)]

    def _new(self, behind: Reach) -> Iterator[str]:
        """Numbers that the latest run has put into objects that were there."""
        known = {place.name for place in self.begun.places}
        for place in behind.places:
            there = place.outer.name in known if place.outer else isinstance(place.owner, nn.Module)
            if isinstance(place.value, NUMBERS) and there and place.name not in known:
                yield place.name

    def frozen(self) -> FrozenNumbers:
        """The numbers that the step reads, as they are now: behind the runs, once all is restored.

        The walk follows what was read alone, as an object may be under several names.
        """
        reads = self.reads.found
        reach = Reach.of(self.model, self.objective, reads, self.reads.watched, self.ran)
        own = [n for n, now in reach.states().items() if self.states.get(n, now).state != now.state]
        outside = {at for at, each in self.contents.outside.items() if not each.written}
        return FrozenNumbers.of(self.model, reach, reads, own, outside)

    def notes(self) -> list[str]:
        """Sentences on attributes and variables that the step sets, and a program does not."""
        names = (re.sub(r"\.\d+\.", ".*.", re.sub(r"\[\d+\]", "[*]", n)) for n in self.left)
        return [f"the step sets {name}; a program does not" for name in dict.fromkeys(names)]

    def _reach(self) -> Reach:
        return Reach.of(self.model, self.objective, ran=self.ran)

    def _written(self, behind: Reach) -> Iterator[Place]:
        """The places with a tensor that the latest run has computed from parameters or inputs."""
        for place in behind.places:
            value = place.value
            if isinstance(value, FakeTensor) and self.contents.is_computed(value):
                yield place

    def _differs(self, again: Again, error: str) -> TraceError:
        why = ["this line reads what the step before has left"] if again.stale else []
        why += [f"a step sets {', '.join(self.changed[:4])}"] if self.changed else []
        why += [error] if error else []
        unseen = "" if why else (
            "Numbers that a generator of one's own draws, the time and the like are new in each "
            "step: draw with torch, or outside of the step, and give the number as an input. "
        )  # fmt: skip
        return TraceError(
            where=again.where or type(self.model).__name__,
            what="the second step computes something else than the first",
            why="; ".join(why) or "something outside of parameters and buffers has changed",
            do=f"{unseen}Make what is kept a buffer (register_buffer in __init__), which programs "
            "carry from step to step, or give it as an input.",
        )


def _of_rnn(place: Place) -> bool:
    """Whether a step puts a weight into torch's LSTM or alike before that runs, as WeightDrop does:
    every step makes it anew, and nobody reads it behind the step.
    """
    owner, key = place.root.owner, place.root.key
    if not isinstance(owner, nn.RNNBase):
        return False
    return key in ("_flat_weights", *owner._flat_weights_names)


class Again(WatchedCalls):
    """Runs calls on fakes, and notes the first one that the first run had not."""

    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self.contents, self.where, self.stale = contents, "", False

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if needs_values(func, args):
            with suppress(UnknownValueError):
                return computed(self.contents.known, func, args, kwargs, self._run)
        call = self.contents.before(func, args, kwargs)
        self._note(call, func)
        result = as_torch_has_it(func, args, kwargs)
        self.contents.behind(call, func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.call(func, args, kwargs)

    def _note(self, call: Call, func: Any) -> None:
        if not self.where and call.digest not in self.contents.calls:
            self.where, self.stale = source_here() or str(func), call.stale


def _check_states(
    before: dict[str, State], after: dict[str, State], line_of: Callable[[str], str]
) -> None:
    """TraceError if a number, an array or an iterator is in another state behind the second run."""
    for name, now in after.items():
        then = before.get(name, now)
        if then.state != now.state:
            told = f"{then.text} behind one step, {now.text} behind the next"
            raise TraceError(
                where=name + line_of(name),
                what="it changes with every step",
                why=told
                if then.text and now.text
                else "it is not behind the next step as behind the one before",
                do="A program runs no Python of the model: "
                + (_COLLECTED if now.text and name.startswith(LENGTH) else _COUNTED),
            )


def _check_process(before: dict[str, str], after: dict[str, str]) -> None:
    """TraceError if the second run has left another environment than the first."""
    for name in {**before, **after}:
        then, now = before.get(name, "absent"), after.get(name, "absent")
        if then != now:
            _check_states({name: State(then, then)}, {name: State(now, now)}, lambda _: "")


def _random(line: str, now: dict[str, Any], before: dict[str, Any]) -> TraceError:
    name = next(name for name, state in now.items() if state != before.get(name))
    return TraceError(
        where=line or "the step",
        what=f"it draws from {name}",
        why="the number drawn while tracing would be that of every step",
        do="Draw with torch, and choose by torch.where(torch.rand(()) < p, a, b) in place of an "
        "if; or draw outside of the step and give the number as an input.",
    )
