"""Stand-ins for the turns of a pipeline stage in a dry run: most microbatches do what one did.

A stage's ``forward``, ``backward`` and ``weights`` are executed for some microbatches. As soon as
two in a row have made, kept and freed the same memory, the next ones only do that: their results
are new tensors of the same form, what they keep for later is one piece of memory per source line.
Everything between them, as inboxes and outboxes, runs as ever.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partc.fake_calls import tensors_in
from partc.live_memory import Lines, LiveMemory, Peak, Place

METHODS = ("forward", "backward", "weights")


class NotSteady(Exception):
    """A microbatch was left out whose later turns cannot be: execute them all."""


@dataclass(frozen=True)
class Made:
    """A tensor of a result: an operand, or a new one of this form."""

    operand: int = -1
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    line: int = 0

    def again(self, operands: Sequence[Tensor], live: LiveMemory) -> Tensor:
        if self.operand >= 0:
            return operands[self.operand]
        return live.made_at(
            self.line, lambda: torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        )


@dataclass(frozen=True)
class Turn:
    """What one call of a method did to memory."""

    results: tuple[Made, ...]
    peaks: tuple[tuple[Place, Peak], ...]  # by place, beside what was live before
    tables: tuple[str, ...]  # in which the microbatch has an entry afterwards
    kept: tuple[tuple[int, int], ...]  # bytes of those entries by line, of memory of their own
    shares: tuple[int, ...]  # of results, operands and what is appended, what entries hold as well
    grown: tuple[tuple[str, Made], ...]  # what was appended to the stage's lists
    lost: int  # bytes that it left elsewhere


Form = tuple[Any, ...]  # what stages have in common that do the same
KnownTurns = dict[tuple[Form, str], Turn]  # by form of the stage and name of the method
THEN = "then"  # the place behind a turn, where its results are sent on
EXECUTED = 3  # microbatches at least: the first makes the gradients that others add to


@dataclass
class Turns:
    """Calls the methods of one rank's stages; ``known`` has what earlier ranks' turns did."""

    live: LiveMemory
    known: KnownTurns
    forms: dict[int, Form] = field(default_factory=dict)  # by number of the stage
    left_out: set[tuple[int, int]] = field(default_factory=set)  # stage and microbatch
    done: dict[tuple[int, str], list[Turn]] = field(default_factory=lambda: defaultdict(list))

    def take_over(self, stages: Sequence[Any]) -> None:
        """Stand before the methods of a rank's stages."""
        for number, stage in enumerate(stages):
            self.forms[number] = _form(stage)
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
            if (number, i) not in self.left_out:
                return self._execute(number, name, stage, real, i, operands)
            if (self.forms[number], name) not in self.known:
                raise NotSteady(f"{name} of stage {number}")
            return self._stand_in(number, name, stage, i, operands)

        return turn

    def _may_leave_out(self, number: int, stage: Any) -> bool:
        """Whether a microbatch need not be executed: this one's forward does what others did."""
        form, executed = self.forms[number], len(self.done[number, "forward"])
        all_known = all((form, name) in self.known for name in METHODS if hasattr(stage, name))
        return (form, "forward") in self.known and executed >= (1 if all_known else EXECUTED)

    def _execute(
        self, number: int, name: str, stage: Any, real: Callable[..., Any], i: int,
        operands: Sequence[Tensor],
    ) -> Any:  # fmt: skip
        turn = (number, name, i)
        before = _State.of(self.live, stage, i)
        self.live.enter(turn, None)
        result = real(i, *operands)
        done = self.done[number, name]
        done.append(_turn(before, turn, self.live, stage, i, operands, [*tensors_in(result)]))
        self.live.enter(turn, THEN)
        if done[-2:] == done[-1:] * 2 and not done[-1].lost:
            self.known[self.forms[number], name] = done[-1]
        return result

    def _stand_in(
        self, number: int, name: str, stage: Any, i: int, operands: Sequence[Tensor]
    ) -> Any:
        live, turn = self.live, self.known[self.forms[number], name]
        live.meet((number, name, i), turn.peaks)
        live.enter((number, name, i), THEN)
        for table in _tables(stage).values():
            table.pop(i, None)
        results = tuple(made.again(operands, live) for made in turn.results)
        grown = [(name, made.again(operands, live)) for name, made in turn.grown]
        for name, tensor in grown:
            getattr(stage, name).append(tensor)
        shared = (*results, *operands, *(tensor for _, tensor in grown))
        held: list[Any] = [shared[place] for place in turn.shares]
        held.append(live.hold(turn.kept))
        tables = _tables(stage)
        for name in turn.tables:
            tables[name][i] = held
        return results


