"""How long gloo takes to sum and scatter, by its own reduce_scatter and by all_to_all and a sum.

Run ``python -m benchmarks.netlab --hosts 2 --mbit 1000 -- python -m benchmarks.reduce_scatter``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

NUMEL = 4096 * 256  # a gradient of 4.2 MB
ROUNDS = 9


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num = dist.get_world_size()
    x, arrived, piece = torch.ones(NUMEL), torch.empty(NUMEL), torch.empty(NUMEL // num)

    def exchanged() -> None:
        dist.all_to_all_single(arrived, x)
        arrived.view(num, -1).sum(0)

    seconds = {
        "reduce_scatter": _median_s(lambda: dist.reduce_scatter_single(piece, x)),
        "all_to_all and sum": _median_s(exchanged),
        "all_gather": _median_s(lambda: dist.all_gather_single(arrived, piece)),
    }
    if dist.get_rank() == 0:
        print(", ".join(f"{name} {each * 1e3:.1f} ms" for name, each in seconds.items()))
    dist.barrier()
    dist.destroy_process_group()


def _median_s(run: Callable[[], object]) -> float:
    return median(_seconds(run) for _ in range(ROUNDS))


def _seconds(run: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
