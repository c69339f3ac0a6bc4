"""Functions that programs carry: sums that are scattered, over gloo and as over NCCL."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.netlab import network
from benchmarks.netlab.network import Link, Network
from partc.api import compile
from partc.codegen.printed import scatter_sum
from partc.processes import Processes
from partc.threads import ThreadDist
from partc.verification import verify
from tests.zoo import MODELS

RANKS = 3


def parts() -> Tensor:
    """What each rank has, f32[rank, 12, 5]; how these are rounded depends on the order."""
    return torch.randn(RANKS, 12, 5, generator=torch.Generator().manual_seed(0))


def both_ways() -> tuple[Tensor, Tensor]:
    """This rank's piece of the sum, and what of it gloo's own reduce_scatter gives."""
    group = dist.group.WORLD
    assert group is not None
    mine = parts()[dist.get_rank()]
    own = torch.empty(12 // RANKS, 5)
    dist.reduce_scatter_single(own, mine.clone())
    total, done = scatter_sum(mine, RANKS, group)
    done.wait()
    assert torch.equal(mine, parts()[dist.get_rank()])
    return total, own


@pytest.mark.gloo
def test_exchanged_pieces_are_added_in_the_order_of_the_ranks() -> None:
    first, second, third = (part.chunk(RANKS) for part in parts())
    with Processes(RANKS, timeout=30.0, quiet=True) as world:
        for rank, (total, own) in enumerate(world.run(both_ways)):
            assert torch.equal(total, first[rank] + second[rank] + third[rank])
            torch.testing.assert_close(total, own)


def test_over_nccl_programs_reduce_and_scatter_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = MODELS["llama"]()
    made = compile(case.model, "dp=2,tp=2", case.inputs, loss=case.loss, plan="fsdp+megatron-sp")
    called: list[str] = []
    scatter = ThreadDist.reduce_scatter_single

    def noted(*args: object, **named: object) -> object:
        called.append("reduce_scatter")
        return scatter(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ThreadDist, "reduce_scatter_single", noted)
    verify(made, case.model, case.inputs, case.loss).check()
    assert not called
    monkeypatch.setattr(ThreadDist, "get_backend", lambda dist, group: "nccl")
    verify(made, case.model, case.inputs, case.loss).check()
    assert called


@pytest.mark.skipif(bool(network.missing()), reason=f"no {network.missing()}")
def test_half_of_a_tensor_leaves_each_of_two_hosts() -> None:
    script = textwrap.dedent("""
        import torch, torch.distributed as dist
        from partc.codegen.printed import scatter_sum
        dist.init_process_group("gloo")
        scatter_sum(torch.ones(1_000_000), 2, dist.group.WORLD)[1].wait()
        dist.barrier()
        dist.destroy_process_group()
    """)
    with Network(2, Link(mbit_per_s=1000.0)) as lab:
        lab.run([sys.executable, "-c", script], timeout_s=60.0)
    assert lab.traffic is not None
    assert all(2_000_000 < sent < 2_300_000 for sent in lab.traffic.sent_bytes)
