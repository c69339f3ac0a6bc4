"""A block's gradients leave in parts where the last ones would be late."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from partc.api import compile
from partc.graph import Graph, graph_edits
from partc.machines.topology import Topology
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.verification.verification import verify
from tests.overlap.words import IDS, LAYERS, model, step


def compiled(
    plan: str, bytes_per_s: float, latency_s: float = 1e-6, parts: dict[str, int] | None = None
) -> Program:
    """The program of a machine with so fast a memory that what can be joined is."""
    mesh = Mesh((("dp", 2),), hardware(2, bytes_per_s, latency_s, memory_bytes_per_s=1e14))
    asked = Plan(preset=plan, grad_parts=parts)
    return compile(step(), mesh, plan=asked)


def hardware(
    devices: int, bytes_per_s: float, latency_s: float, memory_bytes_per_s: float
) -> Topology:
    machine = Topology.load("cpu", devices=devices)
    (level,) = machine.levels
    links = replace(level, bytes_per_s=bytes_per_s, latency_s=latency_s)
    groups = tuple(
        (replace(device, memory_bytes_per_s=memory_bytes_per_s), num)
        for device, num in machine.groups
    )
    return replace(machine, groups=groups, levels=(links,), start_s=0.0)


def reductions(program: Program) -> int:
    """How many of a block's, in all blocks."""
    traffic = {each["kind"]: each["count"] for each in program.cost.as_json()["traffic"]}
    return int(sum(traffic.get(kind, 0) for kind in ("all_reduce", "reduce_scatter")) // LAYERS)


def seconds(program: Program) -> float:
    found: float = program.cost.as_json()["prediction"]["seconds"]
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_parts_where_they_end_the_step_earlier(plan: str) -> None:
    """Not where a bucket takes no time, nor where the network is never done with the one before."""
    made = compiled(plan, 1e9)
    assert reductions(made) > 1
    assert reductions(compiled(plan, 1e12)) == reductions(compiled(plan, 1e6, 1e-3)) == 1
    verify(made, model(), (IDS,), lambda m, x: m(x)).check()
    whole = compiled(plan, 1e9, parts={"dp": 1})
    assert reductions(whole) == 1
    assert seconds(whole) > seconds(made)


class Normed(nn.Module):
    """A block whose first and last parameters are small, with large ones between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)
        self.last = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.last(self.down(self.up(self.first(x)).relu()))
        return result


def test_a_bucket_of_second_reductions_waits_for_all_of_its_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The norms' pieces share a bucket, which is there last; their sums over copies are in buckets
    with those of products, which could leave before.
    """
    overtaken = []
    restore_order = graph_edits.restore_order

    def watched(graph: Graph) -> None:
        before = [node.name for node in graph.calls()]
        restore_order(graph)
        overtaken.append(before != [node.name for node in graph.calls()])

    monkeypatch.setattr("partc.passes.overlap.bucket_collectives.restore_order", watched)
    mesh = Mesh((("dp_replicate", 2), ("dp_shard", 2)), hardware(4, 1e9, 1e-6, 1e10))
    net, batch = nn.Sequential(Normed(), Normed(), Normed()), (torch.randn(8, 64),)
    made = compile(net, mesh, batch, loss=squares, plan="hsdp")
    assert any(overtaken)
    verify(made, net, batch, squares).check()


def squares(net: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = net(x).square().mean()
    return loss
