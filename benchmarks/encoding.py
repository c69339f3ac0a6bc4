"""What one rank computes to send gradients with fewer bytes: encode, decode, and keep the rest.

Run ``python -m benchmarks.encoding``, with ``--device cuda`` on a machine with a GPU.
A row has the milliseconds of each scheme per million float32 numbers, beside those of a copy of
them. Transfers do nothing here: what they take follows from the bytes. ``coding`` in
``partc/plan/wires.py`` has the ratio to the copy, of a large sum on an H200.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from types import ModuleType
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from partc.codegen.helpers import low_rank_sums, picked_sums, rounded_sums, voted_sums
from partc.plan.compress import Compress
from partc.plan.wires import ALIKE, WIRES

HELPERS: tuple[ModuleType, ...] = (rounded_sums, picked_sums, low_rank_sums, voted_sums)
ROUNDS, WARM_UP = 15, 5


class Idle:
    """The functions of ``torch.distributed`` for one of many ranks: all ranks have the same."""

    Work, ProcessGroup, ReduceOp = c10d.Work, c10d.ProcessGroup, c10d.ReduceOp

    def wait(self) -> bool:
        return True

    def get_rank(self, group: Any = None) -> int:
        return 0

    def all_reduce(self, x: Tensor, **_: Any) -> Idle:
        return self

    def all_to_all_single(self, arrived: Tensor, x: Tensor, **_: Any) -> Idle:
        arrived.copy_(x)
        return self

    def all_gather_single(self, arrived: Tensor, x: Tensor, **_: Any) -> Idle:
        arrived.view(-1, x.numel()).copy_(x.view(1, -1).expand(arrived.numel() // x.numel(), -1))
        return self


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for module in HELPERS:
        vars(module)["dist"] = Idle()
    print(f"| millions | copy | {' | '.join(WIRES)} |")
    print(f"|---|---|{'---|' * len(WIRES)}")
    for millions in args.millions:
        side = int((millions * 1e6) ** 0.5) // 64 * 64
        flat = torch.randn(side, side, device=args.device).flatten()
        ways = [flat.clone, *(_way(wire, flat, side, args.ranks) for wire in WIRES)]
        texts = [f"{each * 1e9 / flat.numel():.4f}" for each in _medians_s(ways, args.device)]
        print(f"| {millions} | {' | '.join(texts)} |", flush=True)


def _way(wire: str, flat: Tensor, side: int, num: int) -> Callable[[], object]:
    """What one sum of a matrix computes in a scheme, from its first transfer to what is kept."""
    known, how = WIRES[wire], Compress(wire)
    made = next(vars(each)[known.helper] for each in HELPERS if known.helper in vars(each))
    size = how.size(flat.numel())
    state = [
        torch.zeros(each.shape if each.whose == ALIKE else (1, each.shape[1]), device=flat.device)
        for each in known.kept([(side, side)], num, size).values()
    ]
    among: Any = [flat.view(side, side)] if known.takes_grads else num
    given: list[Any] = [None, torch.Generator(flat.device)] if known.drawn else [None]
    given += [how.threshold] if known.has_threshold else []
    finite = torch.tensor(True, device=flat.device)
    to_sum = flat.clone()

    def run() -> None:
        sent = made(to_sum, among, size, state, *given)
        if not sent.passed:
            sent.pass_on()
        sent.wait()
        sent.keep(finite)

    return run


def _medians_s(ways: list[Callable[[], object]], device: str) -> list[float]:
    """Seconds of each way, in turns."""
    rounds = [[_seconds(way, device) for way in ways] for _ in range(WARM_UP + ROUNDS)]
    return [median(each) for each in zip(*rounds[WARM_UP:], strict=True)]


def _seconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
