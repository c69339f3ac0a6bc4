"""Time a program's step by the clock, as boxes of a time line like those of predictions.

A pipeline's actions (``F``, ``B`` and ``W`` of a stage and a microbatch) are timed, in other
programs the ``forward``, ``backward`` and ``weights`` of the blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from partc.cost.roofline import BLOCKS, COMPUTE, WAIT, Box
from partc.graph.folds import list_member
from partc.measure.timed_calls import Clock, Moment, Transfer, TransferTimes
from partc.program.role import Shard

ACTIONS, PHASES = ("F", "B", "W"), ("forward", "backward", "weights")
MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on one rank.

    ``step_s`` ends when all gradients are complete. ``exposed``: by axis, the time that computing
    waits for transfers. ``hidden``: by axis, the time that transfers run while computing goes on;
    unknown for an axis with messages, as the end of a message is not signalled.
    """

    step_s: float
    optimizer_s: float
    exposed: Mapping[str, float]
    hidden: Mapping[str, float]

    @property
    def computing_s(self) -> float:
        return self.step_s - sum(self.exposed.values())


@dataclass(frozen=True)
class _Region:
    kind: str
    site: str
    begin: Moment
    end: Moment


def time_step(
    program: nn.Module, paths: Mapping[str, str], axes: Mapping[str, str], clock: Clock,
    begin: Callable[[], None], run: Callable[[], object], update: Callable[[], object],
) -> tuple[StepTimes, list[Box]]:  # fmt: skip
    """Time ``run``, a step, and ``update``, the optimizer; return the times and the time line.

    ``paths``: the program's module of each block -> the block's path in the user's model. ``axes``:
    the name of a process group -> its mesh axis.
    """
    transfers: list[Transfer] = []
    regions: list[_Region] = []
    with TransferTimes(clock, axes, transfers).on(), _timed(program, paths, clock, regions):
        begin()
        first = clock.now()
        run()
        middle = clock.now()
        update()
        last = clock.now()

    def at(moment: Moment) -> float:
        return clock.seconds(first, moment)

    moved = moved_boxes(transfers, at)
    stops = [box for box in moved if box.stream == WAIT]
    blocks = [_box(each, stops, at) for each in regions]
    optimizer = Box(COMPUTE, "optimizer", "", at(middle), at(last) - at(middle))
    times = StepTimes(at(middle), optimizer.seconds, *shares(moved))
    return times, [*blocks, *moved, optimizer]


def block_paths(program: nn.Module, shards: Sequence[Shard]) -> dict[str, str]:
    """The path of each block in the program -> its path in the user's model."""
    found = {}
    for path, _ in program.named_modules():
        if path.rpartition(".")[2].isdigit():
            names = [shard.name for shard in shards if shard.key.startswith(f"{path}.")]
            where, index = list_member(names[0]) if names else ("", 0)
            found[path] = f"{where}.{index}" if where else path
    return found


@contextmanager
def _timed(
    program: nn.Module, paths: Mapping[str, str], clock: Clock, found: list[_Region]
) -> Iterator[None]:
    """Replace a pipeline's actions, or else the blocks' methods, by timed ones for a while."""

    def timed(call: Callable[..., Any], kind: str, site: Callable[..., str]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begin = clock.now()
            result = call(*arguments)
            found.append(_Region(kind, site(*arguments), begin, clock.now()))
            return result

        return run

    def replace(module: nn.Module, name: str, site: Callable[..., str]) -> None:
        if method := getattr(module, name, None):
            object.__setattr__(module, name, timed(method, name, site))
            undo.callback(object.__delattr__, module, name)

    with ExitStack() as undo:
        if hasattr(program, "stages"):
            for kind in ACTIONS:
                replace(program, kind, lambda stage, i, kind=kind: f"{stage}{kind}{i}")
        else:
            for path, name in paths.items():
                for phase in PHASES:
                    replace(program.get_submodule(path), phase, lambda *_, name=name: name)
        yield


def moved_boxes(transfers: Iterable[Transfer], at: Callable[[Moment], float]) -> list[Box]:
    """The boxes of transfers, and those in which computing waits for them."""
    return [box for each in transfers for box in _moved(each, at)]


def _moved(each: Transfer, at: Callable[[Moment], float]) -> Iterator[Box]:
    """The box of a transfer, and the boxes in which computing waits for it."""
    waits = [(at(begin), at(end)) for begin, end in each.waits]
    if each.end is not None:
        begin, end = at(each.begin), at(each.end)
        # the signal of the end may be late, but the last wait cannot return before the end
        end = min([end, *(over for _, over in waits[-1:])])
        yield Box(each.axis, each.kind, "", begin, end - begin)
    for begin, end in waits:
        yield Box(WAIT, each.kind, each.axis, begin, end - begin)


def _box(region: _Region, stops: Sequence[Box], at: Callable[[Moment], float]) -> Box:
    """The box of a block or an action; an action without its waits for messages."""
    begin, end = at(region.begin), at(region.end)
    lost = 0.0
    if region.kind in ACTIONS:
        inside = [s for s in stops if begin <= s.begin_s < end and s.name in MESSAGES]
        lost = sum(stop.seconds for stop in inside)
    return Box(BLOCKS, region.kind, region.site, begin + lost, end - begin - lost)


def shares(moved: Sequence[Box]) -> tuple[dict[str, float], dict[str, float]]:
    """Exposed and hidden seconds of transfers, each by axis."""
    exposed: defaultdict[str, float] = defaultdict(float)
    runs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for box in moved:
        if box.stream == WAIT:
            exposed[box.block] += box.seconds
        else:
            runs[box.stream].append((box.begin_s, box.begin_s + box.seconds))
    untold = {box.block for box in moved if box.stream == WAIT and box.name in MESSAGES}
    hidden = {
        axis: max(0.0, _length(parts) - exposed[axis])
        for axis, parts in runs.items()
        if axis not in untold
    }
    return dict(exposed), hidden


def _length(parts: list[tuple[float, float]]) -> float:
    """The total time that is covered by at least one of several spans."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(parts):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
