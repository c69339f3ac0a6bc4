"""How long gloo takes to sum and scatter, and to gather: by itself, and as programs do it.

Run ``python -m benchmarks.netlab --hosts 2 --mbit 1000 -- python -m benchmarks.reduce_scatter``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from partc.codegen.helpers import messages, printed

NUMELS = tuple(4**i * 256 for i in range(8))  # f32, 1 KB to 16.8 MB
ROUNDS = 9


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(
            "| KB | reduce_scatter ms | all_to_all and sum ms | by messages ms "
            "| all_gather ms | by messages ms |"
        )
        print("|---|---|---|---|---|---|")
    for numel in NUMELS:
        medians_ms = [f"{each * 1e3:.2f}" for each in _medians_s(numel)]
        if dist.get_rank() == 0:
            print(f"| {4 * numel / 1e3:.0f} | {' | '.join(medians_ms)} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _medians_s(numel: int) -> list[float]:
    """Seconds of each way, in turns."""
    num, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    x, whole, piece = torch.ones(numel), torch.empty(numel), torch.empty(numel // num)
    ways: list[Callable[[], object]] = [
        lambda: dist.reduce_scatter_single(piece, x),
        lambda: printed.scatter_sum(x, num, group)[1].wait(),
        lambda: messages.scatter_sum(x, num, group)[1].wait(),
        lambda: dist.all_gather_single(whole, piece),
        lambda: messages.gather_into(whole, piece, group).wait(),
    ]
    rounds = [[_seconds(way) for way in ways] for _ in range(ROUNDS)]
    return [median(seconds) for seconds in zip(*rounds, strict=True)]


def _seconds(run: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
