"""DualPipeV: two stages per rank in a V, whose steady state is pairs of a forward and a backward.

Source: DeepSeek-V3 (arXiv 2412.19437) and the DualPipe repository, cut in half as by Qi et al. Use
it when a forward and a backward of different microbatches can hide each other's communication, as
with expert parallelism. Here the forward and the backward of a pair stand next to each other,
forward first; the generated program decides which of their transfers overlap.

The published idle time is ``(p - 1) (F&B + B - 3 W)`` on ``p`` ranks (``PP / 2`` in the paper).
``F&B`` is the time of a pair that starts when both may start and gives both results at its end. The
formula is exact for ``F = I``. Here the two run one after the other, so the forward's result is
there before the pair ends: the idle time is ``(p - 1) (F + I - W)`` if ``W <= I <= F <= B``. Every
rank holds at most ``2 p + 1`` stage activations (``PP + 1``). All formulas need ``m >= 2 p``
microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from partc.schedules.actions import Action
from partc.schedules.blocks import Order, Orders, first_microbatches
from partc.schedules.named import schedule


@schedule("dualpipe-v", chunks=(2, 2), split=True, placement="v")
def orders(ranks: int, microbatches: int, chunks: int = 2) -> Orders:
    """The orders of all ranks; ``m < 2 p`` microbatches are the first ``m`` of ``2 p``."""
    assert chunks == 2
    enough = max(microbatches, 2 * ranks)
    all_of_them = [_numbered(_steps(rank, ranks, enough)) for rank in range(ranks)]
    return first_microbatches(all_of_them, microbatches)


def _steps(rank: int, ranks: int, microbatches: int) -> Iterator[tuple[int, str]]:
    """The actions (stage, kind) of one rank; a ``W`` belongs to the oldest ``I`` without a ``W``.

    ``down`` is the rank's stage on the way to the last rank, ``up`` its stage on the way back.
    """
    down, up = rank, 2 * ranks - 1 - rank
    behind = ranks - 1 - rank  # ranks between this one and the turn
    yield from [(down, "F")] * (2 * behind)
    yield from [(down, "F"), (up, "F")] * (rank + 1)
    yield from [(up, "I"), (up, "W"), (up, "F")] * behind
    pairs = [(down, "F"), (up, "B"), (up, "F"), (down, "B")]
    yield from pairs * (microbatches - 2 * ranks + rank + 1)
    yield from [(up, "B"), (up, "F"), (down, "B")] * behind
    # From the middle of the way down on, weight gradients wait, to fill the gaps of the end.
    backwards = [(up, "B"), (down, "B")] * (rank + 1)
    whole = rank + 1
    yield from backwards[:whole]
    yield from [(stage, "I") for stage, _ in backwards[whole:]]
    yield from [(down, "W"), (down, "I")] * behind
    yield from [(down, "W")] * (rank + 1)


def _numbered(steps: Iterable[tuple[int, str]]) -> Order:
    forwards: dict[int, int] = {}  # stage -> the microbatch that has come so far
    backwards: dict[int, int] = {}
    waiting: deque[tuple[int, int]] = deque()
    order: list[Action] = []
    for stage, kind in steps:
        if kind == "W":
            stage, microbatch = waiting.popleft()
        else:
            count = forwards if kind == "F" else backwards
            microbatch = count[stage] = count.get(stage, -1) + 1
        if kind == "I":
            waiting.append((stage, microbatch))
        order.append(Action(stage, kind, microbatch))  # type: ignore[arg-type]
    return tuple(order)
