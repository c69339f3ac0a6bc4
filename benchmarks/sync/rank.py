"""What every host of ``benchmarks.sync`` runs: all variants, in turns, one seed after the other."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.call_tape import compute_alone, record
from benchmarks.measure import written_bytes
from benchmarks.sync import workload
from benchmarks.sync.sides import Judge, Ours, Peer, Side, build, mean_of, optimizer_of, slowest
from benchmarks.sync.variants import EXACT, Variant
from benchmarks.workload import Size
from partc.cost.bytes import sent_share
from partc.measure.timed_calls import HostClock, TransferTimes

TIMEOUT_S = 3600.0
RISE = 10  # steps in which the learning rate rises
NUM_ALONE = 9  # steps without transfers, and transfers without steps, that are timed
SMALL = 64  # elements of the calls that show what gloo adds to a transfer


@dataclass(frozen=True)
class Job:
    """What to train: ``steps`` steps each, with the held-out loss behind every ``every``."""

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
    """One variant with one seed. Bytes and seconds are those of a mean step.

    ``curve``: steps taken, seconds of them on the slowest rank, the held-out loss behind them.
    ``exposed_s``: while computing waited for transfers.
    """

    variant: str
    seed: int
    curve: list[tuple[int, float, float]]
    written_bytes: float
    counted_bytes: float
    exposed_s: float
    step_s: float


@dataclass
class Meter:
    """What the steps of one run have taken on this rank so far."""

    seconds: float = 0.0
    exposed_s: float = 0.0
    written: int = 0
    calls: Counter[str] = field(default_factory=Counter)


def train(job: Job) -> dict[str, Any]:
    """All runs of a job on this rank, and what the exact step's parts take; equal on all ranks."""
    torch.set_num_threads(1)
    sides = {v.name: build(v, str(Path(job.folder, v.name)), job.size) for v in job.variants}
    judge, added = Judge(job.size), added_bytes()
    alone = {name: _warm(side, job) for name, side in sides.items()}
    runs = []
    for turn, seed in enumerate(job.seeds):
        first = turn * len(job.variants) // len(job.seeds)  # nobody always has the same neighbours
        for variant in job.variants[first:] + job.variants[:first]:
            side = sides[variant.name]
            runs.append(_run(job, variant, side, seed, judge, added, alone[variant.name]))
            if dist.get_rank() == 0:
                last = runs[-1]
                print(f"seed {seed}: {variant.name}, loss {last.curve[-1][2]:.3f}, "
                      f"{last.step_s * 1e3:.0f} ms a step", file=sys.stderr, flush=True)  # fmt: skip
    exact = sides.get(EXACT)
    parts = _parts(exact, job) if isinstance(exact, Ours) else {}
    return {"runs": [asdict(run) for run in runs], "parts": parts, "added_bytes": added}


def _run(
    job: Job, variant: Variant, side: Side, seed: int, judge: Judge, added: dict[str, float],
    alone_s: float,
) -> Run:  # fmt: skip
    parameters = side.begin(seed)
    optimizer, meter = optimizer_of(parameters, variant.lr), Meter()
    curve = [(0, 0.0, judge.loss(side.weights()))]
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = variant.lr * min(1.0, (step + 1) / RISE)
        _step(side, optimizer, workload.rows(seed, step, _num_rows(job), job.size), meter)
        if (step + 1) % job.every == 0:
            (seconds,) = slowest([meter.seconds])
            curve.append((step + 1, seconds, judge.loss(side.weights())))
            gc.collect()
            dist.barrier()
    return _result(job, variant, seed, curve, meter, added, alone_s)


def _step(side: Side, optimizer: torch.optim.Optimizer, batch: Any, meter: Meter) -> None:
    """One step, by the clock."""
    times = TransferTimes(HostClock(), {})
    before, start = written_bytes() or 0, time.perf_counter()
    with times.on():
        optimizer.zero_grad()
        side.forward_backward(batch)
        optimizer.step()
        side.after_update()
    meter.seconds += time.perf_counter() - start
    meter.written += (written_bytes() or 0) - before
    meter.exposed_s += sum(end - begin for t in times.transfers for begin, end in t.waits)
    meter.calls.update(each.kind for each in times.transfers)


def _result(
    job: Job, variant: Variant, seed: int, curve: list[tuple[int, float, float]], meter: Meter,
    added: dict[str, float], alone_s: float,
) -> Run:  # fmt: skip
    """The figures of a mean step; of DDP, whose waits Python does not see, what a step takes
    longer than without transfers.
    """
    extra = sum(added[kind] * count for kind, count in meter.calls.items())
    exposed = meter.seconds - alone_s * job.steps if variant.is_peer else meter.exposed_s
    values = [meter.written, meter.written - extra, exposed, meter.seconds]
    means = mean_of([value / job.steps for value in values])
    return Run(variant.name, seed, curve, *means)


def _warm(side: Side, job: Job) -> float:
    """Take two steps, so that connections and buffers are there; seconds of a peer's step without
    transfers.
    """
    parameters = side.begin(0)
    optimizer, batch = optimizer_of(parameters, 0.0), workload.rows(0, 0, _num_rows(job), job.size)
    for _ in range(2):
        _step(side, optimizer, batch, Meter())
    if not isinstance(side, Peer):
        return 0.0
    samples = []
    for _ in range(NUM_ALONE):
        meter = Meter()
        with side.model.no_sync():
            dist.barrier()
            _step(side, optimizer, batch, meter)
        samples.append(meter.seconds)
    return median(slowest(samples))


def _parts(side: Ours, job: Job) -> dict[str, float]:
    """Seconds of an exact step's computing without transfers, and of its transfers alone."""
    optimizer = optimizer_of(side.begin(0), 0.0)
    batch = workload.rows(0, 0, _num_rows(job), job.size)
    optimizer.zero_grad()
    tape = record(lambda: side.forward_backward(batch))
    computing, moving = [], []

    def step() -> None:
        optimizer.zero_grad()
        side.forward_backward(batch)
        optimizer.step()

    for _ in range(NUM_ALONE):
        dist.barrier()
        computing.append(compute_alone(tape, step)[0])
        dist.barrier()
        moving.append(tape.replay())
    return {"compute_s": median(slowest(computing)), "wire_s": median(slowest(moving))}


def added_bytes() -> dict[str, float]:
    """What gloo writes for one call of each kind beside the numbers: the heads of its messages."""
    num = dist.get_world_size()
    x, whole = torch.zeros(SMALL * num), torch.zeros(SMALL * num * num)
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_single(whole, x),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(x), x),
    }
    found = {}
    for kind, call in calls.items():
        call()
        dist.barrier()
        before = written_bytes() or 0
        call()
        top, bottom = sent_share(kind, num)
        found[kind] = (written_bytes() or 0) - before - x.nbytes * top / bottom
        dist.barrier()
    return dict(zip(found, mean_of(list(found.values())), strict=True))


def _num_rows(job: Job) -> int:
    return job.rows_of_rank * dist.get_world_size()


def main(job: str, result: str) -> None:
    """Train as a rank of its own; rank 0 writes what was found."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    found = train(Job.of_json(Path(job).read_text()))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
