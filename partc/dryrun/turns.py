"""Stand-ins for the turns of a pipeline stage in a dry run: most microbatches do what one did.

A stage's ``forward``, ``backward`` and ``weights`` are executed for some microbatches. As soon as
two in a row have made, kept and freed the same memory, the next ones only do that (``dry_turn``).
The first one makes the gradients that others add to; it is left out as soon as the first ones of
two stages were alike. Everything between them, as inboxes and outboxes, runs as ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from partc.dryrun.lines import SourceLines
from partc.dryrun.live_memory import LiveMemory
from partc.dryrun.turn import THEN, State, Turn, turn_since
from partc.graph.fake_calls import tensors_in

METHODS = ("forward", "backward", "weights")


class NotSteady(Exception):
    """A microbatch was left out whose later turns cannot be: execute them all."""


Classes = tuple[str, ...]
Seen = tuple[Turn, SourceLines, Classes]  # in which file, of which classes
Form = tuple[Any, ...]  # what stages have in common that do the same
Key = tuple[Form, str, bool]  # form of the stage, name of the method, and whether it is its first
EXECUTED = 3  # microbatches at least of the first stage of a form


@dataclass
class KnownTurns:
    """What turns do; ``seen`` has first turns that no other stage has confirmed."""

    turns: dict[Key, Seen] = field(default_factory=dict)
    seen: dict[Key, Seen] = field(default_factory=dict)


@dataclass
class Turns:
    """Calls the methods of one rank's stages; ``known`` has what earlier ranks' turns did."""

    live: LiveMemory
    known: KnownTurns
    source: SourceLines
    forms: dict[int, Form] = field(default_factory=dict)  # by number of the stage
    left_out: set[tuple[int, int]] = field(default_factory=set)  # stage and microbatch
    begun: set[tuple[int, str]] = field(default_factory=set)  # stage and method
    here: dict[tuple[Key, Classes], Turn] = field(default_factory=dict)  # by lines of this file
    done: dict[tuple[int, str], list[Turn]] = field(default_factory=lambda: defaultdict(list))

    def take_over(self, stages: Sequence[nn.Module]) -> None:
        """Stand before the methods of a rank's stages."""
        for number, stage in enumerate(stages):
            self.forms[number] = _form(stage, self.source)
            for name in METHODS:
                if hasattr(stage, name):
                    setattr(stage, name, self._standing(number, name, stage, getattr(stage, name)))

    def _standing(
        self, number: int, name: str, stage: Any, real: Callable[..., Any]
    ) -> Callable[..., Any]:
        def turn(i: int, *operands: Tensor) -> Any:
            last = i == getattr(stage, "last", None)  # whose gradients leave at once
            if name == "forward" and not last and self._may_leave_out(number, stage):
                self.left_out.add((number, i))
            key = self._key(number, name)
            self.begun.add((number, name))
            if (number, i) not in self.left_out:
                return self._execute(key, number, stage, real, i, operands)
            known = self._known(key, stage)
            if known is None:
                raise NotSteady(f"{name} of stage {number}")
            return known.again((number, name, i), self.live, stage, operands)

        return turn

    def _key(self, number: int, name: str) -> Key:
        """Of the next call; a first forward does what all do."""
        return self.forms[number], name, name != "forward" and (number, name) not in self.begun

    def _known(self, key: Key, stage: Any) -> Turn | None:
        """What an equal call did, by lines of this file."""
        at = key, _classes(stage)
        if at not in self.here:
            known = self._here(self.known.turns.get(key), stage)
            if known is None:
                return None
            self.here[at] = known
        return self.here[at]

    def _here(self, seen: Seen | None, stage: Any) -> Turn | None:
        if seen is None:
            return None
        turn, there, classes = seen
        own = _classes(stage)
        if (there, classes) == (self.source, own):
            return turn
        called = dict(zip(there.used_by(classes), self.source.used_by(own), strict=True))
        return turn.moved(lambda line: self.source.line_for(line, there, called))

    def _may_leave_out(self, number: int, stage: Any) -> bool:
        """Whether a microbatch need not be executed: this one's forward does what others did."""
        form, first = self.forms[number], (number, "forward") not in self.begun
        known = {
            name: self._known((form, name, first and name != "forward"), stage) is not None
            for name in METHODS
            if hasattr(stage, name)
        }
        enough = len(self.done[number, "forward"]) >= EXECUTED  # for the others to be known in time
        return known["forward"] and (enough or all(known.values()))

    def _execute(
        self, key: Key, number: int, stage: Any, real: Callable[..., Any], i: int,
        operands: Sequence[Tensor],
    ) -> Any:  # fmt: skip
        _, name, _ = key
        call = (number, name, i)
        before = State.of(self.live, stage, i)
        self.live.enter(call, None)
        result = real(i, *operands)
        done = self.done[number, name]
        done.append(turn_since(before, call, self.live, stage, operands, [*tensors_in(result)]))
        self.live.enter(call, THEN)
        if not done[-1].lost:
            self._learn(key, stage, done)
        return result

    def _learn(self, key: Key, stage: Any, done: Sequence[Turn]) -> None:
        """What two calls in a row did is known, and what the first ones of two stages did."""
        _, _, first = key
        of_others = self._here(self.known.seen.get(key), stage)
        of_this = done[-2] if len(done) > 1 else None
        now = done[-1], self.source, _classes(stage)
        if done[-1] == (of_others if first else of_this):
            self.known.turns[key] = now
        if first:
            self.known.seen[key] = now


def _form(stage: nn.Module, source: SourceLines) -> Form:
    """Its text and what it computes with: instances of a class may have more blocks or fewer."""
    tensors = (*stage.named_parameters(), *stage.named_buffers())
    held = ((name, x.shape, x.dtype) for name, x in tensors)
    return (*source.meaning(_classes(stage)), *held)


def _classes(stage: nn.Module) -> Classes:
    """Those of a stage and its blocks."""
    return tuple(dict.fromkeys(type(module).__name__ for module in stage.modules()))
