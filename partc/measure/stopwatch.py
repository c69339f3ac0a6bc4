"""Time work on all ranks at once, as ranks share memory, processors and cooling."""

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

LEAST_S = 2e-3  # seconds of a sample: far above a clock's resolution
TURNS_S = 4e-2  # seconds of a sample that averages the turns of processes on one processor
TRIES, LONGER = 6, 4  # attempts at a noisy measurement, each with samples so much longer
MOST_S = 0.5  # seconds of a sample, beyond which none is made longer


@dataclass(frozen=True)
class Effort:
    """The number of samples of a measurement, and the seconds it may take."""

    samples: int = 7
    seconds: float = 0.3  # beyond which there are fewer samples
    tries: int = TRIES  # while measurements are noisy

    def num_samples(self, seconds: float) -> int:
        """The number of samples of so many seconds each that there is time for; at least five."""
        return max(min(self.samples, 5), min(self.samples, int(self.seconds / seconds)))


class Stopwatch:
    """Times work on the devices of all ranks; all ranks have to make the same calls.

    A time is the slowest rank's, for work that ranks do together. With ``of_each`` it is the mean,
    for work that each rank does by itself at the same time.
    """

    def __init__(self, backend: str, effort: Effort, of_each: bool = False) -> None:
        self.effort, self.backend, self.is_mean = effort, backend, of_each
        on_gpu = backend == "nccl"
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)

    def of_each(self) -> Stopwatch:
        """A stopwatch whose times are the mean of the ranks' times."""
        return Stopwatch(self.backend, self.effort, of_each=True)

    def time(self, work: str, what: str, amount: float, run: Callable[[], object]) -> Measured:
        """Time ``run``; noisy measurements are repeated with longer samples.

        Processes that share processors take turns, and a short sample sees a single turn.
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
        """Keep computing until all ranks are done.

        A rank that stopped early would leave its processor to the others, unlike in a real step.
        """
        others = dist.barrier(async_op=True)
        while not others.is_completed():
            run()
            self.synchronize()
        others.wait()

    def once(self, run: Callable[[], object]) -> float:
        """Seconds of one run, which all ranks begin together."""
        dist.barrier()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def agreed(self, seconds: Sequence[float]) -> list[float]:
        """Times that are equal on all ranks: the slowest rank's, or the mean."""
        times = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.SUM if self.is_mean else dist.ReduceOp.MAX)
        found: list[float] = (times / dist.get_world_size() if self.is_mean else times).tolist()
        return found

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of random numbers between 0 and 1 on the device."""
        return torch.rand(shape, device=self.device).to(dtype)

    @contextmanager
    def groups(self, members: Sequence[Sequence[int]]) -> Iterator[dist.ProcessGroup]:
        """Make a process group per list of ranks, and yield this rank's group."""
        made = [dist.new_group(list(ranks), backend=self.backend) for ranks in members]
        mine = next(g for g, ranks in zip(made, members, strict=True) if dist.get_rank() in ranks)
        try:
            yield mine
        finally:
            dist.destroy_process_group(mine)
