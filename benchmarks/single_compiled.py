"""partc's program for one device with ``compile="inductor"`` beside ``torch.compile`` of the model.

Called by ``python -m benchmarks.single --compile inductor``. All sides compute forward, loss and
backward; those that compile nothing run too. The first step, in which kernels are compiled, is
timed in processes of their own, without any cache.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

import partc
from benchmarks import single
from benchmarks.measure import Side, first_steps, sample
from benchmarks.peer_table import ratio
from partc.verification.processes import Processes

OURS, THEIRS = "partc, inductor", "torch.compile"
HEADS = ("model", "partc ms", "torch.compile ms", "partc/torch.compile", "partc, no compiler ms",
         "eager ms", "partc first step s", "torch.compile first step s", "partc/torch.compile",
         "partc.compile s")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One model: seconds of every step of each side, of first steps, and of ``partc.compile``."""

    name: str
    seconds: dict[str, list[float]]
    first_s: dict[str, list[float]]
    partc_s: float
    error: float

    def __str__(self) -> str:
        times = [f"{1e3 * median(self.seconds[side]):.0f}" for side in SIDES]
        firsts = [self.first_s[side] for side in (OURS, THEIRS)]
        cells = (
            self.name, *times[:2], ratio(self.seconds[OURS], self.seconds[THEIRS]), *times[2:],
            *(f"{median(each):.1f}" for each in firsts), ratio(*firsts), f"{self.partc_s:.1f}",
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


SIDES: dict[str, Callable[[str, str], Side]] = {
    OURS: lambda folder, name: single.generated(f"{folder}/inductor", name),
    THEIRS: lambda folder, name: single.eager(name, compiles=True),
    "partc": lambda folder, name: single.generated(f"{folder}/none", name),
    "eager": lambda folder, name: single.eager(name),
}


def measure(name: str, num_rounds: int, num_compiles: int) -> Row:
    """Compile a model for one device, and measure it beside itself."""
    with tempfile.TemporaryDirectory() as folder:
        model, batch = single.build_model(name), single.build_batch(name)
        partc_s = _save(model, batch, folder, "inductor")
        _save(model, batch, folder, "none")
        first_s: dict[str, list[float]] = {OURS: [], THEIRS: []}
        for _ in range(num_compiles):
            for side, seconds in first_s.items():
                with Processes(1, timeout=single.TIMEOUT_S, quiet=True) as world:
                    seconds += world.run(_first_step, side, folder, name)
        with Processes(1, timeout=single.TIMEOUT_S, quiet=True) as world:
            ((seconds_of, error),) = world.run(_time, folder, name, num_rounds)
    return Row(name, seconds_of, first_s, partc_s, error)


def _save(model: nn.Module, batch: single.Batch, folder: str, compiler: str) -> float:
    """Compile with partc and save; the seconds that it took."""
    start = time.perf_counter()
    program = partc.compile(
        model, {}, batch, loss=single.loss_of, plan="ddp", compile=compiler
    )  # fmt: skip
    seconds = time.perf_counter() - start
    program.save(f"{folder}/{compiler}")
    return seconds


def _first_step(side: str, folder: str, name: str) -> float:
    """Seconds of one side's first step, its kernels compiled anew."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        torch.compiler.config.force_disable_caches = True
        step = SIDES[side](folder, name).forward_backward
        start = time.perf_counter()
        step()
        return time.perf_counter() - start


def _time(folder: str, name: str, num_rounds: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of every side's steps, in turns, and how far their first steps are apart."""
    sides = {word: build(folder, name) for word, build in SIDES.items()}
    firsts = {word: first_steps(side, single.NUM_CHECKED) for word, side in sides.items()}
    *others, (eager_losses, eager_norm) = firsts.values()
    pairs = [pair for losses, norm in others
             for pair in [*zip(losses, eager_losses, strict=True), (norm, eager_norm)]]  # fmt: skip
    error = max(abs(a - b) / abs(b) for a, b in pairs)
    for side in sides.values():
        for _ in range(single.WARM_UP):
            side.step()
    seconds: dict[str, list[float]] = {word: [] for word in sides}
    words = list(sides)
    for turn in range(num_rounds):
        first = turn % len(words)
        for word in [*words[first:], *words[:first]]:
            seconds[word].append(sample(sides[word]).forward_backward_s)
    return seconds, error


def table(rows: Sequence[Row]) -> str:
    """All rows as markdown."""
    return "\n".join([f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}", *map(str, rows)])
