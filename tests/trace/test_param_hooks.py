"""Hooks on gradients: part of the step on whole gradients, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PlanError, TraceError
from partc.lowering import trace
from tests.compare import check

BATCH = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
LAYOUTS = [
    ("dp=2", "fsdp", {}),
    ("dp=2,tp=2", "fsdp+megatron", {}),
    ("pp=2", "ddp", {"stages": ["2"], "microbatches": 1}),
]


def model_of() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).double()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def halved(grad: Tensor) -> Any:
    return grad * 0.5


def to_length_one(grad: Tensor) -> Any:
    return grad / grad.norm()


def clamped_in_place(grad: Tensor) -> None:
    grad.clamp_(-0.01, 0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hook", [halved, to_length_one, clamped_in_place])
def test_a_hook_sees_the_gradient_of_the_whole_batch(hook: Callable[[Tensor], Any]) -> None:
    model = model_of()
    plain = trace(model, BATCH, loss_of)
    model[0].weight.register_hook(hook)
    model[0].weight.register_hook(halved)
    graph = check(model, BATCH, loss_of)
    assert len(list(graph.calls())) > len(list(plain.calls()))
    for mesh, plan, options in LAYOUTS:
        given: Any = options
        program = partc.compile(model, mesh, BATCH, loss=loss_of, plan=plan, **given)
        partc.verify(program, model, BATCH, loss_of).check(1e-12)


def test_in_microbatches_a_hook_is_linear_or_refused() -> None:
    model = model_of()
    model[0].weight.register_hook(halved)
    options: dict[str, Any] = {"loss": loss_of, "plan": "zero2", "microbatches": 2}
    program = partc.compile(model, "dp=2", BATCH, **options)
    partc.verify(program, model, BATCH, loss_of).check(1e-12)
    model[2].bias.register_hook(to_length_one)
    with pytest.raises(PlanError, match="needs the gradient of all microbatches at once"):
        partc.compile(model, "dp=2", BATCH, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["matrix_exp", "householder"])
def test_orthogonal_weights_in_microbatches(form: str) -> None:
    """One form's backward takes the whole gradient of the weight; the other's any part of it."""
    model = model_of()
    nn.utils.parametrizations.orthogonal(model[0], orthogonal_map=form)
    options: dict[str, Any] = {"loss": loss_of, "plan": "ddp", "microbatches": 2}
    if form == "householder":
        program = partc.compile(model, "dp=2", BATCH, **options)
        partc.verify(program, model, BATCH, loss_of).check(1e-12)
        return
    with pytest.raises(PlanError, match="needs the gradient of all microbatches at once"):
        partc.compile(model, "dp=2", BATCH, **options)


def test_equal_blocks_with_hooks_are_told_apart() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))).double()
    model[4].weight.register_hook(halved)
    x = torch.randn(8, 4, dtype=torch.float64)
    program = partc.compile(model, "dp=2", (x,), loss=lambda m, x: m(x).sum(), plan="ddp")
    partc.verify(program, model, (x,), lambda m, x: m(x).sum()).check(1e-12)


def test_a_hook_that_only_looks_is_noted() -> None:
    model, seen = model_of(), []
    model[2].bias.register_hook(lambda grad: seen.append(grad.shape))
    (note,) = trace(model, BATCH, loss_of).frozen
    assert note.startswith("2.bias has a hook (<lambda>, ")
    assert note.endswith("that changes nothing; a program does not call it")


def test_a_hook_behind_the_sum_is_refused() -> None:
    model = model_of()
    handle = model[2].weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(TraceError, match=r"^2\.weight .*once its gradient has been added up"):
        trace(model, BATCH, loss_of)
    with torch.no_grad():
        trace(model, BATCH[:1])
    handle.remove()
    trace(model, BATCH, loss_of)


def test_a_hook_of_every_step_is_refused() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        model[0].weight.register_hook(halved)
        return loss_of(model, x, y)

    with pytest.raises(TraceError, match=r"^0\.weight \(halved, .*another hook on this parameter"):
        trace(model_of(), BATCH, loss)


def module_hooks(model: Any) -> None:
    model[2].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,))
    model[1].register_full_backward_hook(lambda module, grads, outer: (grads[0].clamp(-0.1, 0.1),))
    model[1].register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    model[2].register_forward_hook(lambda module, given, result: result * 3)


def parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])


@pytest.mark.rows(1)
@pytest.mark.parametrize("change", [module_hooks, parametrized])
def test_hooks_of_modules_are_part_of_the_step(change: Callable[[Any], None]) -> None:
    model = model_of()
    change(model)
    program = partc.compile(model, "dp=2", BATCH, loss=loss_of, plan="fsdp")
    partc.verify(program, model, BATCH, loss_of).check(1e-12)


def test_hooks_of_saved_tensors_are_part_of_the_step() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept / 4, lambda kept: kept * 3):
            result = model(x)
        result.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return F.mse_loss(result, y)

    check(model_of(), BATCH, loss)
