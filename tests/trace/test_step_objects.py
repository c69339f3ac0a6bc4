"""A step that exchanges modules, parameters or hooks, or reads its gradients, is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc.errors import TraceError
from partc.lowering import trace
from tests.compare import check

X = torch.randn(8, 6)
Forward = Callable[[Any, Tensor], Tensor]


class Layers(nn.Module):
    """Two layers, buffers and a list, of which the given function makes use."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.old = copy.deepcopy(self.one).requires_grad_(False)
        self.kept = nn.Parameter(torch.zeros(6, 6), requires_grad=False)
        self.many = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.weight: Tensor
        self.register_buffer("p", torch.ones(6))
        self.register_buffer("q", torch.zeros(6))
        self.register_buffer("weight", torch.zeros(6, 6))
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.many:
            x = layer(x)
        x = self.two(self.one(x).tanh()) + self.old(x) + F.linear(x, self.kept + self.weight)
        return self.function(self, x).square().mean()


def copied_layer(model: Any, y: Tensor) -> Any:
    model.old = copy.deepcopy(model.one).requires_grad_(False)
    return y


def other_parameter(model: Any, y: Tensor) -> Any:
    model.kept = nn.Parameter(model.one.weight.detach().clone(), requires_grad=False)
    return y


def swapped_layers(model: Any, y: Tensor) -> Any:
    model.one, model.two = model.two, model.one
    return y


def reversed_list(model: Any, y: Tensor) -> Any:
    model.many = model.many[::-1]
    return y


def swapped_entries(model: Any, y: Tensor) -> Any:
    own = model.many._modules
    own["0"], own["1"] = own["1"], own["0"]
    return y


def other_order(model: Any, y: Tensor) -> Any:
    model.many._modules["0"] = model.many._modules.pop("0")
    return y


def removed_layer(model: Any, y: Tensor) -> Any:
    del model.old
    return y


def tied_weights(model: Any, y: Tensor) -> Any:
    model.two.weight = model.one.weight
    return y


def memory_of_a_weight(model: Any, y: Tensor) -> Any:
    model.weight = model.one.weight.detach()
    return y


def memory_of_a_buffer(model: Any, y: Tensor) -> Any:
    model.p.add_(1)
    model.q = model.p
    return y


def longer_buffer(model: Any, y: Tensor) -> Any:
    model.p = torch.cat([model.p, y.detach().mean(0)])
    return y


def other_dtype(model: Any, y: Tensor) -> Any:
    model.p = model.p.double()
    return y


def data_of_a_buffer(model: Any, y: Tensor) -> Any:
    model.p.data = model.p.data * 0.9
    return y


def data_of_a_weight(model: Any, y: Tensor) -> Any:
    model.one.weight.data = F.normalize(model.one.weight.data, dim=1)
    return y


def frozen_layer(model: Any, y: Tensor) -> Any:
    model.one.requires_grad_(False)
    return y


def counted_on_a_weight(model: Any, y: Tensor) -> Any:
    weight = model.one.weight
    weight.count = getattr(weight, "count", 0) + 1
    return y


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("forward", "where", "what"),
    [
        (copied_layer, "old", "the step puts another module in its place"),
        (other_parameter, "kept", "the step puts another parameter in its place"),
        (swapped_layers, "one", "the step puts another module in its place"),
        (reversed_list, "many", "the step puts another module in its place"),
        (swapped_entries, "many.0", "the step puts another module in its place"),
        (other_order, "many.1", "the step changes the order of the modules"),
        (removed_layer, "old", "the step removes this module"),
        (tied_weights, "two.weight", "the step puts another parameter in its place"),
        (memory_of_a_weight, "weight", "the step makes it share memory with one.weight"),
        (memory_of_a_buffer, "q", "the step makes it share memory with p"),
        (longer_buffer, "p", "it is f32[6], and the step makes it f32[12]"),
        (other_dtype, "p", "it is f32[6], and the step makes it f64[6]"),
        (data_of_a_buffer, "p", "the step assigns to its .data"),
        (data_of_a_weight, "one.weight", "the step assigns to its .data"),
        (frozen_layer, "one.weight", "the step sets its requires_grad to False and leaves it so"),
        (counted_on_a_weight, "one.weight.count", "the step sets this attribute of a parameter"),
    ],
)
def test_what_a_step_exchanges_is_refused(forward: Forward, where: str, what: str) -> None:
    model = Layers(forward)
    before = [*model.named_modules()], {k: id(v) for k, v in model.named_parameters()}
    with pytest.raises(TraceError) as caught:
        trace(model, (X,))
    assert (caught.value.where, caught.value.what) == (where, what)
    after = [*model.named_modules()], {k: id(v) for k, v in model.named_parameters()}
    assert before == after


