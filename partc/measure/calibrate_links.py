"""Measure collectives over the links of every level, and how much they slow computing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from partc.codegen.helpers.messages import gather_into, scatter_sum
from partc.machines.topology import APART_S, COLLECTIVES
from partc.measure.calibrate_compute import kept_results
from partc.measure.measured import Measured
from partc.measure.stopwatch import Stopwatch

KIB, MIB = 2**10, 2**20
SIZES = tuple(KIB * 4**i for i in range(9))  # 1 KiB to 64 MiB
BESIDE_BYTES = 8 * MIB  # of the all_reduce that runs beside computing
SIDE = {"cpu": 256, "cuda": 4096}  # of the matrices that are multiplied beside it
SMALL_BYTES, MEETINGS = 256 * KIB, 8  # bytes and number of the all_reduces that measure skew
LONGER = 2  # computing takes so many times as long as the transfer, so as to end after it


def level_groups(num_ranks: int, num_local: int) -> list[list[list[int]]]:
    """The groups of ranks that the links of each level join, innermost level first.

    4 ranks on nodes of 2: ``[[[0, 1], [2, 3]], [[0, 2], [1, 3]]]``.
    """
    if num_local in (1, num_ranks):
        return [[[*range(num_ranks)]]]
    nodes = [[*range(first, first + num_local)] for first in range(0, num_ranks, num_local)]
    return [nodes, [list(ranks) for ranks in zip(*nodes, strict=True)]]


def measure_links(
    watch: Stopwatch, groups: list[list[int]], until_s: float, most_bytes: int
) -> list[Measured]:
    """Time every collective over the groups, all groups at once, from small to large messages.

    Ends at messages of ``most_bytes``, or after ``until_s`` seconds.
    """
    start = time.perf_counter()
    found: list[Measured] = []
    with watch.groups(groups) as group:
        for num_bytes in (size for size in SIZES if size <= most_bytes):
            if watch.agreed([time.perf_counter() - start])[0] > until_s:
                break
            for kind in COLLECTIVES:
                found += _measured(watch, kind, num_bytes, group)
    return found


def _measured(
    watch: Stopwatch, kind: str, num_bytes: int, group: dist.ProcessGroup
) -> Iterator[Measured]:
    """Time one collective, whose larger tensor (operand or result) has ``num_bytes``."""
    num = group.size()
    put_in = num_bytes // num if kind == "all_gather" else num_bytes
    x = torch.zeros(max(num, put_in // 4 // num * num), device=watch.device)
    run, messages = _run_of(kind, x, group)
    measured = watch.time(kind, f"f32[{x.numel()}] of {num}", x.nbytes, run)
    each = tuple(seconds / messages for seconds in measured.samples)
    yield Measured(kind, measured.what, measured.amount, each)


def _run_of(kind: str, x: Tensor, group: dist.ProcessGroup) -> tuple[Callable[[], object], int]:
    """A function that runs a collective as programs do, and how many times it does so."""
    num, here = group.size(), group.rank()
    if kind == "all_reduce":
        return lambda: dist.all_reduce(x, group=group), 1
    if kind == "all_gather":
        whole = x.new_empty(num * x.numel())
        return lambda: gather_into(whole, x, group).wait(), 1
    if kind == "reduce_scatter":
        return lambda: scatter_sum(x, num, group)[1].wait(), 1
    if kind == "all_to_all":
        arrived = torch.empty_like(x)
        return lambda: dist.all_to_all_single(arrived, x, group=group), 1
    if kind == "broadcast":  # from each in turn, so that nobody runs ahead

        def from_all() -> None:
            for root in range(num):
                dist.broadcast(x, group_src=root, group=group)

        return from_all, num

    def there_and_back() -> None:
        peer = here ^ 1
        if here < peer < num:
            dist.send(x, group=group, group_dst=peer)
            dist.recv(x, group=group, group_src=peer)
        elif peer < here:
            dist.recv(x, group=group, group_src=peer)
            dist.send(x, group=group, group_dst=peer)

    return there_and_back, 2


def measure_sharing(watch: Stopwatch) -> list[Measured]:
    """Time products on all ranks at once, and on rank 0 alone while the others wait."""
    side = SIDE[watch.device.type]
    matrix = watch.rand(side, side)
    alone = dist.get_rank() == 0

    def once() -> None:
        if alone:
            matrix @ matrix

    what = f"f32[{side},{side}] @ f32[{side},{side}]"
    return [
        watch.of_each().time("all computing", what, 0, lambda: matrix @ matrix),
        watch.time("one computing", what, 0, once),
    ]


def measure_contention(watch: Stopwatch, groups: list[list[int]]) -> list[Measured]:
    """Time an all_reduce, longer computing, and both at once (contention); then computing with
    small all_reduces at the end, and in between (skew).

    The runs are timed in turns, so sample i of each belongs to the same moment.
    """
    side = SIDE[watch.device.type]
    x, small = (torch.zeros(n // 4, device=watch.device) for n in (BESIDE_BYTES, SMALL_BYTES))
    kept = deque(x.view(side, side) for x in kept_results(watch, side * side))

    def multiply() -> None:
        kept.append(kept[-1] @ kept.popleft())

    with watch.groups(groups) as group:
        move = watch.time("all_reduce", "", 0, lambda: dist.all_reduce(x, group=group))
        product = watch.time("matmul", "", 0, multiply)
        times = ceil(LONGER * move.seconds / product.seconds)
        each = ceil(APART_S / product.seconds)

        def compute(times: int) -> None:
            for _ in range(times):
                multiply()

        def both() -> None:
            moving = dist.all_reduce(x, group=group, async_op=True)
            compute(times)
            moving.wait()

        def meet(each: int, before: int = 0) -> None:
            compute(before)
            for _ in range(MEETINGS):
                compute(each)
                dist.all_reduce(small, group=group)

        runs: dict[str, Callable[[], object]] = {
            "transfer": lambda: dist.all_reduce(x, group=group),
            "computing": lambda: compute(times), "both": both,
            "short computing": lambda: compute(MEETINGS * each),
            "meeting at the end": lambda: meet(0, before=MEETINGS * each),
            "meeting": lambda: meet(each),
        }  # fmt: skip
        rounds = watch.effort.num_samples(2 * (LONGER + 1) * move.seconds + 3 * MEETINGS * APART_S)
        samples = [[watch.once(run) for run in runs.values()] for _ in range(rounds)]
    what = f"{times} products of f32[{side},{side}], all_reduce of {x.nbytes} bytes"
    often = f"{MEETINGS} times {each} products, all_reduce of {small.nbytes} bytes"
    slowest = [watch.agreed(each) for each in samples]
    return [
        Measured(name, often if number > 2 else what, 0, tuple(times))
        for number, (name, times) in enumerate(zip(runs, zip(*slowest, strict=True), strict=True))
    ]
