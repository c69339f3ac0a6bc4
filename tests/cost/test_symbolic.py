"""Formulas in batch, sequence and mesh axes give the numbers of graphs made at other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import pytest
import sympy
import torch
from torch import Tensor

from partc.cost.bytes import total_moved_bytes, traffic
from partc.cost.flops import total_flops
from partc.cost.memory import memory_curve, state_bytes
from partc.cost.symbolic import Samples, symbolic_costs
from partc.graph import Graph
from partc.lowering import trace
from tests.build import Build, aten, mlp
from tests.zoo import FAMILIES

B, S = sympy.symbols("B S", positive=True, integer=True)


@lru_cache
def llama(batch: int, seq: int) -> Graph:
    case = FAMILIES["llama"].case("llama", num_hidden_layers=1)
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    return trace(case.model, (ids, ids), case.loss)


def llama_at(sizes: Mapping[str, int]) -> Graph:
    return llama(sizes["B"], sizes["S"])


def at(expr: sympy.Expr | None, **sizes: int) -> int:
    assert expr is not None
    return int(
        expr.subs({sympy.Symbol(k, positive=True, integer=True): n for k, n in sizes.items()})
    )


@pytest.mark.exhaustive
def test_llama_at_sizes_that_were_not_sampled() -> None:
    costs = symbolic_costs(llama(4, 16), llama_at, {"B": 4, "S": 16})
    assert costs.why == ""
    batch, seq = 6, 22
    graph = llama(batch, seq)
    assert at(costs.flops, B=batch, S=seq) == total_flops(graph)
    assert at(costs.moved_bytes, B=batch, S=seq) == total_moved_bytes(graph)
    assert at(costs.saved_bytes, B=batch, S=seq) == memory_curve(graph).saved_bytes
    assert costs.param_bytes == state_bytes(graph).params
    assert sympy.degree(costs.flops, S) == 2  # attention
    assert sympy.degree(costs.flops, B) == 1


def test_mesh_axes() -> None:
    """One graph's formulas hold for meshes of other sizes."""
    costs = symbolic_costs(mlp("dp=2,tp=2"), lambda sizes: mlp("dp=2,tp=2"), {"B": 8})
    for dp, tp in ((2, 2), (4, 2), (2, 8), (1, 1)):
        graph = mlp(f"dp={dp},tp={tp}")
        assert at(costs.flops, dp=dp, tp=tp) == total_flops(graph)
        assert at(costs.moved_bytes, dp=dp, tp=tp) == total_moved_bytes(graph)
        assert at(costs.param_bytes, dp=dp, tp=tp) == state_bytes(graph).params
        assert at(costs.saved_bytes, dp=dp, tp=tp) == memory_curve(graph).saved_bytes
        sent = {key: at(expr, dp=dp, tp=tp) for key, expr in costs.sent_bytes.items()}
        assert sent == {(t.axis, t.kind): t.sent_bytes for t in traffic(graph)}


def square(sizes: Mapping[str, int]) -> Graph:
    """Every position with every other one, flattened: a dim that is quadratic in S."""
    b = Build("dp=1")
    s = sizes["S"]
    pairs = b(aten.view.default, b.tensor("input", "x", [s, s]), [1, s * s])
    w = b.tensor("param", "w", [3, s * s])
    return b.done(results={"y": b(aten.linear.default, pairs, w)})


def test_quadratic_dims() -> None:
    assert symbolic_costs(square({"S": 8}), square, {"S": 8}).flops == 6 * S**2


def test_sizes_that_round_are_not_confirmed() -> None:
    def windows(sizes: Mapping[str, int]) -> Graph:
        b = Build("dp=1")
        rows = -(-sizes["S"] // 5)
        x, w = b.tensor("input", "x", [rows, 5]), b.tensor("param", "w", [3, 5])
        return b.done(results={"y": b(aten.linear.default, x, w)})

    for size in (5, 16, 64):
        costs = symbolic_costs(windows({"S": size}), windows, {"S": size})
        assert costs.flops is None
        assert costs.why == "sizes in the graph are no polynomials of the input's sizes"
    multiples = symbolic_costs(windows({"S": 50}), windows, {"S": 50}, steps={"S": 5})
    assert multiples.flops == 6 * S


def test_other_calls_at_other_sizes_are_not_confirmed() -> None:
    def unrolled(sizes: Mapping[str, int]) -> Graph:
        b = Build("dp=1")
        x: Tensor | object = b.tensor("input", "x", [4])
        for _ in range(sizes["S"]):
            x = b(aten.add.Tensor, x, 1)
        return b.done(results={"y": x})

    costs = symbolic_costs(unrolled({"S": 8}), unrolled, {"S": 8})
    assert costs.why == "the graph has other calls at other sizes"


def test_samples_are_multiples_of_the_step() -> None:
    assert Samples.of(16) == Samples((16, 8, 12), (15, 5))
    assert Samples.of(4, step=2) == Samples((4, 8, 12), (10, 14))
