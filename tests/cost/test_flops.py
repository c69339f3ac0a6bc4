"""FLOPs equal torch's counter where that counts, and hand-made numbers where it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from partc.cost.flops import FORMULAS, node_flops, op_name, total_flops
from partc.graph import Graph, value
from partc.lowering import trace
from tests.build import Build, aten, mlp
from tests.interpret import run_graph
from tests.zoo import MODELS, Case

# by all versions of torch, on a CPU
NOT_COUNTED_BY_TORCH = ("scaled_dot_product", "grouped_mm")


def run(graph: Graph, case: Case) -> None:
    params = {name: p.detach() for name, p in case.model.named_parameters()}
    inputs = dict(zip(graph.inputs, case.inputs, strict=True))
    run_graph(graph, params, dict(case.model.named_buffers()), inputs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", "t5", "resnet", "deepseek_v3"])
def test_as_torch_counts(name: str) -> None:
    case = MODELS[name]()
    graph = trace(case.model, case.inputs, case.loss)
    with FlopCounterMode(display=False) as counter:
        run(graph, case)
    ours = sum(
        node_flops(node)
        for node in graph.calls()
        if not any(word in op_name(node) for word in NOT_COUNTED_BY_TORCH)
    )
    theirs = counter.get_flop_counts()["Global"]
    counted = sum(
        n for op, n in theirs.items() if not any(word in str(op) for word in NOT_COUNTED_BY_TORCH)
    )
    assert ours == counted > 0


def test_local_graphs_count_this_rank() -> None:
    whole, quarter = mlp("dp=1,tp=1"), mlp("dp=2,tp=2")
    assert total_flops(whole) == 2 * 8 * (12 * 16 * 2 + 16 * 10 * 3)
    assert total_flops(quarter) == total_flops(whole) // 4


@pytest.mark.parametrize(
    ("heads", "kv_heads", "suffix"), [(4, 4, ""), (4, 2, ""), (4, 4, "_backward")]
)
def test_attention_as_the_cuda_op(heads: int, kv_heads: int, suffix: str) -> None:
    q, k, v = (2, heads, 8, 16), (2, kv_heads, 10, 16), (2, kv_heads, 10, 12)
    shapes: list[Any] = [(2, heads, 8, 12)] * bool(suffix) + [q, k, v]
    packet = getattr(aten, "_scaled_dot_product_flash_attention" + suffix)
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    mine = FORMULAS[f"aten._scaled_dot_product_flash_attention_for_cpu{suffix}"](None, *shapes)
    assert mine == flop_registry[packet](*tensors)


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((12, 8), (3, 8, 5), (12, 5)),
        ((3, 12, 8), (8, 5), (12, 5)),
        ((12, 8), (8, 5), (3, 12, 5)),
        ((3, 12, 8), (3, 8, 5), (3, 12, 5)),
    ],
)
def test_grouped_mm(a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...]) -> None:
    groups = 3 if len(a) == len(b) == 3 else 1
    assert FORMULAS["aten._grouped_mm"](out, a, b) == 2 * 12 * 8 * 5 * groups


def test_grouped_convolution_counts_its_groups_once() -> None:
    b = Build("dp=1")
    x = b.tensor("input", "x", [2, 6, 8, 8])
    w = b.tensor("param", "w", [6, 1, 3, 3])
    y = b(aten.convolution.default, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 6)
    assert node_flops(y) == 2 * 2 * 8 * 8 * 6 * 9
    assert value(y).shape == (2, 6, 8, 8)


def test_transposed_convolution() -> None:
    b = Build("dp=1")
    x = b.tensor("input", "x", [2, 6, 8, 8])
    w = b.tensor("param", "w", [6, 4, 3, 3])
    y = b(aten.convolution.default, x, w, None, [2, 2], [1, 1], [1, 1], True, [0, 0], 1)
    assert node_flops(y) == 2 * 2 * 8 * 8 * 6 * 4 * 9
