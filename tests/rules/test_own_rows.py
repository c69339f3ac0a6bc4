"""Rows that each rank sorts by itself: mixtures of experts are cut with the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx, nn

import partc
from partc.checks.local_graph import check
from partc.errors import CheckError
from partc.graph import Graph, collectives, ops, update, value
from partc.graph.rows import RowOrder
from partc.lowering import partition, trace
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, R, Sharding, cut
from partc.rules.experiment import Refused, is_random, joined_error, whole_run
from partc.rules.rows import rows_known, way_of
from partc.rules.signature import Signature, f
from partc.rules.strategy import letter_cut, strategies
from tests.interpret import run_graph
from tests.rule_cases.cases import cases_by_rule

aten = torch.ops.aten
TOKENS, WIDTH, HIDDEN, EXPERTS, PICKS = 12, 16, 24, 4, 2
FLOAT32 = 2e-5  # torch has grouped products in float32 only


class Experts(nn.Module):
    """Two layers of experts; ``unsort`` says how rows find back, ``look`` reads sorted rows."""

    def __init__(self, unsort: Callable[[Tensor, Tensor], Tensor], look: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(unsort, look) for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class ExpertLayer(nn.Module):
    def __init__(self, unsort: Callable[[Tensor, Tensor], Tensor], look: str) -> None:
        super().__init__()
        self.unsort, self.look = unsort, look
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, picked = self.gate(rows).softmax(-1).topk(PICKS)
        experts, order = torch.sort(picked.flatten())
        keys = EXPERTS - 1 - experts if self.look == "counts the other way round" else experts
        counts = torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        y = rows[order // PICKS]
        y = torch._grouped_mm(torch._grouped_mm(y, self.up, ends).relu(), self.down, ends)
        if self.look == "runs over sorted rows":
            y = y + 0.01 * y.cumsum(0)
        if self.look == "mean of sorted rows":
            y = y - y.mean(0)
        y = self.unsort(y * weights.flatten()[order].unsqueeze(-1), order)
        if self.look == "counts":
            y = y * (counts / counts.sum())[picked.flatten()].unsqueeze(-1)
        return x + y.view(-1, PICKS, WIDTH).sum(1).view_as(x)


def by_place(y: Tensor, order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel())
    return y[places]


def by_argsort(y: Tensor, order: Tensor) -> Tensor:
    return y[order.argsort()]


def by_one_row(y: Tensor, order: Tensor) -> Tensor:
    return y + torch.zeros_like(y).index_put([order], y.mean(0, keepdim=True))


def by_scatter(y: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(y).index_put([order], y)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, TOKENS, WIDTH), torch.randint(0, 8, (8, TOKENS))


def loss_of(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), targets.flatten())


def model_of(unsort: Callable[[Tensor, Tensor], Tensor] = by_place, look: str = "") -> nn.Module:
    torch.manual_seed(1)
    return Experts(unsort, look)


def traced(look: str = "") -> Graph:
    return trace(model_of(look=look), batch(), loss_of)


def local_of(mesh: str, plan: str = "ddp", look: str = "") -> Graph:
    graph = traced(look)
    graph.mesh = Mesh.of(mesh)
    return partition(graph, Plan(preset=plan))[1]


def calls_of(graph: Graph, target: Callable[..., object]) -> list[fx.Node]:
    return [node for node in graph.calls() if node.target is target]


def worst_error(look: str, mesh: str, plan: str, microbatches: int = 1) -> float:
    model = model_of(look=look)
    program = partc.compile(
        model, mesh, batch(), loss=loss_of, plan=plan, microbatches=microbatches
    )
    report = partc.verify(program, model, batch(), loss_of, dtype=torch.float32)
    return report.worst.error


# what is traced ----------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize("unsort", [by_place, by_argsort, by_scatter])
def test_every_way_back_is_the_inverse_order(unsort: Callable[[Tensor, Tensor], Tensor]) -> None:
    graph = trace(model_of(unsort), batch(), loss_of)
    assert not calls_of(graph, aten.index_put.default)
    assert len(calls_of(graph, ops.inverse_order)) == 2  # one per layer, for both directions
    assert len(calls_of(graph, aten.sort.default)) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("unsort", [by_place, by_argsort, by_scatter, by_one_row])
def test_gathered_gradients_are_the_scattered_ones(
    unsort: Callable[[Tensor, Tensor], Tensor],
) -> None:
    model = model_of(unsort)
    graph = trace(model, batch(), loss_of)
    loss_of(model, *batch()).backward()
    inputs = dict(zip(graph.inputs, batch(), strict=True))
    found = run_graph(graph, dict(model.named_parameters()), {}, inputs)["grads"]
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=1e-4, atol=1e-6)


def test_what_is_known_of_rows() -> None:
    graph = traced()
    first = {
        node.target: value(node).rows
        for node in reversed(list(graph.calls()))
        if value(node).phase == "F" and "layers.0" in value(node).module
    }
    num = 8 * TOKENS * PICKS
    assert first[aten.floor_divide.default] == RowOrder("places", 1, size=num // PICKS)
    assert first[aten.histc.default] == RowOrder("counts", 1)
    assert first[aten.cumsum.default] == RowOrder("ends", 1)
    assert first[aten._grouped_mm.default] == RowOrder("data", 1)
    assert first[ops.inverse_order] == RowOrder("places", 0, of=1, size=num)
    assert first[aten.topk.default] is None
    assert {rows.order for n in graph.calls() if (rows := value(n).rows)} == {0, 1, 2}


# what moves --------------------------------------------------------------------------------------
def test_only_gradients_move() -> None:
    local = local_of("dp=2")
    moving = [n for n in local.calls() if n.target in collectives.COLLECTIVES]
    weights = {value(n).name for n in local.params.values()}
    assert {n.target for n in moving} <= {collectives.all_reduce, collectives.all_reduce_joined}
    assert len(weights) == 8
    assert all(not value(n).rows for n in moving)
    for product in calls_of(local, aten._grouped_mm.default):
        assert str(value(product).sharding.on("dp")) in ("own 0", "U")


def test_weights_cut_along_experts_hidden_size_need_the_whole_order() -> None:
    local = local_of("tp=2", "megatron-sp")
    assert all(
        not layout.permuted for n in local.calls() for _, layout in value(n).sharding.layouts
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("look", "mesh", "plan", "microbatches"),
    [
        ("", "dp=4", "fsdp", 1),
        ("", "dp=2,tp=2", "fsdp+megatron", 1),
        ("", "dp=2", "ddp", 4),
        ("counts", "dp=2", "ddp", 1),
        ("runs over sorted rows", "dp=2", "ddp", 1),
        ("mean of sorted rows", "dp=2", "ddp", 1),
        ("counts the other way round", "dp=2", "ddp", 1),
    ],
)
def test_same_numbers(look: str, mesh: str, plan: str, microbatches: int) -> None:
    assert worst_error(look, mesh, plan, microbatches) < FLOAT32


@pytest.mark.exhaustive
def test_pipeline_of_experts() -> None:
    model = model_of()
    plan = Plan(preset="ddp", stages=("layers.1",))
    program = partc.compile(
        model, "pp=2,dp=2", batch(), loss=loss_of, plan=plan, microbatches=2, schedule="1f1b"
    )
    report = partc.verify(program, model, batch(), loss_of, dtype=torch.float32)
    assert report.worst.error < FLOAT32


# what the check finds ----------------------------------------------------------------------------
def test_sound_graph_passes() -> None:
    check(local_of("dp=2"))


def test_groups_of_another_layer() -> None:
    local = local_of("dp=2")
    products = calls_of(local, aten._grouped_mm.default)
    products[0].update_arg(2, products[2].args[2])
    with pytest.raises(CheckError, match="grouped_mm"):
        check(local)


def test_rows_of_another_layer() -> None:
    local = local_of("dp=2")
    sort, other = calls_of(local, aten.sort.default)
    assert value(sort).rows != value(other).rows
    update(other, rows=value(sort).rows)
    with pytest.raises(CheckError, match="order 1"):
        check(local)


def test_own_rows_are_not_a_piece_of_the_whole() -> None:
    local = local_of("dp=2")
    product = calls_of(local, aten._grouped_mm.default)[0]
    update(product, sharding=Sharding.of({"dp": cut(0)}, local.mesh))
    with pytest.raises(CheckError):
        check(local)


def test_rows_that_do_not_follow() -> None:
    local = local_of("dp=2")
    relu = calls_of(local, aten.relu.default)[0]
    rows = value(relu).rows
    assert rows is not None
    update(relu, rows=RowOrder("data", rows.order + 1))
    with pytest.raises(CheckError, match="rows"):
        check(local)


# the claim behind the rules ----------------------------------------------------------------------
def letters() -> Iterator[tuple[Signature, tuple[tuple[Layout, ...], tuple[Layout, ...]]]]:
    """Every cut of every rule's cases that rows in another order may take."""
    for cases in cases_by_rule().values():
        for signature in cases:
            node = signature.node()
            found = set()
            for strategy in strategies(node, 2):
                dims = {i: each.dim for i, each in enumerate(strategy.ins) if each.kind == "cut"}
                plain = all(each.outer == 1 for each in (*strategy.ins, *strategy.outs))
                if dims and plain and not strategy.variant:
                    layouts = letter_cut(node, dims)
                    if layouts is not None and layouts not in found:
                        found.add(layouts)
                        yield signature, layouts


