"""Mistakes with what stands outside of a step: a target in a closure, ties, weights of another
model, ops and functions that no trace can carry.
"""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import partc
from partc.trace.frozen_tensors import HeldTensor
from tests.mistakes.things import Mistake, Net, batch_of, check, compiled, loss_of, one_rank

X, Y = batch_of()
api: Any = partc  # whose types forbid most of this


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


# tensors of a step that is compiled ------------------------------------------------------------
def behind_a_step(change: Callable[[dict[str, Tensor]], Any], held: dict[str, Tensor]) -> Any:
    """The next step, once a script has changed what the loss has in a variable."""
    stage: Any = compiled(mesh="dp=1", inputs=(X,), loss=lambda m, x: mse_loss(m(x), held["y"]))
    stage = stage.module()
    stage.step(X)
    change(held)
    return stage.step(X)


def averaged() -> None:
    """A teacher that follows by an average, and that the loss has in a variable."""
    teacher = Net().requires_grad_(False)
    stage: Any = compiled(mesh="dp=1", loss=lambda m, x, y: mse_loss(m(x), teacher(x))).module()
    stage.step(X, Y)
    teacher.up.weight.mul_(0.9)
    stage.step(X, Y)


def gone(held: Any) -> None:
    held["y"] = None


def another(held: dict[str, Tensor]) -> None:
    held["y"] = Y + 1


