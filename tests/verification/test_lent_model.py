"""The reference is the user's own model, hooks and all, which is left as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import partc
from partc.verification.piece_norms import Pieces
from partc.verification.reference import eager

BATCH = torch.randn(8, 6), torch.randn(8, 4)


def model_of() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def test_a_hook_that_the_program_has_not_is_found() -> None:
    model = model_of()
    program = partc.compile(model, "dp=2", BATCH, loss=loss_of, plan="ddp")
    partc.verify(program, model, BATCH, loss_of).check(1e-11)
    model[2].weight.register_hook(lambda grad: grad * 0.5)
    wrong = {
        row.name for row in partc.verify(program, model, BATCH, loss_of).rows if row.error > 1e-6
    }
    assert wrong == {"2.weight"}


def test_hooks_see_the_gradient_of_all_pieces() -> None:
    model, seen = model_of(), []
    model[2].weight.register_hook(lambda grad: seen.append(grad.clone()))
    grads = eager(model, BATCH, loss_of, pieces=Pieces(2, 2, dims=(0, 0))).grads
    (grad,) = seen
    assert torch.equal(grad, grads["2.weight"])


def test_the_model_is_left_as_it_was() -> None:
    model = model_of()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: (each, each.clone(), each.data_ptr()) for name, each in tensors.items()}
    reference = eager(model, BATCH, loss_of)
    assert reference.grads["0.weight"].dtype == torch.float64
    assert reference.buffers["1.num_batches_tracked"].item() == 1
    for name, each in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        same, content, address = before[name]
        assert each is same
        assert torch.equal(each, content)
        assert each.data_ptr() == address
    assert torch.equal(model[0].weight.grad, torch.ones(8, 6))
    assert model[2].weight.grad is None