def renewed_buffers(model: Any, y: Tensor) -> Any:
    model.weight = model.one.weight.detach().clone()
    model.p, model.q = torch.stack([model.q, y.detach().mean(0)]).unbind(0)
    model.two.requires_grad_(False)
    y = y + model.two(y) * model.one.weight.scale
    model.two.requires_grad_(True)
    model.act = nn.ReLU()
    return model.act(y)


def test_new_values_of_buffers_and_what_is_put_back_are_right() -> None:
    model = Layers(renewed_buffers)
    model.one.weight.scale = 0.5  # type: ignore[attr-defined]
    check(model, (X,))


# hooks ----------------------------------------------------------------------------------------
def test_hooks_that_a_step_adds_or_removes_are_refused_and_restored() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def once(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        handle.remove()
        return result * 2

    handle = model[0].register_forward_hook(once)
    with pytest.raises(TraceError, match=r"0 .*once.*removes a hook from this module"):
        trace(model, (X,), loss=lambda m, x: m(x).square().mean())
    assert [*model[0]._forward_hooks.values()] == [once]
    handle.remove()
    assert not model[0]._forward_hooks

    def adds(model: nn.Sequential, x: Tensor) -> Tensor:
        model[1].register_forward_pre_hook(lambda module, args: None)
        return model(x).square().mean()  # type: ignore[no-any-return]

    with pytest.raises(TraceError, match=r"1 .*lambda.*puts a hook on this module"):
        trace(model, (X,), loss=adds)
    assert not model[1]._forward_pre_hooks


def test_a_hook_that_a_step_removes_again_is_part_of_it() -> None:
    def scaled(model: Any, y: Tensor) -> Any:
        handle = model.two.register_forward_hook(lambda module, args, result: result * 2)
        y = y + model.two(y)
        handle.remove()
        return y

    check(Layers(scaled), (X,))


# gradients ------------------------------------------------------------------------------------
def reads_a_gradient(model: Any, y: Tensor) -> Any:
    grad = model.one.weight.grad
    return y if grad is None else y + F.linear(y, grad)


def clears_gradients(model: Any, y: Tensor) -> Any:
    model.one.zero_grad()
    return y


def clips_gradients(model: Any, y: Tensor) -> Any:
    nn.utils.clip_grad_norm_(model.one.parameters(), 1.0)
    return y


def calls_backward(model: Any, y: Tensor) -> Any:
    model.one(y.detach()).sum().backward()
    return y


@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (reads_a_gradient, "the step uses its .grad"),
        (clears_gradients, "the step uses its .grad"),
        (clips_gradients, "the step uses its .grad"),
        (calls_backward, "the step calls backward(), which adds to its .grad"),
    ],
)
def test_gradients_of_the_step_before_are_refused(forward: Forward, what: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(Layers(forward), (X,))
    assert caught.value.what == what
    assert caught.value.where.startswith("one.weight (")


def test_gradients_of_inputs_are_part_of_the_step() -> None:
    def penalty(model: Any, y: Tensor) -> Any:
        x = y.detach().requires_grad_()
        model.one(x).square().sum().backward(inputs=[x])
        assert x.grad is not None
        return y + x.grad

    check(Layers(penalty), (X,))
