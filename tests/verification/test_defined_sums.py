"""The definitions of sums with fewer bytes are those of torch's hooks for DDP."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from partc.plan.compress import Compress
from partc.verification.defined_sums import Site
from partc.verification.processes import Processes

pytestmark = pytest.mark.gloo
STEPS, FIRST = 8, 2  # torch's hook begins in its third step


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 2)
    return nn.Sequential(*layers).double()


def grads_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """In the order of DDP's one bucket: the last parameter's first."""
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in reversed([*model.parameters()]) if p.grad is not None]


def both(hook: Any, state: Any, site: Site) -> float:
    """The largest difference between what DDP with a hook and what a definition make of gradients
    that differ in every step, relative to the largest gradient.
    """
    num, worst = dist.get_world_size(), 0.0
    ddp = DistributedDataParallel(model(), bucket_cap_mb=100)
    ddp.register_comm_hook(state, hook)
    for step in range(STEPS):
        x = torch.randn(6, 12).double() + dist.get_rank()
        mine = torch.cat([g.flatten() for g in grads_of(model(), x)]) / num
        parts = [torch.empty_like(mine) for _ in range(num)]
        dist.all_gather(parts, mine)
        every = torch.stack(parts)
        theirs = grads_of(ddp, x)
        if step == FIRST and isinstance(state, PowerSGDState):
            site.kept = [torch.zeros_like(every), first_columns(theirs, site).expand(num, -1, -1)]
        if step < FIRST:
            continue
        total = site.add(every)
        site.keep()
        flat = torch.cat([g.flatten() for g in theirs])
        worst = max(worst, float((total - flat).abs().max() / flat.abs().max()))
    del ddp
    gc.collect()  # DDP's reducer ends before its process group, not in some later test's
    dist.barrier()
    return worst


def first_columns(grads: list[Tensor], site: Site) -> Tensor:
    """Torch's first Q of all matrices that it sends as products, one behind the other."""
    import numpy as np

    rank = site.how.rank
    thick = [g.shape for g in grads if g.dim() > 1 and 2 * rank * sum(g.shape) < g.numel()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        return torch.cat([torch.randn(b, rank, dtype=torch.float64) for _, b in thick])


def power_sgd(rank: int) -> float:
    torch.manual_seed(1 + dist.get_rank())
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=FIRST)
    shapes = [p.shape for p in reversed([*model().parameters()])]
    return both(powerSGD_hook, state, Site(Compress("power-sgd", rank=rank), shapes))


def fp16() -> float:
    torch.manual_seed(1 + dist.get_rank())
    return both(fp16_compress_hook, None, Site(Compress("fp16", error_feedback=False), []))


def test_power_sgd_is_that_of_torch(world: Processes) -> None:
    assert max(world.run(power_sgd, 1)) < 1e-12
    assert max(world.run(power_sgd, 3)) < 1e-12


def test_fp16_on_two_ranks_is_that_of_torch(world: Processes) -> None:
    """With a sum of two there is no order of rounding, and half of a number is exact."""
    assert max(world.run(fp16, num=2)) == 0.0
