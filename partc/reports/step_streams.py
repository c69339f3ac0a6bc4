"""Arrange the time line of a predicted step as panels of bars.

The first panel shows the whole step, the others the forward and the backward of one block. The bar
of a transfer has the colour ``exposed`` while computing waits for it, otherwise ``hidden``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partc.cost.roofline import BLOCKS, COMPUTE, Box, Clock, Spent
from partc.cost.step_events import Move, StepEvents
from partc.cost.step_walk import step_times
from partc.plan.mesh import Mesh

NEAR_S = 1e-9  # times with a smaller difference count as equal
FORWARD, BACKWARD, OTHER, UPDATE = "forward", "backward", "other", "optimizer"  # of computing
WEIGHTS = "weight gradients"
HIDDEN, EXPOSED = "hidden", "exposed"  # of transfers


class Bar(NamedTuple):
    """One bar of a row, with a colour's name, a label, and ``told``, the tooltip."""

    begin_s: float
    end_s: float
    colour: str
    label: str
    told: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def overlaps(self, begin_s: float, end_s: float) -> bool:
        return self.begin_s < end_s - NEAR_S and self.end_s > begin_s + NEAR_S

    def clipped(self, begin_s: float, end_s: float) -> Bar:
        return self._replace(begin_s=max(self.begin_s, begin_s), end_s=min(self.end_s, end_s))


class Wait(NamedTuple):
    """A span of time in which computing waits for a transfer over ``axis``."""

    begin_s: float
    end_s: float
    axis: str


class Block(NamedTuple):
    """The span of one block's forward or backward; ``number`` is the block's index in the model."""

    phase: str
    number: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Panel:
    """A span of the step with its rows of bars by label.

    ``names_work``: the bars of the first row are labelled by kinds of work, such as ``matmul``.
    ``notes``: what stands below the caption; None: how much of each kind of transfer is hidden.
    """

    caption: str
    begin_s: float
    end_s: float
    rows: dict[str, list[Bar]]
    names_work: bool
    notes: tuple[str, ...] | None = None


def panels(boxes: Sequence[Box], waits: Sequence[Wait]) -> Iterator[Panel]:
    """A panel of the whole step, then one each of the middle block's forward and backward."""
    blocks, computed = numbered(boxes), [box for box in boxes if box.stream == COMPUTE]
    moved = _transfer_rows(boxes, waits)
    end_s = max((_end(box) for box in boxes), default=1e-6)
    rows = {"compute": _by_block(computed, blocks), **moved}
    yield Panel("The whole step; numbers are layers", 0.0, end_s, rows, names_work=False)
    for phase in (FORWARD, BACKWARD):
        of_phase = [block for block in blocks if block.phase == phase]
        for block in of_phase[len(of_phase) // 2 :][:1]:
            rows = {"compute": _by_kind(computed, block), **moved}
            yield _enlarged(block, rows)  # the middle block: the first and the last differ


def _enlarged(block: Block, rows: Mapping[str, Sequence[Bar]]) -> Panel:
    """A panel of the span in which a block is computed."""
    begin_s, end_s = block.begin_s, block.end_s
    inside = {
        label: [bar.clipped(begin_s, end_s) for bar in row if bar.overlaps(begin_s, end_s)]
        for label, row in rows.items()
    }
    caption = f"{block.phase.capitalize()} of layer {block.number}, enlarged"
    return Panel(caption, begin_s, end_s, inside, names_work=True)


def hidings(panel: Panel) -> Iterator[str]:
    """A text per kind of transfer in a panel: the hidden share, and the work that hides most."""
    computing, *rows = panel.rows.values()
    for name in dict.fromkeys(bar.told for row in rows for bar in row):
        bars = [bar for row in rows for bar in row if bar.told == name]
        hidden = [bar for bar in bars if bar.colour == HIDDEN]
        share = _length(hidden) / _length(bars)
        behind = _behind(hidden, computing) if hidden and panel.names_work else ""
        yield f"{name}: {share:.0%} hidden{behind}" if share else f"{name}: computing waits for it"


def _behind(hidden: Sequence[Bar], computing: Sequence[Bar]) -> str:
    """`` behind <kind>`` for the kind of work that runs longest beside transfers, or ""."""
    beside: dict[str, float] = {}
    for bar in hidden:
        for work in computing:
            if work.overlaps(bar.begin_s, bar.end_s):
                both = _length([work.clipped(bar.begin_s, bar.end_s)])
                beside[work.label] = beside.get(work.label, 0.0) + both
    kind = max(beside, key=beside.__getitem__, default="")
    return f" behind {kind}" if kind else ""


def _length(bars: Sequence[Bar]) -> float:
    return sum(bar.seconds for bar in bars)


def numbered(boxes: Sequence[Box]) -> list[Block]:
    """The blocks of the step in order, with their numbers in the model.

    The boxes of equal blocks have the name of one of them (``layers.1`` three times), so the
    numbers are counted.
    """
    found = [box for box in boxes if box.stream == BLOCKS and box.name in (FORWARD, BACKWARD)]
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}
    blocks = []
    for box in found:
        stack, _, first = box.block.rpartition(".")
        if box.name == FORWARD:
            number = forward[stack] = forward.get(stack, int(first or 0) - 1) + 1
        else:
            number = backward[stack] = backward.get(stack, forward.get(stack, 0) + 1) - 1
        blocks.append(Block(box.name, number, box.begin_s, _end(box)))
    return blocks


