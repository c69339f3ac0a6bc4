"""Leave out most microbatches of a pipeline's dry run, as they repeat what one did to memory.

A turn is a call of a stage's ``forward``, ``backward`` or ``weights`` for one microbatch. Turns are
executed until two in a row have allocated, kept and freed the same memory; later ones only repeat
that effect (``turn.py``). A stage's first backward differs, as it makes the gradients that others
add to. It is left out once the first ones of two equal stages had the same effect. The code between
turns, such as sending and receiving, always runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from partc.dryrun.lines import SourceLines
from partc.dryrun.live_memory import LiveMemory
from partc.dryrun.turn import THEN, Call, State, Turn, turn_since
from partc.graph.fake_calls import tensors_in

METHODS = ("forward", "backward", "weights")


class NotSteady(Exception):
    """A microbatch was left out, and a later turn of it cannot be: the run has to execute all."""


Classes = tuple[str, ...]
Seen = tuple[Turn, SourceLines, Classes]  # a turn, the file and the classes that it ran
Form = tuple[Any, ...]  # equal for stages that compute the same
Key = tuple[Form, str, bool]  # form of the stage, name of the method, and whether it is its first
EXECUTED = 3  # microbatches of a stage that run before one is left out on the forward's word


@dataclass
class KnownTurns:
    """The effects of turns; ``seen`` has first turns that no second stage has confirmed yet."""

    turns: dict[Key, Seen] = field(default_factory=dict)
    seen: dict[Key, Seen] = field(default_factory=dict)


@dataclass
class Turns:
    """Executes or repeats the turns of one rank's stages; ``known`` comes from earlier ranks."""

    live: LiveMemory
    known: KnownTurns
    source: SourceLines
    forms: dict[int, Form] = field(default_factory=dict)  # by number of the stage
    left_out: set[tuple[int, int]] = field(default_factory=set)  # stage and microbatch
    begun: set[tuple[int, str]] = field(default_factory=set)  # stage and method
    here: dict[tuple[Key, Classes], Turn] = field(default_factory=dict)  # by lines of this file
    done: dict[tuple[int, str], list[Turn]] = field(default_factory=lambda: defaultdict(list))

    def take_over(self, stages: Sequence[nn.Module]) -> None:
        """Replace the methods of a rank's stages, so that calls come here."""
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
            return self._repeat(known, (number, name, i), stage, operands)

        return turn

    def _repeat(self, known: Turn, call: Call, stage: Any, operands: Sequence[Tensor]) -> Any:
        """Repeat a known turn's effect for the microbatch of a call."""
        return known.again(call, self.live, stage, operands)

    def _key(self, number: int, name: str) -> Key:
        """The key of a stage method's next call; a first forward has no special effect."""
        return self.forms[number], name, name != "forward" and (number, name) not in self.begun

    def _known(self, key: Key, stage: Any) -> Turn | None:
        """The effect of an equal call, with the lines of this file; None if not known."""
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
        """Whether the microbatch whose forward is called now need not be executed."""
        form, first = self.forms[number], (number, "forward") not in self.begun
        known = {
            name: self._known((form, name, first and name != "forward"), stage) is not None
            for name in METHODS
            if hasattr(stage, name)
        }
        # after so many forwards, backward and weights will be known when this one's turns come
        enough = len(self.done[number, "forward"]) >= EXECUTED
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
        """Take a turn as known if it equals the one before, or a first turn of an equal stage."""
        _, _, first = key
        of_others = self._here(self.known.seen.get(key), stage)
        of_this = done[-2] if len(done) > 1 else None
        now = done[-1], self.source, _classes(stage)
        if done[-1] == (of_others if first else of_this):
            self.known.turns[key] = now
        if first:
            self.known.seen[key] = now


def _form(stage: nn.Module, source: SourceLines) -> Form:
    """A stage's text and tensors; the class alone would not do, as its number of blocks varies."""
    tensors = (*stage.named_parameters(), *stage.named_buffers())
    held = ((name, x.shape, x.dtype) for name, x in tensors)
    return (*source.meaning(_classes(stage)), *held)


def _classes(stage: nn.Module) -> Classes:
    """The names of the classes of a stage and its blocks."""
    return tuple(dict.fromkeys(type(module).__name__ for module in stage.modules()))
