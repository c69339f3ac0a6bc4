"""How long a training step waits for its input where rows are slow to read.

Run ``python -m benchmarks.input_wait``. The demo's model on its four ranks; each rank reads its
rows by ``stage.loader``, and in turn by torch's own ``DataLoader`` with a ``DistributedSampler``,
from a dataset that sleeps for every row, as a disk or a network would, without workers and with
one. Also how long a million shuffled rows of a billion take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import partc
from benchmarks.machine import machine
from examples.demo import BATCH, MESH, NUM_RANKS, PLAN, SEQ, batches, build_model, loss_of
from partc.data.shuffle import shuffled
from partc.plan.mesh import Mesh

NUM_ROWS, WARM_UP = 4096, 3
DATA_RANKS = Mesh.parse(MESH).size("dp")
SHUFFLED, OF = 1_000_000, 1_000_000_000


class SlowRows(Dataset[Tensor]):
    """Rows of bytes, each of which takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.randint(256, (SEQ,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--row-ms", type=float, default=10.0, help="what reading a row takes")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(Path(options.rank), options.steps, options.row_ms / 1e3)
        return
    print(machine())
    print(f"{SHUFFLED:,} shuffled rows of {OF:,}: {1e3 * shuffle_s():.0f} ms")
    print(f"rows of {options.row_ms:g} ms each, {BATCH} in a step of {NUM_RANKS} ranks ({MESH})")
    print(f"{'loader':8}{'workers':>8}{'step ms':>10}{'waiting ms':>12}{'share':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo"
        piece = next(batches(1))[: BATCH // DATA_RANKS]
        partc.compile(build_model(), MESH, (piece,), loss=loss_of, plan=PLAN, batch="local").save(
            path
        )
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={NUM_RANKS}", "-m", "benchmarks.input_wait"]
        command += ["--rank", str(path), f"--steps={options.steps}", f"--row-ms={options.row_ms}"]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def shuffle_s() -> float:
    """The seconds of the fastest of some shuffles."""
    places, times = np.random.default_rng(0).integers(0, OF, SHUFFLED), []
    for epoch in range(5):
        start = time.perf_counter()
        shuffled(places, OF, 0, epoch)
        times.append(time.perf_counter() - start)
    return min(times)


def run_rank(path: Path, steps: int, seconds: float) -> None:
    """Train on this rank with each number of workers; rank 0 prints a row for each."""
    torch.set_num_threads(1)
    stage = partc.load(path).module()
    stage.load_full(build_model())
    optimizer = torch.optim.AdamW(stage.parameters(), fused=True)
    stage.step_on_pieces(optimizer)
    for num_workers in (0, 1, 0, 1):
        ahead: dict[str, Any] = {"prefetch_factor": 8} if num_workers else {}
        for name, make in (("partc", stage.loader), ("torch", torch_loader)):
            loader = make(SlowRows(seconds), num_workers=num_workers, **ahead)
            waited, took = timed(stage, optimizer, loader, steps)
            if dist.get_rank() == 0:
                share = f"{100 * waited / took:.2f} %"
                row = f"{name:8}{num_workers:8}{1e3 * took:10.1f}{1e3 * waited:12.2f}{share:>9}"
                print(row, flush=True)
    dist.destroy_process_group()


def torch_loader(dataset: Dataset[Tensor], **named: Any) -> DataLoader[Tensor]:
    """Torch's own loader of the rows of one data rank; ranks along tp read the same."""
    here = Mesh.parse(MESH).coords(dist.get_rank())["dp"]
    sampler: Any = DistributedSampler(dataset, num_replicas=DATA_RANKS, rank=here)
    return DataLoader(dataset, batch_size=BATCH // DATA_RANKS, sampler=sampler, **named)


def timed(stage: Any, optimizer: Any, loader: Any, steps: int) -> tuple[float, float]:
    """The median seconds that a step waits for its batch, and that it takes with the waiting."""
    waits, times = [], []
    rows = iter(loader)
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        ids = next(rows)
        got = time.perf_counter()
        optimizer.zero_grad()
        stage.step(ids)
        optimizer.step()
        waits.append(got - start)
        times.append(time.perf_counter() - start)
    return statistics.median(waits[WARM_UP:]), statistics.median(times[WARM_UP:])


if __name__ == "__main__":
    main()
