"""Measuring on all ranks at the same time: they share memory, processors, and what cools them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from partc.measure.measured import Measured

LEAST_S = 2e-3  # of a sample: far above what a clock resolves
TURNS_S = 4e-2  # of one that sees the turns which processes take on a processor
TRIES, LONGER = 6, 4  # of what is noisy, and how many times as long each one is
MOST_S = 0.5  # of a sample that is made longer


@dataclass(frozen=True)
class Effort:
    """How often a thing is measured, and for how long at most."""

    samples: int = 7
    seconds: float = 0.3  # beyond which there are fewer samples
    tries: int = TRIES  # while measurements are noisy

    def num_samples(self, seconds: float) -> int:
        """How many samples of so many seconds there is time for, five at least."""
        return max(min(self.samples, 5), min(self.samples, int(self.seconds / seconds)))


class Stopwatch:
    """Times work on the devices of all ranks; every rank has to call it alike.

    A time is that of the slowest rank, for what ranks do together; ``of_each`` gives the mean, for
    what each of them does at the same time.
    """

    def __init__(self, backend: str, effort: Effort, of_each: bool = False) -> None:
        self.effort, self.backend, self.is_mean = effort, backend, of_each
        on_gpu = backend == "nccl"
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)

    def of_each(self) -> Stopwatch:
        """One that gives the mean of the ranks' times."""
        return Stopwatch(self.backend, self.effort, of_each=True)

    def time(self, work: str, what: str, amount: float, run: Callable[[], object]) -> Measured:
        """Measure ``run``, again where the first measurements were noisy, with longer samples:
        processes that share processors take turns, and a short sample sees one turn only.
        """
        self.once(run)  # loads and allocates what later runs have
        seconds = self.agreed([self.once(run)])[0]
        times = ceil((TURNS_S if self.is_mean else LEAST_S) / seconds)
        tries: list[Measured] = []
        while not tries or (tries[-1].is_noisy and len(tries) < self.effort.tries):
            num = self.effort.num_samples(seconds * times)
            samples = self.agreed([self._sample(run, times) for _ in range(num)])
            tries.append(Measured(work, what, amount, tuple(samples)))
            times *= LONGER if LONGER * times * seconds < MOST_S else 1
        return min(tries, key=lambda each: each.spread)

    def _sample(self, run: Callable[[], object], times: int) -> float:
        def several() -> None:
            for _ in range(times):
                run()

        seconds = self.once(several) / times
        if self.is_mean:
            self._until_all_are_done(run)
        return seconds

    def _until_all_are_done(self, run: Callable[[], object]) -> None:
        """Go on: a rank that is done early leaves the others a processor that no step leaves."""
        others = dist.barrier(async_op=True)
        while not others.is_completed():
            run()
            self.synchronize()
        others.wait()

    def once(self, run: Callable[[], object]) -> float:
        """The seconds of one run that all ranks begin together."""
        dist.barrier()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Wait until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def agreed(self, seconds: Sequence[float]) -> list[float]:
        """The same times on all ranks: those of the slowest, or the mean."""
        times = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.SUM if self.is_mean else dist.ReduceOp.MAX)
        found: list[float] = (times / dist.get_world_size() if self.is_mean else times).tolist()
        return found

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers between 0 and 1 on the device."""
        return torch.rand(shape, device=self.device).to(dtype)

    @contextmanager
    def groups(self, members: Sequence[Sequence[int]]) -> Iterator[dist.ProcessGroup]:
        """This rank's group of those that all ranks are cut into."""
        made = [dist.new_group(list(ranks), backend=self.backend) for ranks in members]
        mine = next(g for g, ranks in zip(made, members, strict=True) if dist.get_rank() in ranks)
        try:
            yield mine
        finally:
            dist.destroy_process_group(mine)
