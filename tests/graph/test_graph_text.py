"""Graphs as text: what a person reads, and that it reads back to the same graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from partc.errors import UsageError
from partc.graph import fake_of, value
from partc.graph.graph_parse import parse_graph
from partc.lowering import trace
from tests.zoo import MODELS

LOCAL = """\
local graph MLP  mesh dp=2 tp=4
param up.weight = tied.weight : f32[32@tp,16]
param qkv.weight : f32[(3 16@tp),16]
buffer mask : bool[6] = [True, False, True, True, False, True]
input x : f32[8@dp,6,16]
forward up
  linear = linear(x, up.weight)                : f32[8@dp,6,32@tp]
forward (loss)
  matmul = matmul(linear, up.weight)           : f32[8@dp,6,16]{U:tp}
  all_reduce = all_reduce(matmul, axis='tp', num=4) : f32[8@dp,6,16]  # hidden behind linear_1
  wait = wait(all_reduce)                      : f32[8@dp,6,16]
  max_1 = max.dim(wait, -1, True)              : (f32[8@dp,6,1], i64[4,6,1])
  getitem = max_1[0]                           : f32[8@dp,6,1]
  to_copy = _to_copy(getitem, dtype=bf16)      : bf16[8@dp,6,1]
  mul = mul.Tensor(to_copy, -1e-06)            : bf16[8@dp,6,1]
  sum_1 = sum(mul)                             : bf16[]{U:dp}
backward up
  weight_grad = weight_grad(linear, x)         : f32[32@tp,16]{U:dp}
outputs
  loss = sum_1
  grad up.weight = weight_grad
  buffer mask = mask
"""


def test_text_of_a_traced_model(golden: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 4, bias=False))
    inputs = (torch.randn(8, 6, 16), torch.randn(8, 6, 4))
    graph = trace(model, inputs, lambda m, x, y: nn.functional.mse_loss(m(x), y))
    golden(str(graph))
    assert str(parse_graph(str(graph))) == str(graph)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "mixtral"])
def test_text_reads_back(name: str) -> None:
    case = MODELS[name]()
    graph = trace(case.model, case.inputs, case.loss)
    again = parse_graph(str(graph))
    assert str(again) == str(graph)
    assert [n.target for n in again.calls()] == [n.target for n in graph.calls()]
    assert [value(n).shape for n in again.calls()] == [value(n).shape for n in graph.calls()]


def test_local_text_reads_back() -> None:
    graph = parse_graph(LOCAL)
    assert str(graph) == LOCAL
    nodes = {node.name: node for node in graph.calls()}
    assert tuple(fake_of(graph.params["qkv.weight"]).shape) == (12, 16)
    assert tuple(fake_of(nodes["matmul"]).shape) == (4, 6, 16)
    assert value(nodes["matmul"]).shape == (8, 6, 16)
    assert value(nodes["all_reduce"]).note == "hidden behind linear_1"
    assert graph.aliases == {"tied.weight": "up.weight"}
    assert graph.constants["mask"].dtype == torch.bool


@pytest.mark.parametrize(
    "line",
    [
        "  y = relu(z) : f32[2]",
        "  y = relu(x) : f32[3]",
        "  y = nothing(x) : f32[2]",
        "  y = relu(relu(x)) : f32[2]",
        "what",
    ],
)
def test_bad_text_names_its_line(line: str) -> None:
    with pytest.raises(UsageError, match="line 4"):
        parse_graph(f"graph M\ninput x : f32[2]\nforward (loss)\n{line}\n")
