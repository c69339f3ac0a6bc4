"""What every host of ``benchmarks.sync`` runs: all variants, in turns, one seed after the other."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.call_tape import compute_alone, record
from benchmarks.sync import sides, workload
from benchmarks.sync.meter import Meter, added_bytes
from benchmarks.sync.variants import EXACT, Variant
from benchmarks.workload import Size

TIMEOUT_S = 7200.0
RISE = 10  # steps in which the learning rate rises
NUM_ALONE = 7  # steps without transfers, and transfers without steps, that are timed for each seed
Point = tuple[int, float, float]  # steps taken, seconds of them, the held-out loss behind them


@dataclass(frozen=True)
class Job:
    """What to train: ``steps`` steps each, with a look at the held-out loss behind ``every``."""

    folder: str  # with partc's programs, by variant
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    steps: int
    every: int
    size: Size = workload.SIZE
    rows_of_rank: int = 1

    @classmethod
    def of_json(cls, text: str) -> Job:
        found = json.loads(text)
        every = tuple(Variant(**each) for each in found.pop("variants"))
        size, seeds = Size(**found.pop("size")), tuple(found.pop("seeds"))
        return cls(**found, variants=every, seeds=seeds, size=size)


@dataclass
class Run:
    """One variant with one seed. Bytes and seconds are those of a mean step; ``exposed_s``: while
    computing waited for transfers. ``logged_bytes``: what sums have sent whose size is not known
    before, by the counts that the program has logged.
    """

    variant: str
    seed: int
    curve: list[Point]
    written_bytes: float
    counted_bytes: float
    exposed_s: float
    step_s: float
    logged_bytes: float = 0.0


class Trainer:
    """This rank's sides of all variants; each is begun anew for each seed."""

    def __init__(self, job: Job) -> None:
        self.job, self.num_rows = job, job.rows_of_rank * dist.get_world_size()
        self.sides = {
            v.name: sides.build(v, str(Path(job.folder, v.name)), job.size) for v in job.variants
        }
        self.judge, self.added = sides.Judge(job.size), added_bytes()
        for side in self.sides.values():
            self._warm(side)

    def run(self, variant: Variant, seed: int) -> Run:
        """Train; a look at the held-out loss stops the clock."""
        side, meter = self.sides[variant.name], Meter()
        optimizer = sides.optimizer_of(side.begin(seed), variant.lr)
        curve = [(0, 0.0, self.judge.loss(side.weights()))]
        for step in range(self.job.steps):
            for group in optimizer.param_groups:
                group["lr"] = variant.lr * min(1.0, (step + 1) / RISE)
            _step(side, optimizer, self._rows(seed, step), meter)
            if (step + 1) % self.job.every == 0:
                with meter.step():
                    side.settle()
                meter.pause()
                (seconds,) = sides.slowest([meter.seconds])
                curve.append((step + 1, seconds, self.judge.loss(side.weights())))
                gc.collect()
                dist.barrier()
        return Run(variant.name, seed, curve, *self._means(side, meter))

    def parts(self) -> dict[str, float]:
        """Seconds of an exact step's computing without transfers, and of its transfers alone: the
        least of the samples.
        """
        side = self.sides[EXACT]
        optimizer, batch = sides.optimizer_of(side.begin(0), 0.0), self._rows(0, 0)
        tape = record(lambda: side.forward_backward(batch))

        def step() -> None:
            side.forward_backward(batch)
            optimizer.step()
            optimizer.zero_grad()

        optimizer.zero_grad()
        computing = _samples(lambda: compute_alone(tape, step)[0])
        return {"compute_s": min(computing), "wire_s": min(_samples(tape.replay))}

    def _means(self, side: sides.Side, meter: Meter) -> list[float]:
        """The last figures of a Run. DDP's waits are not seen from Python: of it, what a step takes
        longer than without transfers.
        """
        exposed_s = meter.exposed_s
        if isinstance(side, sides.Peer):
            exposed_s = meter.seconds - self._alone_s(side) * self.job.steps
        values = [meter.written, meter.sent(self.added), exposed_s, meter.seconds, meter.logged]
        return sides.mean_of([value / self.job.steps for value in values])

    def _warm(self, side: sides.Side) -> None:
        """Take two steps, so that connections and buffers are there."""
        optimizer = sides.optimizer_of(side.begin(0), 0.0)
        for _ in range(2):
            _step(side, optimizer, self._rows(0, 0), Meter())

    def _alone_s(self, peer: sides.Peer) -> float:
        """Seconds of a step without transfers."""
        optimizer = sides.optimizer_of(peer.begin(0), 0.0)

        def seconds() -> float:
            meter = Meter()
            with peer.model.no_sync():
                _step(peer, optimizer, self._rows(0, 0), meter)
            return meter.seconds

        return median(_samples(seconds))

    def _rows(self, seed: int, step: int) -> sides.Batch:
        return workload.rows(seed, step, self.num_rows, self.job.size)


def train(job: Job, result: str = "") -> dict[str, Any]:
    """All runs of a job, and what the exact step's parts take before each seed.

    Rank 0 writes them to the file ``result``, whenever all variants have run with one seed more.
    """
    torch.set_num_threads(1)
    trainer = Trainer(job)
    runs: list[Run] = []
    parts: list[dict[str, float]] = []
    for turn, seed in enumerate(job.seeds):
        parts += [trainer.parts()] if EXACT in trainer.sides else []
        first = turn * len(job.variants) // len(job.seeds)  # nobody always has the same neighbours
        for variant in job.variants[first:] + job.variants[:first]:
            runs.append(trainer.run(variant, seed))
            _say(runs[-1])
        found = {"runs": [asdict(run) for run in runs], "parts": parts}
        if result and dist.get_rank() == 0:
            write_whole(Path(result), json.dumps(found))
    return found


def _step(
    side: sides.Side, optimizer: torch.optim.Optimizer, batch: sides.Batch, meter: Meter
) -> None:
    """One step, by the clock."""
    with meter.step():
        optimizer.zero_grad()
        side.forward_backward(batch)
        optimizer.step()
        side.after_update()
    meter.logged += side.logged_bytes()


def _samples(seconds: Callable[[], float]) -> list[float]:
    """Some samples that all ranks take at once, each the slowest rank's."""
    samples = []
    for _ in range(NUM_ALONE):
        dist.barrier()
        samples.append(seconds())
    return sides.slowest(samples)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is always whole, whoever reads it when."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _say(run: Run) -> None:
    if dist.get_rank() == 0:
        what = f"seed {run.seed}, {run.variant}: loss {run.curve[-1][2]:.3f}"
        print(f"{what}, {run.step_s * 1e3:.0f} ms a step", file=sys.stderr, flush=True)


def main(job: str, result: str) -> None:
    """Train as a rank of its own."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    train(Job.of_json(Path(job).read_text()), result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
