"""What a dry run of few layers says of one of many.

Equal layers hold equal memory, so what is live at an op that is so many layers from the first or
from the last is linear in their number. Programs with 4, 5 and 6 layers of every deep stack are
executed; if the third is where the first two point to, everywhere, so are all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from partc.dryrun.live_memory import Lines, LiveMemory, Peak

FEWEST = 4  # layers: the first two and the last two may hold something of their own
DEEP = 24  # layers that three short runs are faster than

Label = tuple[Any, Any]  # turn and place
Most = tuple[int, int, Lines]  # bytes, the line, and what is held there by line


def deep_stacks(step: nn.Module) -> list[nn.ModuleList]:
    """Lists of many layers that are alike but for the two at each end."""
    lists = [each for each in step.modules() if isinstance(each, nn.ModuleList)]
    return [each for each in lists if len(each) >= DEEP and len({*map(_form, each[1:-1])}) == 1]


def _form(layer: nn.Module) -> tuple[Any, ...]:
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return (type(layer), *((name, tuple(x.shape), x.dtype) for name, x in tensors))


def shorten(step: nn.Module, left_out: int, live: LiveMemory) -> None:
    """Leave so many layers out of every deep stack; those that stay say when they run."""
    for number, stack in enumerate(deep_stacks(step)):
        for _ in range(left_out):
            del stack[FEWEST // 2]
        for index, layer in enumerate(stack):
            end = 2 * index >= len(stack)
            _take_over(layer, (number, end, len(stack) - 1 - index if end else index), live)


def _take_over(layer: nn.Module, place: tuple[int, bool, int], live: LiveMemory) -> None:
    """Stand before the layer's own methods."""
    calls: Counter[Any] = Counter()

    def standing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[live.turn, name] += 1
            at = (*place, name, calls[live.turn, name])
            live.enter(live.turn, (*at, "in"))
            result = real(*args)
            live.enter(live.turn, (*at, "behind"))
            return result

        return call

    for name in vars(type(layer)):
        if not name.startswith("_"):
            setattr(layer, name, standing(name, getattr(layer, name)))


def most_of_all(shortened: Callable[[int], LiveMemory], depth: int) -> Most:
    """The peak of a run; ``shortened`` executes one with so many layers left out of each stack.

    ``depth`` is the number of layers of the shortest, 0 if none is worth shortening.
    """
    if depth:
        fewer, few, more = (shortened(depth - num) for num in range(FEWEST, FEWEST + 3))
        if _is_linear(fewer, few, more):
            found = _at_depth(few, more, depth - FEWEST - 2)
            if found:
                return found
    live = shortened(0)
    peak = live.peak()
    return peak.num_bytes, peak.line, live.lines_at(peak)


def _is_linear(fewer: LiveMemory, few: LiveMemory, more: LiveMemory) -> bool:
    """Whether every place of the smallest run grows evenly, and no other rises above these."""
    if not fewer.peaks.keys() <= few.peaks.keys() <= more.peaks.keys():
        return False
    return all(
        more.peaks[at].num_bytes - few.peaks[at].num_bytes
        == few.peaks[at].num_bytes - peak.num_bytes
        for at, peak in fewer.peaks.items()
    ) and all(_stays_below(run, fewer) for run in (few, more))


def _stays_below(run: LiveMemory, fewer: LiveMemory) -> bool:
    """Whether layers between those at the ends hold no more than these, turn by turn."""
    most: dict[Any, int] = {}
    for at in fewer.peaks:
        most[at[0]] = max(run.peaks[at].num_bytes, most.get(at[0], 0))
    return all(peak.num_bytes <= most.get(at[0], -1) for at, peak in run.peaks.items())


def _at_depth(few: LiveMemory, more: LiveMemory, further: int) -> Most | None:
    """The highest place with so many layers more than ``more``; None if it holds what the runs
    do not tell.
    """

    def there(at: Label) -> int:
        now, before = more.peaks[at].num_bytes, few.peaks[at].num_bytes
        return now + further * (now - before)

    at = max(few.peaks, key=lambda at: (there(at), -more.peaks[at].call))
    here, before = more.lines_at(more.peaks[at]), few.lines_at(few.peaks[at])
    same_line = more.peaks[at].line == few.peaks[at].line
    if not same_line or _hidden(here, more.peaks[at]) != _hidden(before, few.peaks[at]):
        return None
    lines = {line: size + further * (size - before[line]) for line, size in here.items()}
    return there(at), more.peaks[at].line, Counter(lines)


def _hidden(lines: Lines, peak: Peak) -> int:
    """Bytes of a peak that no line holds: a kernel's workspace."""
    return peak.num_bytes - lines.total()
