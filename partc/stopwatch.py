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

from partc.measured import Measured

LEAST_S = 2e-3  # of a sample: far above what a clock resolves
TRIES = 3  # while measurements are noisy


@dataclass(frozen=True)
class Effort:
    """How often a thing is measured, and for how long at most."""

    samples: int = 7
    seconds: float = 0.3

    def num_samples(self, seconds: float) -> int:
        """How many samples of so many seconds there is time for, three at least."""
        return max(3, min(self.samples, int(self.seconds / seconds)))


class Stopwatch:
    """Times work on the devices of all ranks; every rank has to call it alike."""

    def __init__(self, backend: str, effort: Effort) -> None:
        self.effort, self.backend = effort, backend
        on_gpu = backend == "nccl"
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)

    def time(self, work: str, what: str, amount: float, run: Callable[[], object]) -> Measured:
        """Measure ``run``, again where the first measurements were noisy."""
        self.once(run)  # loads and allocates what later runs have
        seconds = self.agreed([self.once(run)])[0]
        times = ceil(LEAST_S / seconds)
        num = self.effort.num_samples(seconds * times)
        tries: list[Measured] = []
        while not tries or (tries[-1].is_noisy and len(tries) < TRIES):
            samples = self.agreed([self._sample(run, times) for _ in range(num)])
            tries.append(Measured(work, what, amount, tuple(samples)))
        return min(tries, key=lambda each: each.spread)

    def _sample(self, run: Callable[[], object], times: int) -> float:
        def several() -> None:
            for _ in range(times):
                run()

        return self.once(several) / times

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
        """The times of the slowest rank."""
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found: list[float] = slowest.tolist()
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