CHANGES: dict[str, Mistake] = {
    "another target": (
        lambda: behind_a_step(another, {"y": Y.clone()}),
        ("held['y']", "not what it was when compiled", "make it an input of the step"),
    ),
    "a target that is written to": (
        lambda: behind_a_step(lambda held: held["y"].add_(1), {"y": Y.clone()}),
        ("held['y']", "not what it was when compiled"),
    ),
    "a target that is no tensor any more": (
        lambda: behind_a_step(gone, {"y": Y.clone()}),
        ("held['y']", "not what it was when compiled"),
    ),
    "a teacher that follows": (averaged, ("teacher.up.weight", "not what it was when compiled")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_from_outside_that_changes_is_told(change: str) -> None:
    check(CHANGES[change])


def same(held: dict[str, Tensor]) -> None:
    held["y"] = held["y"].clone()


@pytest.mark.parametrize("change", [same, lambda held: held["y"].mul_(1), lambda held: None])
def test_a_tensor_of_the_same_values_is_no_change(change: Callable[[Any], Any]) -> None:
    assert behind_a_step(change, {"y": Y.clone()})


def test_a_tensor_of_inference_mode_is_looked_at_by_its_values() -> None:
    with torch.inference_mode():
        tensor = Y.clone()
    held = HeldTensor(tensor)
    assert not held.differs(tensor)
    with torch.inference_mode():
        tensor.add_(1)
    assert held.differs(tensor)


def test_a_program_with_such_tensors_is_sent_to_another_process() -> None:
    held = Y.clone()
    program = compiled(inputs=(X,), loss=lambda m, x: mse_loss(m(x), held))
    assert not pickle.loads(pickle.dumps(program.numbers)).numbers


class Square(nn.Module):
    """Two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


def tied_late() -> None:
    model = Square()
    program = compiled(mesh="dp=1", model=model)
    model.second.weight = model.first.weight
    program.module().step(X, Y)


def test_parameters_that_are_tied_behind_the_compile_are_told() -> None:
    check((tied_late, ("tied parameters", "second.weight = first.weight", "Leave it as it was")))


def test_parameters_that_were_tied_are_no_change() -> None:
    model = Square()
    model.second.weight = model.first.weight
    stage: Any = compiled(mesh="dp=1", model=model).module()
    assert stage.step(X, Y) == stage.step(X, Y)


# models and losses -----------------------------------------------------------------------------
class Does(nn.Module):
    """A Net that sees what the given function makes of its input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.function = Net(), function

    def forward(self, x: Tensor) -> Any:
        return self.net(self.function(x))


def yielded(x: Tensor) -> Iterator[Tensor]:
    yield x


async def waited(x: Tensor) -> AsyncIterator[Tensor]:
    yield x


async def late_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x, y)


def yielded_loss(model: nn.Module, x: Tensor, y: Tensor) -> Iterator[Tensor]:
    yield loss_of(model, x, y)


def with_item(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return loss_of(model, x, y).item()


def halved(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x / 2
    return x


def checked(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all()
    return x


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.tanh(x.numpy()))


def through_a_list(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist())


def cropped(x: Tensor) -> Tensor:
    return x[:, : x.argmax(1).max()]


@torch.library.custom_op("partc_mistakes::bare", mutates_args=())
def bare(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("partc_mistakes::without_derivative", mutates_args=())
def without_derivative(x: Tensor) -> Tensor:
    return x * 3


without_derivative.register_fake(torch.empty_like)


def of(function: Callable[[Tensor], Any], *words: str) -> Mistake:
    return lambda: compiled(model=Does(function)), words


def after(op: Any) -> Any:
    """A loss of what a custom op makes of the model's result."""
    return lambda model, x, y: mse_loss(op(model(x)), y)


ALONE = "return in place of yield"
TRACES: dict[str, Mistake] = {
    "yield": of(yielded, "yield or async", ALONE),
    "async": of(waited, "yield or async", ALONE),
    "a loss with yield": (lambda: compiled(loss=yielded_loss), ("a generator", ALONE)),
    "a loss with async": (lambda: compiled(loss=late_loss), ("a coroutine", ALONE)),
    "a loss with item": (lambda: compiled(loss=with_item), ("without .item()", "y).item()")),
    "until it converges": of(halved, "while x.norm() > 1", "a fixed number of times"),
    "an assertion": of(checked, "isfinite", "Leave the check out"),
    "numpy": of(through_numpy, "x.numpy()", "with functions of torch"),
    "a list": of(through_a_list, "x.tolist()", "with functions of torch"),
    "a size": of(cropped, "x.argmax(1).max()", "A size is part of a program", "mask"),
    "an op without shapes": (
        lambda: compiled(loss=after(bare)), ("no shape function", "torch.library.register_fake"),
    ),
    "an op without derivative": (
        lambda: compiled(loss=after(without_derivative)), ("no derivative", "register_autograd"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_what_no_trace_can_carry_is_told_with_what_helps(name: str) -> None:
    check(TRACES[name])


# other calls -----------------------------------------------------------------------------------
def shifted(x: Tensor) -> Tensor:
    return x.sub_(x.mean(0))


def plan_of(entry: str) -> Callable[[], Any]:
    return lambda: partc.Plan.parse(entry)


def loaded_loosely(names: str) -> Any:
    stage: Any = compiled(mesh="dp=1").module()
    return stage.load_full({names: torch.ones(8, 4)}, strict=False)


class Table(nn.Module):
    """An embedding that shortens its rows while it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, max_norm=0.5)

    def forward(self, ids: Tensor) -> Any:
        return self.table(ids)


def normed() -> None:
    compiled(model=Table(), inputs=(torch.arange(8), Y))


def named_rows() -> None:
    """A batch in which each row has a name."""

    def loss(model: nn.Module, x: Tensor, target: Tensor, names: list[str]) -> Tensor:
        return loss_of(model, x, target)

    batch = {"x": X, "target": Y, "names": ["a"] * 8}
    stage: Any = compiled(mesh="dp=1", inputs=batch, loss=loss).module()
    stage.step(**{**batch, "names": ["b"] * 8})


CALLS: dict[str, Mistake] = {
    "parts of all axes": (plan_of("grad_parts = 2"), ("Write grad_parts = { dp = 2 }",)),
    "a size of all kinds": (
        plan_of("bucket_copy_mb = { dp = 0.3 }"), ("bucket_copy_mb.dp", "{ all_gather = 0.3,"),
    ),
    "sends of all": (plan_of("sends = 3"), ("Write sends = { forward = 1",)),
    "a preset as a file": (lambda: partc.Plan.load("fsdp"), ("compile(plan='fsdp')",)),
    "another mesh": (lambda: api.load("build", mesh="dp=4"), ("'mesh'", "that of one mesh")),
    "a loss forgotten": (
        lambda: partc.verify(compiled(), Net(), (X, Y)), ("too many", "loss=, a function"),
    ),
    "a controller of a program": (
        lambda: api.Controller(compiled()), ("a Program", "stage = program.module()"),
    ),
    "a controller of a model": (lambda: api.Controller(Net()), ("a Net", "program.module()")),
    "an input that is written to": (
        lambda: compiled(model=Does(shifted)), ("input x (", "x.sub_(x.mean(0))", "Clone it"),
    ),
    "a norm of rows": (normed, ("param table.weight", "leave max_norm out")),
    "names of rows": (named_rows, ("step, names.0", "Leave it out of the batch")),
    "a variant without a name": (
        lambda: api.with_variants(compiled(), "fsdp"), ("with_variants(program, int8=plan)",),
    ),
    "weights of another model": (
        lambda: loaded_loosely("encoder.weight"), ("none of the 1 names", "encoder.weight"),
    ),
    "weights of a wrapper": (
        lambda: loaded_loosely("module.up.weight"), ("none of the 1 names", "model.module"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_gets_a_sentence(name: str) -> None:
    check(CALLS[name])


def test_some_weights_of_the_model_are_enough() -> None:
    loaded_loosely("up.weight")


# optimizers and other modules --------------------------------------------------------------------
def of_a_state_dict() -> None:
    stage: Any = compiled(mesh="dp=1").module()
    optimizer = torch.optim.SGD(stage.state_dict().values(), 0.1)
    stage.step(X, Y)
    optimizer.step()


def clipped_inside(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss


def of_another() -> None:
    """The loss calls a model that it has in a variable, a copy of that which it is given."""
    other = Net()
    compiled(loss=lambda model, x, y: mse_loss(other(x), y))


OTHERS: dict[str, Mistake] = {
    "an optimizer of a state dict": (of_a_state_dict, ("SGD.step", "over stage.parameters()")),
    "clipping inside": (
        lambda: compiled(loss=clipped_inside), ("uses its .grad", "clip, step an optimizer"),
    ),
    "another model": (of_another, ("other.", "Call the model that the loss is given")),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_trains_elsewhere_is_told(name: str) -> None:
    check(OTHERS[name])