class WaitClock(Clock):
    """A clock that also records the spans in which computing waits, by axis."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.waits: list[Wait] = []

    def wait(self, move: Move, end: float, spent: Spent) -> None:
        """Wait as ``Clock`` does, and record the span.

        The span ends at ``met``, as the copying of what arrived is computing again.
        """
        begin_s = self.now
        super().wait(move, end, spent)
        if self.met > begin_s:
            self.waits.append(Wait(begin_s, self.met, move.axis))


def waits_of(step: StepEvents, mesh: Mesh) -> list[Wait]:
    """The spans in which computing waits, in a step without pipeline stages."""
    clock = WaitClock(mesh)
    step_times(step, mesh, clock)
    return clock.waits


def _transfer_rows(boxes: Sequence[Box], waits: Sequence[Wait]) -> dict[str, list[Bar]]:
    """One row of bars per mesh axis that has transfers."""
    axes = sorted({box.stream for box in boxes if box.stream not in (BLOCKS, COMPUTE)})
    return {f"over {axis}": list(_transfers(boxes, axis, waits)) for axis in axes}


def _transfers(boxes: Sequence[Box], axis: str, waits: Sequence[Wait]) -> Iterator[Bar]:
    """The bars of an axis's transfers, cut into hidden and exposed parts."""
    stops = [wait for wait in waits if wait.axis == axis]
    for box in (box for box in boxes if box.stream == axis):
        told = f"{box.name} over {axis}"
        bar = Bar(box.begin_s, _end(box), HIDDEN, box.name, told)
        for wait in (wait for wait in stops if bar.overlaps(wait.begin_s, wait.end_s)):
            red = bar.clipped(wait.begin_s, wait.end_s)._replace(colour=EXPOSED)
            if red.begin_s > bar.begin_s + NEAR_S:
                yield bar._replace(end_s=red.begin_s)
            yield red
            bar = bar._replace(begin_s=red.end_s)
        if bar.end_s > bar.begin_s + NEAR_S:
            yield bar


def _by_block(computed: Sequence[Box], blocks: Sequence[Block]) -> list[Bar]:
    """The bars of the computing stream, coloured and numbered by block."""

    def bar_of(box: Box) -> Bar:
        middle = box.begin_s + box.seconds / 2
        for block in blocks:
            if block.begin_s < middle < block.end_s:
                told = f"{block.phase} of layer {block.number}"
                return Bar(box.begin_s, _end(box), block.phase, str(block.number), told)
        kind = UPDATE if box.name == UPDATE else OTHER
        return Bar(box.begin_s, _end(box), kind, "", kind)

    return _named_once(_joined(map(bar_of, computed)))


def _named_once(bars: Sequence[Bar]) -> list[Bar]:
    """Bars in which each block's number stands once, though waits cut the block into several."""
    seen: set[str] = set()
    named = []
    for bar in bars:
        named.append(bar._replace(label="") if bar.told in seen else bar)
        seen.add(bar.told)
    return named


def _by_kind(computed: Sequence[Box], block: Block) -> list[Bar]:
    """The bars of a block's calls by kind of work; weight gradients have their own colour."""

    def bar_of(box: Box) -> Bar:
        kind = kind_of(box.name)
        colour = WEIGHTS if kind == WEIGHTS else block.phase
        return Bar(box.begin_s, _end(box), colour, kind, kind)

    return _joined(map(bar_of, computed))


def kind_of(op: str) -> str:
    """The kind of work of an op, as a reader wants to see it; "" for element-wise ops."""
    if "weight_grad" in op:
        return WEIGHTS
    if "attention" in op:
        return "attention"
    if op.split(".")[-1] in ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm"):
        return "matmul"
    return "convolution" if "conv" in op else ""


def _joined(bars: Iterable[Bar]) -> list[Bar]:
    """Join equal bars that follow each other without a break."""
    joined: list[Bar] = []
    for bar in bars:
        last = joined[-1] if joined else None
        if last and last[2:] == bar[2:] and bar.begin_s < last.end_s + NEAR_S:
            joined[-1] = last._replace(end_s=bar.end_s)
        else:
            joined.append(bar)
    return joined


def _end(box: Box) -> float:
    return box.begin_s + box.seconds
