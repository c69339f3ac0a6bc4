"""The search's estimates against the programs and simulated schedules that they stand for."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.cost.pipeline_step import plan_step
from partc.lowering import table
from partc.machines.topology import Topology
from partc.passes.search.plans.candidate import Candidate
from partc.passes.search.plans.estimate import Estimator
from partc.passes.search.plans.pipeline_formulas import bubble_s, cut_evenly, sent_s
from partc.passes.search.plans.read_scaling_model import Recompute, scaling_models
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.schedules import make
from partc.schedules.step_costs import Link, StepCosts
from partc.schedules.timing import Costs

SEQ, WIDTH, HEADS = 1024, 2048, 16
TIME = 0.06
# A program's blocks hold values until they return: a third more where there are few blocks.
LEAST_BYTES, MOST_BYTES = 0.66, 1.05


class Block(nn.Module):
    """A GPT's block, all scores in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            each(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        weights = F.softmax(q @ k.transpose(-1, -2), dim=-1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        mlp: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + mlp


class Model(nn.Module):
    """Equal blocks between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 4096, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())


@cache
def step() -> partc.Traced:
    with torch.device("meta"):
        model = Model().to(torch.bfloat16)
    ids = torch.zeros(8, SEQ, dtype=torch.long, device="meta")
    return partc.Traced(model, (ids, ids.clone()), loss_of)


CASES: dict[str, tuple[Candidate, Recompute]] = {
    "fsdp": (Candidate(shard=8, data="fsdp"), "cheap"),
    "ddp": (Candidate(replicate=8), "block"),
    "tensor, blocks": (Candidate(tp=8, word="megatron"), "block"),
    "sequence": (Candidate(tp=8, word="megatron-sp"), "attention"),
    "pipeline": (Candidate(pp=2, tp=4, word="megatron", microbatches=4), "cheap"),
    "all forwards first": (
        Candidate(pp=2, tp=4, word="megatron", microbatches=4, schedule="gpipe"),
        "cheap",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_programs_take_what_is_estimated(name: str) -> None:
    one, again = CASES[name]
    machine = Topology.load("dgx-a100", 8)
    # estimates are of whole blocks: in pieces these programs are faster
    plan = Plan(preset=one.preset, recompute=again, microbatches=one.microbatches, overlap_pieces=1)
    plan = plan.changed(schedule=one.schedule, virtual_stages=one.chunks) if one.pp > 1 else plan
    cost = partc.compile(step(), one.mesh(machine), plan=plan).cost.as_json()
    (laws,) = scaling_models(step().graph(), one.word, [again], table())
    found = Estimator(laws, machine).estimate(one)
    assert found.step_s == pytest.approx(cost["prediction"]["seconds"], rel=TIME)
    peak = max(rank["peak_bytes"] for rank in cost.get("ranks", [cost]))
    assert LEAST_BYTES < found.peak_bytes / peak < MOST_BYTES


@pytest.mark.exhaustive
def test_what_zero1_gathers_is_waited_for_once_a_step() -> None:
    """Over slow links, where gathers in every microbatch would take as long as all computing."""
    machine, one = Topology.load("l40s-pcie", 8), Candidate(shard=8, data="zero1", microbatches=8)
    with torch.device("meta"):
        model, ids = Model().to(torch.bfloat16), torch.zeros(64, SEQ, dtype=torch.long)
    traced = partc.Traced(model, (ids, ids.clone()), loss_of)
    plan = Plan(preset="zero1", microbatches=8, recompute="cheap", overlap_pieces=1)
    cost = partc.compile(traced, one.mesh(machine), plan=plan).cost.as_json()
    (laws,) = scaling_models(traced.graph(), "", ["cheap"], table())
    found = Estimator(laws, machine).estimate(one).step_s
    assert found == pytest.approx(cost["prediction"]["seconds"], rel=0.1)


# turns --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("send_s", [0.0, 0.2])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 16), (8, 64)])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("interleaved-1f1b", 3), ("zb-h1", 1),
     ("gpipe", 1), ("zb-h2", 1), ("looped-bfs", 3), ("zb-v", 2), ("v-half", 2), ("v-min", 2)],
)  # fmt: skip
def test_even_stages_take_turns_as_simulated(
    schedule: str, chunks: int, ranks: int, microbatches: int, send_s: float
) -> None:
    num = ranks * chunks
    each, none = (1.0,) * num, (0.0,) * num
    costs = Costs(each, each, each, transfer=none, activation=none, waiting=none)
    links = [Link(send_s, 1.0)] * num
    order = make(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks)
    step = plan_step(order, StepCosts.of(costs, message=none, links=links))
    turns = 3.0 * chunks * microbatches
    one = Candidate(pp=ranks, microbatches=microbatches, schedule=schedule, chunks=chunks)
    waits = bubble_s(one, 3.0 * (ranks - 1), 1.0 * (ranks - 1))
    waits += sent_s(one, send_s)
    assert turns + waits == pytest.approx(step.simulated.makespan, rel=1e-9)


def test_stages_are_as_even_as_they_can_be() -> None:
    long, short = np.array([1.0] * 8 + [1.9]), np.array([5.0, 1.0, 1.0, 1.0])
    assert cut_evenly([long] * 4) == [(0, 3), (3, 6), (6, 8), (8, 9)]
    assert cut_evenly([short] * 2) == [(0, 1), (1, 4)]
    assert cut_evenly([np.ones(2)] * 3) == [(0, 1), (1, 2), (2, 2)]
    assert cut_evenly([np.ones(9), 2 * np.ones(9)]) == [(0, 6), (6, 9)]


def test_axes_of_a_mesh_are_a_candidates() -> None:
    assert str(Candidate(pp=2, replicate=3, tp=4, word="megatron").mesh(None)) == str(
        Mesh((("pp", 2), ("dp", 3), ("tp", 4)))
    )
