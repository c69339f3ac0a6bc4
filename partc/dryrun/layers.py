"""Find the peak of a program with many equal layers by running it with few of them.

Equal layers hold equal memory. So the bytes live at a given op of a given layer, counted from the
first or from the last layer, are linear in the number of layers. The program is run with 4, 5 and 6
layers of every deep stack. If the third run has everywhere the bytes that follow from the first
two, the peak at full depth follows too; otherwise the whole program is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from partc.dryrun.live_memory import Lines, LiveMemory, Peak

FEWEST = 4  # layers: the first two and the last two may hold memory that others do not
DEEP = 24  # layers: with fewer, one whole run is faster than three short ones

Label = tuple[Any, Any]  # a stage method's call, and a place in it
Most = tuple[int, int, Lines]  # bytes, the line, and what is held there by line


def deep_stacks(step: nn.Module) -> list[nn.ModuleList]:
    """The lists of at least ``DEEP`` layers that are equal but for the first and the last."""
    lists = [each for each in step.modules() if isinstance(each, nn.ModuleList)]
    return [each for each in lists if len(each) >= DEEP and len({*map(_form, each[1:-1])}) == 1]


def _form(layer: nn.Module) -> tuple[Any, ...]:
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return (type(layer), *((name, tuple(x.shape), x.dtype) for name, x in tensors))


def shorten(step: nn.Module, left_out: int, live: LiveMemory) -> None:
    """Remove ``left_out`` layers from the middle of every deep stack, and watch the others."""
    for number, stack in enumerate(deep_stacks(step)):
        for _ in range(left_out):
            del stack[FEWEST // 2]
        for index, layer in enumerate(stack):
            end = 2 * index >= len(stack)
            _take_over(layer, (number, end, len(stack) - 1 - index if end else index), live)


def _take_over(layer: nn.Module, place: tuple[int, bool, int], live: LiveMemory) -> None:
    """Wrap a layer's methods, so that ``live`` knows where in the layer the program is.

    ``place``: number of the stack, whether the layer counts from the end, and its distance.
    """
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
    """The peak of a program at full depth.

    ``shortened(n)`` runs the program without ``n`` layers of each deep stack. ``depth``: the length
    of the shortest such stack, 0 if there is none.
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
    """Whether the peak at every place of the smallest run is linear in the number of layers.

    Places that only the larger runs have must stay below them.
    """
    if not fewer.peaks.keys() <= few.peaks.keys() <= more.peaks.keys():
        return False
    return all(
        more.peaks[at].num_bytes - few.peaks[at].num_bytes
        == few.peaks[at].num_bytes - peak.num_bytes
        for at, peak in fewer.peaks.items()
    ) and all(_stays_below(run, fewer) for run in (few, more))


def _stays_below(run: LiveMemory, fewer: LiveMemory) -> bool:
    """Whether, in each turn, the layers in the middle hold no more than those at the ends."""
    most: dict[Any, int] = {}
    for at in fewer.peaks:
        most[at[0]] = max(run.peaks[at].num_bytes, most.get(at[0], 0))
    return all(peak.num_bytes <= most.get(at[0], -1) for at, peak in run.peaks.items())


def _at_depth(few: LiveMemory, more: LiveMemory, further: int) -> Most | None:
    """The peak with ``further`` layers more than the run ``more`` has, extrapolated from ``few``.

    None if the place of the peak differs in its line, or in bytes that no line holds.
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
    """Bytes of a peak that no source line allocated: the workspace of a kernel."""
    return peak.num_bytes - lines.total()