def _form(stage: Any) -> Form:
    """Its class and what it computes with: instances of a class may have more blocks or fewer."""
    return (
        type(stage).__qualname__,
        *((name, x.shape, x.dtype) for name, x in stage.named_parameters()),
    )


# what a call did ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class _State:
    """What is alive before a call, and what the stage holds."""

    alive: Mapping[int, tuple[int, int]]
    total: int
    lines: Lines
    held: Mapping[int, None]  # of the microbatch
    lengths: Mapping[str, int]

    @classmethod
    def of(cls, live: LiveMemory, stage: Any, i: int) -> _State:
        lengths = {name: len(each) for name, each in _lists(stage).items()}
        lines = Counter(live.lines)
        return cls(live.alive_lines(), live.total, lines, _held(stage, i), lengths)


def _turn(
    before: _State, turn: tuple[int, str, int], live: LiveMemory, stage: Any, i: int,
    operands: Sequence[Tensor], results: Sequence[Tensor],
) -> Turn:  # fmt: skip
    alive = live.alive_lines()
    appended = [
        (name, x)
        for name, each in _lists(stage).items()
        for x in each[before.lengths.get(name, 0) :]
    ]
    places: dict[int, int] = {}
    for place, tensor in enumerate((*results, *operands, *(x for _, x in appended))):
        places.setdefault(_key(tensor), place)
    held = _held(stage, i)
    own = [k for k in held if k not in places and (k in before.held or k not in before.alive)]
    kept: Lines = Counter()
    for line, size in (alive[key] for key in own):
        kept[line] += size
    found = {*held, *places}
    return Turn(
        results=tuple(_made(x, operands, alive) for x in results),
        peaks=tuple(
            (place, _beside(before, live, peak))
            for (at, place), peak in live.peaks.items()
            if at == turn and peak.num_bytes >= 0  # something ran there
        ),
        tables=tuple(name for name, table in _tables(stage).items() if i in table),
        kept=tuple(sorted(kept.items())),
        shares=tuple(places[key] for key in held if key in places),
        grown=tuple((name, _made(x, operands, alive)) for name, x in appended),
        lost=sum(
            size for k, (_, size) in alive.items() if k not in before.alive and k not in found
        ),
    )


def _beside(before: _State, live: LiveMemory, peak: Peak) -> Peak:
    """A peak as what is live there more than before the call."""
    extra = live.lines_at(peak)
    extra.subtract(before.lines)
    more = tuple((line, size) for line, size in sorted(extra.items()) if size)
    return Peak(peak.num_bytes - before.total, peak.line, extra=more)


def _held(stage: Any, i: int) -> dict[int, None]:
    """The memory of what a stage holds of a microbatch."""
    entries = [table[i] for table in _tables(stage).values() if i in table]
    return {_key(tensor): None for tensor in _deep(entries)}


def _made(tensor: Tensor, operands: Sequence[Tensor], alive: Mapping[int, tuple[int, int]]) -> Made:
    for place, operand in enumerate(operands):
        if operand is tensor:
            return Made(operand=place)
    line, _ = alive.get(_key(tensor), (0, 0))
    return Made(-1, tuple(tensor.shape), tensor.stride(), tensor.dtype, line)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tables(stage: Any) -> dict[str, dict[int, Any]]:
    """What a stage holds per microbatch."""
    return {
        name: each for name, each in vars(stage).items() if type(each) is dict and name[0] != "_"
    }


def _lists(stage: Any) -> dict[str, list[Tensor]]:
    """What a stage collects of all microbatches, as its losses."""
    found = {name: each for name, each in vars(stage).items() if type(each) is list}
    return {n: each for n, each in found.items() if all(isinstance(x, Tensor) for x in each)}


def _deep(held: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dicts and handles."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, Mapping):
        for each in held.values():
            yield from _deep(each)
    elif isinstance(held, list | tuple):
        for each in held:
            yield from _deep(each)
    elif hasattr(held, "tensors"):
        yield from _deep(held.tensors)
