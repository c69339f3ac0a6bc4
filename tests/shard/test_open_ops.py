"""Openings: what stands there after gives what the op gave before."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from partc.graph import Graph, Value, set_fake, set_value
from partc.graph.graph_edits import run_fake
from partc.passes.shard.decompose_ops import decompose_op, decomposes

aten = torch.ops.aten
X = torch.randn(4, 6, 5, dtype=torch.float64)
C = [torch.rand(6, dtype=torch.float64) + 0.5 for _ in range(6)]
CASES: list[tuple[Any, tuple[Any, ...]]] = [
    (aten._log_softmax.default, (X, 1, False)),
    (aten._log_softmax.default, (X.transpose(1, 2), 1, False)),
    (aten._softmax.default, (X, 2, False)),
    (aten._log_softmax_backward_data.default, (X, X.log_softmax(1), 1, torch.float64)),
    (aten._softmax_backward_data.default, (X, X.softmax(2), 2, torch.float64)),
    (
        aten._native_batch_norm_legit_functional.default,
        (X, C[0], C[1], C[2], C[3], True, 0.1, 1e-5),
    ),
    (
        aten.native_batch_norm_backward.default,
        (X, X.sin(), C[0], C[1], C[2], C[4], C[5], True, 1e-5, [True] * 3),
    ),
]


@pytest.mark.parametrize(("target", "args"), CASES, ids=[str(c[0]) for c in CASES])
def test_opened_gives_the_same(target: Any, args: tuple[Any, ...]) -> None:
    tensors = [a for a in args if isinstance(a, Tensor)]
    expected = target(*args)
    graph, call = _graph(target, args)
    assert decomposes(call)
    decompose_op(graph, call)
    graph.fx.lint()
    assert target not in {n.target for n in graph.calls()}
    got = fx.Interpreter(fx.GraphModule({}, graph.fx)).run(*tensors)
    several = isinstance(expected, (tuple, list))
    for a, b in zip(got, expected if several else [expected], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert a is None or a.is_contiguous() == b.is_contiguous()


def _graph(target: Any, args: tuple[Any, ...]) -> tuple[Graph, fx.Node]:
    """A graph of one call on placeholders; its output is the list of its results."""
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        nodes = []
        for i, arg in enumerate(args):
            if isinstance(arg, Tensor):
                node = graph.placeholder(f"x{i}")
                set_value(node, Value(kind="input", name=f"x{i}"))
                set_fake(node, mode.from_tensor(arg))
                arg = node
            nodes.append(arg)
        call = graph.call_function(target, tuple(nodes))
        set_value(call, Value())
        set_fake(call, run_fake(target, tuple(nodes), {}))
        results = [call]
        if isinstance(call.meta["val"], (tuple, list)):
            results = [
                graph.call_function(operator.getitem, (call, i))
                for i in range(len(call.meta["val"]))
            ]
            for i, result in enumerate(results):
                set_value(result, Value())
                set_fake(result, call.meta["val"][i])
    graph.output(results)
    return Graph(graph), call
