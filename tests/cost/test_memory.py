"""The predicted peak is what the allocator sees, and says who holds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.cost.memory import memory_curve, state_bytes
from partc.cost.storage import replay
from partc.errors import CheckError, UsageError
from partc.graph import Graph, collectives, fake_of, set_fake
from partc.lowering import trace
from partc.plan import Plan
from partc.plan.sharding import U, cut
from tests.allocations import allocations, measured_peak_bytes
from tests.build import Build, aten, mlp
from tests.interpret import run_graph
from tests.zoo import MODELS

TOLERANCE = 0.05


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "resnet"])
def test_peak_as_the_allocator_sees_it(name: str) -> None:
    case = MODELS[name]()
    graph = trace(case.model, case.inputs, case.loss)
    params = {name: p.detach() for name, p in case.model.named_parameters()}
    buffers = dict(case.model.named_buffers())
    inputs = dict(zip(graph.inputs, case.inputs, strict=True))

    def run() -> object:
        return run_graph(graph, params, buffers, inputs)

    run()  # kernels set themselves up on first use
    measured = measured_peak_bytes(run)
    assert memory_curve(graph).peak_bytes == pytest.approx(measured, rel=TOLERANCE)


def test_measure_counts_what_is_live() -> None:
    def run() -> torch.Tensor:
        a = torch.ones(1000)
        b = a + a
        del a
        return b * b

    assert measured_peak_bytes(run) == 8000
    assert allocations(run) == [4000, 4000, -4000, 4000, -4000]


def curve_text(graph: Graph) -> str:
    curve = memory_curve(graph)
    lines = [f"{n:6} B  {name}" for name, n in zip(curve.calls, curve.live_bytes, strict=True)]
    lines += [f"saved for backward {curve.saved_bytes} B", f"peak {curve.peak_bytes} B"]
    return "\n".join([*lines, *(f"    {b.num_bytes:6} B  {b}" for b in curve.holders(3))])


def test_curve(golden: Callable[..., None]) -> None:
    golden(curve_text(mlp()))


def reduction(read_later: bool) -> Graph:
    b = Build("tp=2")
    x = b.tensor("input", "x", [8])
    y = b(aten.add.Tensor, x, 1, tp=U)
    z = b.reduced(y, "tp")
    return b.done(results={"z": b(aten.add.Tensor, z, y if read_later else z, tp=U)})


def test_a_reduction_writes_into_its_operand() -> None:
    assert memory_curve(reduction(read_later=False)).peak_bytes == 2 * 32
    assert memory_curve(reduction(read_later=True)).peak_bytes == 3 * 32


def test_an_operand_in_flight_is_live() -> None:
    """Between start and wait of a gather, its operand stays although nobody reads it."""
    b = Build("dp=2")
    x = b.tensor("input", "x", [8], dp=cut(0))
    y = b(aten.add.Tensor, x, 1, dp=cut(0))
    started = b.collective(collectives.all_gather, y, "dp", dim=0)
    busy = b(aten.mul.Tensor, x, 2, dp=cut(0))
    whole = b(collectives.wait, started)
    curve = memory_curve(b.done(results={"whole": whole, "busy": busy}))
    assert curve.live_bytes == [16, 16 + 32, 16 + 32 + 16, 16 + 32 + 16]


def test_views_share_and_composites_need_more() -> None:
    b = Build("dp=1")
    x = b.tensor("input", "x", [2, 3, 4, 5])
    moved = b(aten.transpose.int, x, 1, 2)
    shaped = b(aten.reshape.default, moved, [2, 4, 15])
    graph = b.done(results={"y": shaped})
    ran = replay(graph)
    assert ran.storages(moved) == ran.storages(x)
    assert memory_curve(graph).live_bytes == [0, 480]


def test_state(golden: Callable[..., None]) -> None:
    names = ("sgd", "momentum", "adamw")
    golden("\n".join(f"{name:<9} {state_bytes(mlp(), name)}" for name in names))


def test_unknown_optimizer() -> None:
    with pytest.raises(UsageError, match="no optimizer is named 'adamm'"):
        state_bytes(mlp(), "adamm")


class Wide(nn.Module):
    """Computes in f32 with what a product gave in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.linear(x).float().sin().sum()
        return total


def test_what_a_widening_cast_reads_is_kept_instead_of_its_result() -> None:
    x = torch.zeros(32, 64, dtype=torch.bfloat16, device="meta")
    saved = [
        partc.compile(Wide(), "dp=1", (x,), loss=lambda model, x: model(x), plan=plan).cost
        for plan in (Plan(preset="ddp", recompute="none"), Plan(preset="ddp"))
    ]
    wide, narrow = (cost.as_json()["saved_bytes"] for cost in saved)
    assert wide - narrow == 32 * 64 * 2


def test_a_graph_is_replayed_again_once_it_has_changed() -> None:
    graph = mlp()
    first, (node, *_) = replay(graph), graph.calls()
    assert replay(graph).results[node] is first.results[node]
    with graph.fx.inserting_after(node):
        relu = graph.fx.call_function(aten.relu.default, (node,))
    node.replace_all_uses_with(relu, delete_user_cb=lambda user: user is not relu)
    changed = replay(graph)
    assert relu in changed.results
    assert changed.results[node] is not first.results[node]
    relu.args = (relu.prev.prev,)
    assert replay(graph).results[node] is not changed.results[node]
    for each in graph.fx.find_nodes(op="placeholder"):
        set_fake(each, fake_of(each).double())
    assert replay(graph).tensors(node)[0].dtype == torch.float64


def test_a_call_that_does_not_run_is_named() -> None:
    graph = trace(nn.Linear(4, 3), (torch.randn(2, 4),), lambda model, x: model(x).sum())
    call = next(node for node in graph.calls() if node.target is aten.linear.default)
    call.update_arg(1, call.args[0])
    with pytest.raises(CheckError, match=r"linear: aten\.linear\.default does not run on these"):
        replay(graph)
