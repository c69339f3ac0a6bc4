"""Record what one call of a pipeline stage's method (a turn) does to memory, and repeat that.

Repeating executes nothing: results become new tensors of the same shapes, and what the call keeps
for later becomes one piece of memory per source line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from partc.dryrun.live_memory import Lines, LiveMemory, Peak, Piece, Place
from partc.graph.fake_calls import storage_of

PARTS = "partials"  # the attribute in which programs keep a rank's parts of gradients
THEN = "then"  # the place after a call, where the results are sent to other stages
Call = tuple[int, str, int]  # number of the stage, method and microbatch


@dataclass(frozen=True)
class Made:
    """A tensor that a call returned or kept: one of its operands, or a new one of this shape."""

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
    """What one call of a stage's method did to memory."""

    results: tuple[Made, ...]
    peaks: tuple[tuple[Place, Peak], ...]  # by place, above what was live before
    tables: tuple[str, ...]  # the stage's dicts that have an entry of the microbatch afterwards
    kept: tuple[tuple[int, int], ...]  # (line, bytes) that only those entries hold
    shares: tuple[int, ...]  # which of (*results, *operands, *appended) the entries hold too
    grown: tuple[tuple[str, Made], ...]  # tensors appended to the stage's lists, by list
    grads: tuple[tuple[int, str, Made], ...]  # new gradients: number of the parameter, where it is
    lost: int  # bytes still live that none of the fields above accounts for

    def again(
        self, call: Call, live: LiveMemory, stage: Any, operands: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Repeat the turn's effect on memory for another microbatch; return the results."""
        _, _, i = call
        live.meet(call, self.peaks)
        live.enter(call, THEN)
        for table in _tables(stage).values():
            table.pop(i, None)
        results = tuple(made.again(operands, live) for made in self.results)
        grown = [(name, made.again(operands, live)) for name, made in self.grown]
        for name, tensor in grown:
            getattr(stage, name).append(tensor)
        params = [*stage.parameters()]
        for place, name, made in self.grads:
            _set(stage, params[place], name, made.again(operands, live))
        shared = (*results, *operands, *(tensor for _, tensor in grown))
        held: list[Any] = [shared[place] for place in self.shares]
        held.append(live.hold(self.kept))
        tables = _tables(stage)
        for name in self.tables:
            tables[name][i] = held
        return results

    def moved(self, line_for: Callable[[int], int | None]) -> Turn | None:
        """The turn with the lines of another file; None if that file lacks one of the lines."""
        lines: dict[int, int] = {}

        def moved(line: int) -> int:
            return lines.setdefault(line, _there(line_for(line)))

        def made(one: Made) -> Made:
            return replace(one, line=moved(one.line))

        def peak(one: Peak) -> Peak:
            extra = tuple(sorted((moved(line), size) for line, size in one.extra))
            return replace(one, line=moved(one.line), extra=extra)

        try:
            return replace(
                self,
                results=tuple(map(made, self.results)),
                peaks=tuple((place, peak(one)) for place, one in self.peaks),
                kept=tuple(sorted((moved(line), size) for line, size in self.kept)),
                grown=tuple((name, made(one)) for name, one in self.grown),
                grads=tuple((number, name, made(one)) for number, name, one in self.grads),
            )
        except _NoLine:
            return None


class _NoLine(Exception):
    pass


def _there(line: int | None) -> int:
    if line is None:
        raise _NoLine
    return line


@dataclass(frozen=True)
class State:
    """What is live before a call, and what the stage then holds."""

    alive: Mapping[int, Piece]
    total: int
    lines: Lines
    held: Mapping[int, None]  # of the microbatch
    lengths: Mapping[str, int]
    grads: Mapping[tuple[int, str], Tensor]

    @classmethod
    def of(cls, live: LiveMemory, stage: Any, i: int) -> State:
        lengths = {name: len(each) for name, each in _lists(stage).items()}
        lines, grads = Counter(live.lines), _grads(stage)
        return cls(live.alive_pieces(), live.total, lines, _held(stage, i), lengths, grads)


def turn_since(
    before: State, call: Call, live: LiveMemory, stage: Any, operands: Sequence[Tensor],
    results: Sequence[Tensor],
) -> Turn:  # fmt: skip
    """The Turn of a call that has just run, from the state ``before`` and the state now."""
    _, _, i = call
    alive = live.alive_pieces()
    appended = [
        (name, x)
        for name, each in _lists(stage).items()
        for x in each[before.lengths.get(name, 0) :]
    ]
    places: dict[int, int] = {}
    for place, tensor in enumerate((*results, *operands, *(x for _, x in appended))):
        places.setdefault(storage_of(tensor), place)
    held = _held(stage, i)
    new = {key: piece for key, piece in alive.items() if before.alive.get(key) is not piece}
    own = [key for key in held if key not in places and (key in before.held or key in new)]
    kept: Lines = Counter()
    for piece in (alive[key] for key in own):
        kept[piece.line] += piece.num_bytes
    grads = {at: x for at, x in _grads(stage).items() if at not in before.grads}
    given = {storage_of(x) for x in grads.values()} & {*new} - {*held, *places}
    found = {*held, *places, *given}
    return Turn(
        results=tuple(_made(x, operands, alive) for x in results),
        peaks=tuple(
            (place, _beside(before, live, peak))
            for (at, place), peak in live.peaks.items()
            if at == call and peak.num_bytes >= 0  # something ran there
        ),
        tables=tuple(name for name, table in _tables(stage).items() if i in table),
        kept=tuple(sorted(kept.items())),
        shares=tuple(places[key] for key in held if key in places),
        grown=tuple((name, _made(x, operands, alive)) for name, x in appended),
        grads=tuple((*at, _made(x, operands, alive)) for at, x in grads.items()),
        lost=len(grads)
        - len(given)  # of memory that they share
        + sum(piece.num_bytes for key, piece in new.items() if key not in found),
    )


def _beside(before: State, live: LiveMemory, peak: Peak) -> Peak:
    """A peak in bytes above what was live before the call."""
    extra = live.lines_at(peak)
    extra.subtract(before.lines)
    more = tuple((line, size) for line, size in sorted(extra.items()) if size)
    return Peak(peak.num_bytes - before.total, peak.line, extra=more)


def _held(stage: Any, i: int) -> dict[int, None]:
    """The storages that a stage's dicts hold for microbatch ``i``."""
    entries = [table[i] for table in _tables(stage).values() if i in table]
    return {storage_of(tensor): None for tensor in _deep(entries)}


def _made(tensor: Tensor, operands: Sequence[Tensor], alive: Mapping[int, Piece]) -> Made:
    for place, operand in enumerate(operands):
        if operand is tensor:
            return Made(operand=place)
    piece = alive.get(storage_of(tensor))
    line = piece.line if piece else 0
    return Made(-1, tuple(tensor.shape), tensor.stride(), tensor.dtype, line)


def _tables(stage: Any) -> dict[str, dict[int, Any]]:
    """The dicts of a stage with one entry per microbatch, by attribute."""
    return {
        name: each for name, each in vars(stage).items() if type(each) is dict and name[0] != "_"
    }


def _lists(stage: Any) -> dict[str, list[Tensor]]:
    """The lists in which a stage collects tensors of all microbatches, as its losses."""
    found = {name: each for name, each in vars(stage).items() if type(each) is list}
    return {n: each for n, each in found.items() if all(isinstance(x, Tensor) for x in each)}


def _grads(stage: nn.Module) -> dict[tuple[int, str], Tensor]:
    """A stage's gradients by parameter number: ``grad``, and parts that ranks have yet to sum."""
    found, parts = {}, vars(stage).get(PARTS, {})
    for number, param in enumerate(stage.parameters()):
        for name, given in (("grad", param.grad), (PARTS, parts.get(param))):
            if isinstance(given, Tensor):
                found[number, name] = given
    return found


def _set(stage: Any, param: nn.Parameter, name: str, grad: Tensor) -> None:
    """Set a gradient, where ``_grads`` has found it."""
    if name == PARTS:
        stage.partials[param] = grad
    else:
        param.grad = grad


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
