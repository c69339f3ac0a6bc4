"""Text of statements: operators keep their meaning, lines fit the page."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from partc.codegen.calls.spell import spell
from partc.codegen.text import PRODUCT, SUM, WIDTH, Line, Text, block, wrap
from partc.graph import Value, set_fake, set_value
from partc.graph.graph_edits import run_fake

aten = torch.ops.aten


def test_weaker_operators_stand_in_parentheses() -> None:
    assert Text("a + b", SUM).at(PRODUCT) == "(a + b)"
    assert Text("a * b", PRODUCT).at(SUM) == "a * b"


@pytest.mark.parametrize(
    "code",
    [
        "value = torch.cat([" + ", ".join(f"operand_{i}" for i in range(30)) + "], 1)",
        "first, second = F.linear("
        + "x" * 50
        + ".reshape(1, 2, 3).transpose(1, 2), "
        + "w" * 50
        + ")",
        ", ".join(f"name_{i}" for i in range(30)) + " = saved",
        'table["a, (b"] = call("' + "," * 60 + '", ' + "y" * 60 + ")",
    ],
)
def test_wrapped_lines_mean_the_same_and_fit(code: str) -> None:
    lines = wrap(code, 8)
    assert all(len(line) <= WIDTH for line in lines)
    wrapped = ast.parse("\n".join(line[8:] for line in lines))
    assert ast.dump(wrapped) == ast.dump(ast.parse(code))


def test_remarks_are_aligned() -> None:
    text = block([Line("a = b", "f32[2]"), Line("longer = c", "f32[3]"), Line("# d")], 1)
    assert text == "    a = b       # f32[2]\n    longer = c  # f32[3]\n    # d"


X = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4) / 7 - 1
ONE = X[1, 2, 3]  # no dims: its sizes are an empty list
INDICES = torch.tensor([2, 0])
CASES = [
    (aten.add.Tensor, (X, X), {"alpha": 2}),
    (aten.sub.Tensor, (X, 2.0), {}),
    (aten.rsub.Scalar, (X, 2.0), {}),
    (aten.pow.Tensor_Scalar, (X, 3), {}),
    (aten.pow.Scalar, (2.0, X), {}),
    (aten.neg.default, (X,), {}),
    (aten.div.Tensor_mode, (X, 0.3), {"rounding_mode": "floor"}),
    (aten.slice.Tensor, (X, 1, -2, 2**63 - 1), {}),
    (aten.slice.Tensor, (X, 2, 0, 3, 2), {}),
    (aten.slice_backward.default, (X, [2, 9, 4], 1, 2, 5, 1), {}),
    (aten.slice_backward.default, (X, [2, 9, 4], 1, -3, 2**63 - 1, 1), {}),
    (aten.select.int, (X, 1, -1), {}),
    (aten.sum.dim_IntList, (X, [1], True), {}),
    (aten.sum.dim_IntList, (X, [0, 2]), {"dtype": torch.float32}),
    (aten.view.default, (X, [24]), {}),
    (aten.expand.default, (X.unsqueeze(0), [5, -1, -1, -1]), {}),
    (aten._to_copy.default, (X,), {"dtype": torch.float32}),
    (aten.constant_pad_nd.default, (X, [1, 2], -1.0), {}),
    (aten._softmax.default, (X, -1, False), {}),
    (aten.scalar_tensor.default, (float("-inf"),), {"dtype": torch.float64}),
    (aten.arange.start_step, (1, 9, 3), {}),
    (aten.copy.default, (X.float(), X[0, 0]), {}),
    (aten.convolution.default, (X, X.new_ones(6, 3, 2), None, [2], [1], [1], False, [0], 1), {}),
    (aten.index.Tensor, (X, [None, INDICES]), {}),
    (aten.native_layer_norm.default, (X, [4], None, None, 1e-5), {}),
    (aten.cumsum.default, (X, 1), {}),
    (aten.repeat_interleave.self_int, (X, 2, 1), {}),
    (aten.repeat_interleave.Tensor, (INDICES,), {"output_size": 2}),
    (aten.bitwise_not.default, (X > 0,), {}),
    (aten.gelu.default, (X,), {"approximate": "tanh"}),
    (aten.elu.default, (X, 0.5), {}),
    (aten.elu.default, (X, 1.6732632423543772, 1.0507009873554805), {}),  # a SELU
    (aten._fft_r2c.default, (X, [1], 0, True), {}),
    (aten.split_with_sizes.default, (X, [1, 2], 1), {}),
    (aten.linalg_vector_norm.default, (X, 2, [-1], True), {}),
    (aten.linalg_vector_norm.default, (X, float("inf"), [0, 2]), {}),
    (aten.nll_loss_backward.default, (ONE, X[0], INDICES[[0, 0, 1]], None, 1, -100, ONE), {}),
]
EMPTY = [
    (aten.reshape.default, (X[:1, 0, 0], []), {}),
    (aten.view.default, (X[:1, 0, 0], []), {}),
    (aten._unsafe_view.default, (X[:1, 0, 0], []), {}),
    (aten.expand.default, (ONE, []), {}),
    (aten.permute.default, (ONE, []), {}),
    (aten.repeat.default, (ONE, []), {}),
    (aten.repeat.default, (X[0, 0, :0], [2]), {}),
    (aten.copy.default, (ONE, X[:1, 0, 0].reshape([])), {}),
    (aten.copy.default, (ONE.float(), ONE), {}),
    (aten.sum.dim_IntList, (X, []), {}),
    (aten.sum.dim_IntList, (ONE, [], True), {}),
    (aten.mean.dim, (X, []), {}),
    (aten.amax.default, (X, []), {}),
    (aten.amax.default, (X, [], True), {}),
    (aten.any.dims, (X > 0, []), {}),
    (aten.all.dims, (X > 0, []), {}),
    (aten.var.correction, (X, []), {"correction": 0}),
    (aten.var_mean.correction, (X, []), {"correction": 0, "keepdim": True}),
    (aten.linalg_vector_norm.default, (X, 2, []), {}),
    (aten.squeeze.dims, (X[:1], []), {}),
    (aten.flip.default, (X, []), {}),
    (aten.roll.default, (X, [5], []), {}),
    (aten.constant_pad_nd.default, (X, [], -1.0), {}),
    (aten.full.default, ([], 2.0), {"dtype": torch.float64}),
    (aten.zeros.default, ([],), {}),
    (aten.ones.default, ([],), {"dtype": torch.int64}),
    (aten.new_zeros.default, (X, []), {}),
    (aten.new_ones.default, (X, []), {}),
    (aten.new_full.default, (X, [], 3.0), {}),
    (aten.expand_copy.default, (ONE, []), {}),
    (aten.as_strided.default, (X, [], []), {}),
    (aten.unsqueeze.default, (ONE, 0), {}),
    (aten.cat.default, ([X[0, 0], X[0, 1]],), {}),
]


Case = tuple[Any, tuple[Any, ...], dict[str, Any]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_spelled_calls_mean_the_op(case: Case) -> None:
    check_meaning(case)


@pytest.mark.parametrize("case", EMPTY, ids=lambda case: str(case[0]))
def test_empty_sizes_and_dims_are_printed(case: Case) -> None:
    check_meaning(case)


def check_meaning(case: Case) -> None:
    """The text of a call gives what the call itself gives."""
    target, args, kwargs = case
    graph = fx.Graph()
    values: dict[str, Tensor] = {}
    with FakeTensorMode() as mode:

        def placed(arg: Any) -> Any:
            if isinstance(arg, list):
                return [placed(a) for a in arg]
            if not isinstance(arg, Tensor):
                return arg
            node = graph.placeholder(f"x{len(values)}")
            values[node.name] = arg
            set_fake(node, mode.from_tensor(arg))
            return node

        node = graph.call_function(target, tuple(placed(a) for a in args), dict(kwargs))
        set_value(node, Value())
        set_fake(node, run_fake(target, node.args, node.kwargs))
    text = str(spell(node, lambda n: Text(n.name), 'torch.device("cpu")'))
    scope = {**values, "torch": torch, "F": torch.nn.functional}
    torch.testing.assert_close(eval(text, scope), target(*args, **kwargs), rtol=0, atol=0)