def permuted(x: Tensor, layout: Layout) -> Tensor:
    if layout.kind != "cut":
        return x
    order = torch.randperm(x.shape[layout.dim], generator=torch.Generator().manual_seed(7))
    return x.index_select(layout.dim, order)


@pytest.mark.exhaustive
def test_what_may_be_cut_along_rows_takes_each_row_by_itself() -> None:
    tried, wrong = 0, []
    for signature, (ins, outs) in letters():
        exact, operands, results = run_whole(signature)
        if "empty" in signature.op or is_random(exact, operands, results):
            continue
        again = exact.run([permuted(x, layout) for x, layout in zip(operands, ins, strict=True)])
        for have, whole, layout in zip(again, results, outs, strict=True):
            if whole is not None and joined_error([have], R, permuted(whole, layout)) > 1e-3:
                wrong.append(f"{signature}: {ins} -> {outs}")
        tried += 1
    assert wrong == []
    assert tried > 300


def run_whole(signature: Signature) -> tuple[Signature, list[Tensor], list[Tensor | None]]:
    """A call in double, where it exists in double."""
    try:
        return signature.in_float64(), *whole_run(signature.in_float64(), 1)
    except Refused:
        return signature, *whole_run(signature, 1)


def test_rows_of_the_batch_do_not_mix_with_sorted_ones() -> None:
    node = Signature.call(aten.add.Tensor, f(12, 24), f(12, 24)).node()
    first, second = node.all_input_nodes
    update(first, rows=RowOrder("data", 1))
    assert way_of(node) is None
    update(second, rows=RowOrder("data", 2))
    assert way_of(node) is None
    update(second, rows=RowOrder("data", 1))
    way = way_of(node)
    assert way is not None
    assert way.rows == (RowOrder("data", 1),)
    assert rows_known(node) == [RowOrder("data", 1)] * 2
