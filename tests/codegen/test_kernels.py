"""Kernels are called by helpers without numbers that say nothing, and give what they give alone."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import partc
from partc.codegen.calls.kernels import as_helper
from partc.codegen.helpers import kernels
from partc.codegen.helpers.needed import Helpers
from partc.codegen.text import Text
from partc.graph import Value, set_fake, set_value
from partc.graph.graph_edits import run_fake

aten = torch.ops.aten
X = torch.linspace(0.1, 0.9, 12, dtype=torch.float64).reshape(4, 3)
Y, ONE = X.flip(0), torch.ones((), dtype=torch.float64)
OF = torch.tensor([0, 2, 1, 2])
LOG_P, WEIGHT = torch.log_softmax(X, 1), X[0]
IMAGE = torch.log_softmax(X.reshape(2, 3, 2, 1), 1)
AT = torch.tensor([[[0], [1]], [[2], [1]]])
COUNT = ONE * 4
CASES = [
    (aten.mse_loss.default, (X, Y, 2), "F.mse_loss"),
    (aten.smooth_l1_loss.default, (X, Y, 2, 0.5), "F.smooth_l1_loss"),
    (aten.huber_loss.default, (X, Y, 2, 0.5), "F.huber_loss"),
    (aten.binary_cross_entropy.default, (X, Y, None, 2), "F.binary_cross_entropy"),
    (aten.binary_cross_entropy_with_logits.default, (X, Y, None, WEIGHT, 2), "F.binary"),
    (aten.soft_margin_loss.default, (X, Y, 2), "F.soft_margin_loss"),
    (aten.mse_loss_backward.default, (ONE, X, Y, 2), "mse_loss_backward"),
    (aten.smooth_l1_loss_backward.default, (ONE, X, Y, 2, 0.5), "smooth_l1_loss_backward"),
    (aten.huber_loss_backward.default, (ONE, X, Y, 2, 0.5), "huber_loss_backward"),
    (aten.binary_cross_entropy_backward.default, (ONE, X, Y, X, 2), "binary_cross_entropy_b"),
    (aten.soft_margin_loss_backward.default, (ONE, X, Y, 2), "soft_margin_loss_backward"),
    (aten.nll_loss_forward.default, (LOG_P, OF, None, 2, -100), "F.nll_loss"),
    (aten.nll_loss_forward.default, (LOG_P, OF, WEIGHT, 2, 1), "nll_loss_and_count"),
    (aten.nll_loss2d_forward.default, (IMAGE, AT, WEIGHT, 2, 1), "nll_loss2d_and_count"),
    (aten.nll_loss_backward.default, (ONE, LOG_P, OF, WEIGHT, 2, 1, COUNT), "nll_loss_backward"),
    (aten.nll_loss2d_backward.default, (ONE, IMAGE, AT, None, 2, -100, COUNT), "nll_loss2d_ba"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_a_helper_gives_what_the_kernel_gives(case: tuple[Any, tuple[Any, ...], str]) -> None:
    target, args, name = case
    graph, values = fx.Graph(), dict[str, Tensor]()
    with FakeTensorMode() as mode:

        def placed(arg: Any) -> Any:
            if not isinstance(arg, Tensor):
                return arg
            node = graph.placeholder(f"x{len(values)}")
            values[node.name] = arg
            set_fake(node, mode.from_tensor(arg))
            return node

        node = graph.call_function(target, tuple(map(placed, args)))
        set_value(node, Value())
        set_fake(node, run_fake(target, node.args, node.kwargs))
        if name.endswith("_and_count"):
            for i in (0, 1):
                graph.call_function(operator.getitem, (node, i))
    text = str(as_helper(node, lambda n: Text(n.name), "", Helpers()))
    assert text.startswith(name)
    found = eval(text, {**vars(kernels), **values, "F": F})
    wanted = target(*args)
    wanted = wanted[0] if name == "F.nll_loss" else wanted
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class Segments(nn.Module):
    """A class for each place of an image, and how far a second image is from a first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        weight = torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=x.dtype)
        far = F.mse_loss(y, y.detach().flip(2)) + torch.linalg.vector_norm(y, dim=1).mean()
        loss: Tensor = F.cross_entropy(y, target, weight, ignore_index=3) + far
        return loss


def test_no_number_of_a_kernel_is_printed() -> None:
    inputs = torch.randn(4, 3, 5, 5), torch.randint(4, (4, 5, 5))
    model = Segments()
    program = partc.compile(model, "dp=2", inputs, plan="ddp")
    text = program.source()
    assert "torch.ops.aten.nll" not in text
    assert "torch.ops.aten.mse" not in text
    assert "nll_loss2d_backward(" in text
    assert "torch.linalg.vector_norm(" in text
    assert partc.verify(program, model, inputs).worst.error < 1e-12
