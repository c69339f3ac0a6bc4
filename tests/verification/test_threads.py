"""Ranks in threads: what each collective means, and how wrong programs are reported."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from partc.errors import RunError
from partc.plan.mesh import Mesh
from partc.verification.threads import ThreadDist, ThreadMesh, run_ranks

MESH = Mesh((("dp", 2), ("tp", 2)))


def ranks(*values: float) -> Tensor:
    return torch.tensor(values)


def collectives(rank: int, dist: ThreadDist) -> dict[str, Any]:
    group = ThreadMesh(MESH, rank).get_group("tp")
    mine, pair = ranks(float(rank)), ranks(float(rank), 10.0 + rank)
    total, most, gathered, scattered, exchanged = (
        mine.clone(),
        mine.clone(),
        torch.empty(2),
        mine.clone(),
        pair.clone(),
    )
    started = [
        dist.all_reduce(total, group=group, async_op=True),
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group, async_op=True),
        dist.all_gather_into_tensor(gathered, mine, group=group, async_op=True),
        dist.reduce_scatter_tensor(scattered, pair, group=group, async_op=True),
        dist.all_to_all_single(exchanged, pair, group=group, async_op=True),
    ]
    for each in reversed(started):
        assert each is not None
        each.wait()
    sent = mine.clone()
    dist.broadcast(sent, src=3)
    dist.barrier()
    found = (total, most, gathered, scattered, exchanged, sent)
    names = ("total", "most", "gathered", "scattered", "exchanged", "sent")
    return {name: tensor.tolist() for name, tensor in zip(names, found, strict=True)}


def test_each_collective_means_what_torch_says() -> None:
    found = run_ranks(4, collectives)
    assert found[2] == {
        "total": [5.0], "most": [3.0], "gathered": [2.0, 3.0],
        "scattered": [5.0], "exchanged": [2.0, 3.0], "sent": [3.0],
    }  # fmt: skip
    assert found[1]["exchanged"] == [10.0, 11.0]
    assert found[1]["scattered"] == [21.0]


def test_results_are_poison_until_the_wait() -> None:
    def run(rank: int, dist: ThreadDist) -> tuple[float, int]:
        total, count = ranks(1.0), torch.tensor([1])
        works = [dist.all_reduce(t, async_op=True) for t in (total, count)]
        before = total.item(), int(count.item())
        for work in works:
            assert work is not None
            work.wait()
        assert (total.item(), count.item()) == (2.0, 2)
        return before

    for value, count in run_ranks(2, run):
        assert value != value
        assert count == torch.iinfo(torch.int64).min


def different_kinds(rank: int, dist: ThreadDist) -> None:
    if rank:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), src=0)


def different_shapes(rank: int, dist: ThreadDist) -> None:
    dist.all_reduce(torch.ones(4 + rank))


def different_dtypes(rank: int, dist: ThreadDist) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int64 if rank else torch.float32))


def one_skips(rank: int, dist: ThreadDist) -> None:
    if rank:
        dist.all_reduce(torch.ones(4))


def crossed(rank: int, dist: ThreadDist) -> None:
    mesh = ThreadMesh(MESH, rank)
    for axis in ("dp", "tp") if rank in (1, 2) else ("tp", "dp"):
        dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))


def never_waits(rank: int, dist: ThreadDist) -> None:
    dist.all_reduce(torch.ones(4), async_op=True)


def writes_in_flight(rank: int, dist: ThreadDist) -> None:
    sent, got = torch.ones(4), torch.empty(8)
    work = dist.all_gather_into_tensor(got, sent, async_op=True)
    sent.zero_()
    assert work is not None
    work.wait()


def wrong_size(rank: int, dist: ThreadDist) -> None:
    dist.all_gather_into_tensor(torch.empty(7), torch.ones(4))


def in_strides(rank: int, dist: ThreadDist) -> None:
    dist.all_gather_into_tensor(torch.empty(8), torch.ones(1).expand(4))


LINE = r"test_threads.py:\d+"
WRONG = [
    (
        different_kinds,
        2,
        rf"rank 0: broadcast from rank 0 of float32\[4\] at {LINE}\n  rank 1: all_",
    ),
    (different_shapes, 2, r"float32\[4\] at .*\n.*float32\[5\]"),
    (different_dtypes, 2, r"float32\[4\] at .*\n.*int64\[4\]"),
    (one_skips, 2, rf"rank 1 waits at {LINE} .*missing \[0\]\n  finished: \[0\]"),
    (crossed, 4, r"the ranks wait for each other"),
    (never_waits, 2, r"never waited for.*\n  all_reduce"),
    (writes_in_flight, 2, r"written to before the wait"),
    (in_strides, 2, r"sends is not contiguous.*\(0,\)"),
    (wrong_size, 2, r"does not fit.*float32\[7\]"),
]


@pytest.mark.parametrize(("run", "num", "message"), WRONG)
def test_wrong_programs_end_at_once_and_are_explained(run: Any, num: int, message: str) -> None:
    with pytest.raises(RunError, match=message):
        run_ranks(num, run)


def test_an_error_of_one_rank_ends_all() -> None:
    def run(rank: int, dist: ThreadDist) -> None:
        if rank == 1:
            raise ValueError("mine")
        dist.barrier()

    with pytest.raises(ValueError, match="mine") as caught:
        run_ranks(3, run)
    assert caught.value.__notes__ == ["on rank 1 of 3"]


def test_ranks_compute_one_at_a_time() -> None:
    computing: list[int] = []

    def run(rank: int, dist: ThreadDist) -> None:
        for _ in range(3):
            computing.append(rank)
            time.sleep(0.001)  # another thread would run now
            assert computing == [rank]
            computing.remove(rank)
            dist.barrier()

    run_ranks(4, run)
