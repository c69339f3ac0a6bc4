"""A finished plan gives the same programs on any machines, also on those that decide otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partc
from partc.machines.topology import Topology
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.traced import Traced

# all that come with partc but the one that decides first; each is tried with one of the plans
OTHERS = (
    "cpu", "p4d-ethernet", "l40s-pcie", "mi300x", "dgx-a100", "dgx-a100-40gb", "dgx-b200",
    "dgx-h200", "h100-pcie",
)  # fmt: skip
FIRST = "dgx-h100"
WIDTH, HEADS, LAYERS = 2048, 16, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            each(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).flatten(2))
        mlp: torch.Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + mlp


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8192, WIDTH), nn.Linear(WIDTH, 8192, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@cache
def step() -> Traced:
    with torch.device("meta"):
        model = Model().to(torch.bfloat16)
        ids = torch.zeros(64, 1024, dtype=torch.int64)
    return Traced(model, (ids,))


@dataclass(frozen=True)
class Case:
    """A plan, the keys that have to be decided, and a machine that decides them otherwise, if one
    is known.
    """

    mesh: str
    plan: Plan
    keys: tuple[str, ...]
    elsewhere: str = "cpu"


PIPELINE: dict[str, Any] = {"preset": "ddp", "microbatches": 4}
CASES = {
    "ddp in buckets": Case("dp=16", Plan(preset="ddp"), ("grad_parts",)),
    "hsdp": Case("dp_replicate=2,dp_shard=8", Plan(preset="hsdp"), ("bucket_copy_mb",)),
    "two data axes": Case(
        "dp_replicate=2,dp_shard=8", Plan(preset="ddp"), ("hierarchical",), "p4d-ethernet"
    ),
    "in pieces": Case(
        "dp=4,tp=4", Plan(preset="fsdp+megatron-sp", overlap_pieces=2), ("flops_per_byte",)
    ),
    "early sums": Case(
        "pp=2,dp=8", Plan(**PIPELINE, schedule="1f1b"), ("early_sums", "sends"), ""
    ),
    "zb-v": Case("pp=2,dp=8", Plan(**PIPELINE, schedule="zb-v"), ("early_sums", "sends"), ""),
    "an order of its own": Case(
        "pp=2,dp=8", Plan(**PIPELINE, schedule="auto"), ("order", "sends"), "l40s-pcie"
    ),
    "auto": Case("dp=4,tp=4", Plan(preset="auto"), ("backend",)),
}  # fmt: skip


def compiled(machine: str, mesh: str, plan: Plan) -> Program:
    axes = Mesh.of(mesh)
    return partc.compile(
        step(), Mesh(axes.axes, Topology.load(machine, devices=axes.num_ranks)), plan=plan
    )


def decided(program: Program, keys: tuple[str, ...]) -> list[object]:
    plan = Plan.parse(program.plan)
    assert all(plan.says(key) for key in keys), program.plan
    return [getattr(plan, key) for key in keys]


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", CASES)
def test_a_plan_decides_for_all_machines(name: str) -> None:
    case, at = CASES[name], [*CASES].index(name)
    first = compiled(FIRST, case.mesh, case.plan)
    keys = decided(first, case.keys)
    if case.elsewhere:
        assert decided(compiled(case.elsewhere, case.mesh, case.plan), case.keys) != keys
    for machine in OTHERS[at :: len(CASES)]:
        again = compiled(machine, case.mesh, Plan.parse(first.plan))
        assert again.plan == first.plan, machine
        assert again.sources == first.sources, machine
