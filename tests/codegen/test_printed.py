"""Functions that programs carry: gathers and sums that are scattered, over gloo and over NCCL."""

from __future__ import annotations

import sys
import textwrap
from types import ModuleType
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.netlab import network
from benchmarks.netlab.network import Link, Network
from partc.api import compile
from partc.codegen.helpers import messages, printed
from partc.plan import Plan
from partc.program.helper_file import helpers_of
from partc.verification.processes import Processes
from partc.verification.verification import verify
from tests.patience import patience
from tests.zoo import MODELS

RANKS = 3
WAYS: dict[str, ModuleType] = {"collectives": printed, "messages": messages}


def parts() -> Tensor:
    """What each rank has, f32[rank, 12, 5]; how these are rounded depends on the order."""
    return torch.randn(RANKS, 12, 5, generator=torch.Generator().manual_seed(0))


def both_ways(way: str) -> tuple[Tensor, Tensor]:
    """This rank's piece of the sum, and what of it gloo's own reduce_scatter gives."""
    group = dist.group.WORLD
    assert group is not None
    mine = parts()[dist.get_rank()]
    own = torch.empty(12 // RANKS, 5)
    dist.reduce_scatter_single(own, mine.clone())
    total, done = WAYS[way].scatter_sum(mine, RANKS, group)
    done.wait()
    assert torch.equal(mine, parts()[dist.get_rank()])
    return total, own


@pytest.mark.gloo
def test_pieces_are_added_in_the_order_of_the_ranks() -> None:
    first, second, third = (part.chunk(RANKS) for part in parts())
    with Processes(RANKS, timeout=patience(), quiet=True) as world:
        for way in WAYS:
            for rank, (total, own) in enumerate(world.run(both_ways, way)):
                assert torch.equal(total, first[rank] + second[rank] + third[rank])
                torch.testing.assert_close(total, own)


def summed_on_a_gpu() -> bool:
    """Whether gradients are summed by gloo's own reduce_scatter, as of ranks that share a GPU."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    vars(messages)["by_messages"] = lambda x, group: False
    weights = [torch.nn.Parameter(torch.zeros(4, 5)), torch.nn.Parameter(torch.zeros(4))]
    grads = {weights[0]: parts()[rank], weights[1]: parts()[rank][:, 0]}
    found, done = messages.scatter_grads(grads, RANKS, group)
    done.wait()
    total = parts().sum(0).chunk(RANKS)[rank]
    return all(map(torch.allclose, found.values(), (total, total[:, 0])))


@pytest.mark.gloo
def test_ranks_on_a_gpu_sum_by_gloo_s_own_collective() -> None:
    with Processes(RANKS, timeout=patience(), quiet=True) as world:
        assert world.run(summed_on_a_gpu) == [True] * RANKS


def gathered() -> list[tuple[Tensor, Tensor]]:
    """What several gathers bring that are under way at once, and gloo's own of each."""
    group = dist.group.WORLD
    assert group is not None
    mine = [each + dist.get_rank() for each in parts()]
    started = [messages.gather(x, RANKS, group) for x in mine]
    own = [torch.empty(RANKS * 12, 5) for _ in mine]
    for whole, x in zip(own, mine, strict=True):
        dist.all_gather_single(whole, x)
    for _, done in reversed(started):
        done.wait()
    return [(whole, each) for (whole, _), each in zip(started, own, strict=True)]


@pytest.mark.gloo
def test_messages_bring_what_a_gather_brings() -> None:
    with Processes(RANKS, timeout=patience(), quiet=True) as world:
        for pairs in world.run(gathered):
            assert all(torch.equal(whole, own) for whole, own in pairs)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "called"), [("gloo", False), ("nccl", True)])
def test_sums_are_scattered_as_the_backend_does(
    backend: Literal["gloo", "nccl"], called: bool
) -> None:
    """By NCCL's collective, and by gloo in another way, as its own sends twice as much."""
    case = MODELS["llama"]()
    plan = Plan(preset="fsdp+megatron-sp", backend=backend)
    made = compile(case.step, "dp=2,tp=2", plan=plan)
    helpers = helpers_of(made.sources)
    assert ("reduce_scatter_single" in helpers) == called
    assert ("Exchanged" in helpers) != called
    verify(made, case.model, case.inputs, case.loss).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("functions", [each.__name__ for each in WAYS.values()], ids=[*WAYS])
@pytest.mark.skipif(bool(network.missing()), reason=f"no {network.missing()}")
def test_half_of_a_tensor_leaves_each_of_two_hosts(functions: str) -> None:
    script = textwrap.dedent(f"""
        import torch, torch.distributed as dist
        from {functions} import scatter_sum
        dist.init_process_group("gloo")
        scatter_sum(torch.ones(1_000_000), 2, dist.group.WORLD)[1].wait()
        dist.barrier()
        dist.destroy_process_group()
    """)
    with Network(2, Link(mbit_per_s=1000.0)) as lab:
        lab.run([sys.executable, "-c", script], timeout_s=patience())
    assert lab.traffic is not None
    assert all(2_000_000 < sent < 2_300_000 for sent in lab.traffic.sent_bytes)
