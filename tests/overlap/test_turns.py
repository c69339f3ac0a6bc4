"""Blocks that wait for sums of activations are computed in pieces that take turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc.api import compile
from partc.checks.local_graph import check
from partc.errors import CheckError
from partc.graph import Graph, update, value
from partc.graph.graph_parse import parse_graph
from partc.machines.topology import Topology
from partc.passes.overlap.overlap_collectives import overlap_collectives
from partc.passes.overlap.place_waits import place_waits
from partc.passes.overlap.take_turns import take_turns
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.reports.cost import CostReport
from partc.reports.pipeline_cost import PipelineCost
from partc.traced import Traced
from partc.verification.verification import verify
from tests.overlap.local_layer import LOCAL

Golden = Callable[..., None]

WIDTH, WORDS = 8, 24
IDS = torch.arange(16 * 6).view(16, 6) % WORDS
"""Sixteen samples: two data ranks, two microbatches and four pieces divide them."""


class Block(nn.Module):
    """Attention of two heads and an MLP, each behind a norm and beside its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (w(y).unflatten(-1, (4, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


@cache
def step() -> Traced:
    return Traced(model(), (IDS,), loss)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    result: Tensor = model(ids)
    return result


def compiled(mesh: str | Mesh, preset: str, pieces: int = 0, **fields: int) -> Program:
    plan = Plan(preset=preset, overlap_pieces=pieces, **fields)  # type: ignore[arg-type]
    return compile(step(), mesh, plan=plan)


def machines(bytes_per_s: float, axes: str = "tp=2") -> Mesh:
    """Devices on which this model computes for long, joined by such links."""
    mesh = Mesh.parse(axes)
    cpu = Topology.load("cpu")
    (level,) = cpu.levels
    slow = replace(cpu.device, flops_per_s={"f32": 1e8}, launch_s=1e-9, efficiency={})
    links = replace(level, size=mesh.num_ranks, bytes_per_s=bytes_per_s, latency_s=1e-9)
    groups = ((slow, mesh.num_ranks),)
    return Mesh(mesh.axes, replace(cpu, groups=groups, levels=(links,), start_s=0.0))


SLOW = machines(2e7)


def seconds(program: Program) -> float:
    found: float = program.cost.as_json()["prediction"]["seconds"]
    return found


def peak_bytes(program: Program) -> int:
    assert isinstance(program.cost, CostReport | PipelineCost)
    return max(peak.num_bytes for peak in program.cost.peaks())


def programs(made: Program) -> list[str]:
    """The texts without their headers, in which a plan's notes stand."""
    return [text.partition("import torch")[2] for text in made.sources.values()]


# the pass -----------------------------------------------------------------------------------------
def turned() -> Graph:
    return overlap_collectives(place_waits(take_turns(parse_graph(LOCAL), 2)))


def test_a_layer_in_pieces(golden: Golden) -> None:
    """Each piece's sum is on its way while the other is computed; no rank needs other rows."""
    graph = turned()
    check(graph)
    golden(str(graph))


def test_what_cannot_be_cut_stays() -> None:
    """Eight samples on two ranks have no three pieces."""
    assert str(take_turns(parse_graph(LOCAL), 3)) == str(parse_graph(LOCAL))


@pytest.mark.parametrize("mistake", ["turn", "order", "size", "place"])
def test_mistakes_are_found(mistake: str) -> None:
    graph = turned()
    calls = list(graph.calls())
    if mistake == "turn":
        node = next(n for n in calls if value(n).turn == 1 and "add" in n.name)
        node.args = (
            node.args[0],
            next(n for n in calls if value(n).turn == 0 and "wait" in n.name),
        )
    elif mistake == "order":
        node = next(n for n in calls if "cat" in n.name)
        node.args = (list(reversed(node.args[0])), *node.args[1:])  # type: ignore[arg-type]
    elif mistake == "size":
        node = next(n for n in calls if "slice" in n.name)
        update(node, shape=(8, *value(node).shape[1:]))
    else:
        node = next(n for n in calls if "slice" in n.name and value(n).turn == 1)
        node.args = (*node.args[:2], 0, 2)
    with pytest.raises(CheckError):
        check(graph)


# programs -----------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "preset", "pieces", "fields"),
    [
        ("tp=2", "megatron", 2, {}),
        ("tp=2", "megatron-sp", 4, {}),
        ("tp=4", "megatron", 4, {}),
        ("tp=2", "megatron", 3, {}),  # of the tokens, where no attention stands between
        ("tp=4", "megatron-sp", 2, {"prefetch": 1}),
        ("dp=2,tp=2", "ddp+megatron", 2, {}),
        ("dp=2,tp=2", "fsdp+megatron-sp", 2, {}),
        ("pp=2,tp=2", "megatron", 2, {"microbatches": 2}),
        ("pp=2,tp=2", "megatron-sp", 2, {"microbatches": 4}),
    ],
)
def test_programs_compute_the_same(
    mesh: str, preset: str, pieces: int, fields: dict[str, int]
) -> None:
    made = compiled(mesh, preset, pieces, **fields)
    assert f"overlap_pieces = {pieces}" in made.plan
    assert verify(made, model(), (IDS,), loss).check().worst.error < 1e-12


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,tp=2"])
def test_a_plan_says_if_no_block_can_be_cut(mesh: str) -> None:
    made = compiled(mesh, "megatron", 5)  # neither samples nor tokens
    assert "no block waits for sums that 5 pieces of it could hide" in made.plan
    assert programs(made) == programs(compiled(mesh, "megatron", 1))


def test_golden_block(golden: Golden) -> None:
    source = compiled("tp=2", "megatron", 2).sources["stage0.py"]
    golden(source[source.index("class Block") : source.index("class WordsStep")])


# what is chosen -----------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["megatron", "megatron-sp"])
def test_pieces_where_the_step_is_faster(preset: str) -> None:
    """Not where links take no time."""
    fast = compiled(machines(1e12), preset)
    assert fast.sources == compiled(machines(1e12), preset, 1).sources
    whole, chosen = compiled(SLOW, preset, 1), compiled(SLOW, preset)
    assert "overlap_pieces = 2" in chosen.plan
    assert "overlap_pieces = 1" in fast.plan
    assert seconds(chosen) < 0.85 * seconds(whole)


@pytest.mark.exhaustive
def test_stages_in_pieces_where_the_step_is_faster() -> None:
    slow = machines(2e7, "pp=2,tp=2")
    whole, chosen = (compiled(slow, "megatron", num, microbatches=2) for num in (1, 0))
    assert "overlap_pieces = 2" in chosen.plan
    assert seconds(chosen) < 0.9 * seconds(whole)
    assert verify(chosen, model(), (IDS,), loss).check().worst.error < 1e-12


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", ["tp=2", "pp=2,tp=2"])
def test_no_pieces_where_they_do_not_fit(axes: str) -> None:
    slow = machines(2e7, axes)
    whole, chosen = compiled(slow, "megatron-sp", 1), compiled(slow, "megatron-sp")
    assert peak_bytes(whole) < peak_bytes(chosen)
    small = compiled(slow, "megatron-sp", memory_bytes=peak_bytes(whole))
    assert small.sources == whole.sources
    assert "overlap_pieces = 1" in small.plan
