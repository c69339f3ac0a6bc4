"""Numbers that a script changes behind a compile, and hooks, on real ranks."""

from __future__ import annotations

import gc
import io
import operator
import pickle
import weakref
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partc
from partc.errors import RunError, TraceError
from partc.program.step.step_checks import FIRST_STEPS
from partc.trace.frozen_numbers import AT_ONCE
from partc.verification.processes import Processes
from tests.patience import patience

BATCH = torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(0, 2, 48).view(8, 6)


class Cooled(nn.Module):
    """Reads numbers from attributes, from a dict and from a submodule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.0)
        self.temperature, self.epoch = 1.0, 0
        self.weights = {"first": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.linear(x)) / self.temperature
        return y * self.weights["first"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process group of one, for ranks that run in this process."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


CHANGES: list[tuple[str, str, Any, str]] = [
    ("", "temperature", 0.5, "temperature was 1.0 when compiled and is 0.5 now"),
    ("dropout", "p", 0.2, "dropout.p was 0.0 when compiled and is 0.2 now"),
    ("dropout", "training", False, "dropout.training was True when compiled and is False now"),
    ("", "weights", {"first": 2.0}, "weights['first'] was 0.5 when compiled and is 2.0 now"),
]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def test_a_module_that_was_evaluated_goes_back_into_its_mode(alone: None) -> None:
    model = Cooled()
    stage = partc.compile(model, "dp=1", BATCH, loss=loss_of, plan="ddp").module()
    model.dropout.eval()
    with pytest.raises(RunError, match=r"Call model.dropout.train\(\) before this step"):
        stage.step(*BATCH)
    model.dropout.train()
    stage.step(*BATCH)


@pytest.mark.exhaustive
def test_a_number_that_the_script_changes_stops_the_step(alone: None) -> None:
    model = Cooled()
    step = partc.Traced(model, BATCH, loss_of)
    program = partc.compile(step, "dp=1", plan="ddp")
    assert partc.Plan.parse(program.plan).notes == (
        "frozen at trace time: model.weights['first'], 0.5",
    )
    stage = program.module()
    for path, name, number, text in CHANGES:
        module = model.get_submodule(path)
        before = vars(module)[name]
        setattr(module, name, number)
        with pytest.raises(
            RunError, match="numbers, and tensors from outside, as they were"
        ) as caught:
            stage.step(*BATCH)
        assert caught.value.what == f"model.{text}"
        do = "model.dropout.train()" if name == "training" else "x * (torch.rand_like(x) >= p)"
        assert do in caught.value.do
        with pytest.raises(TraceError, match="not as it was when its step was traced"):
            partc.compile(step, "dp=1", plan="ddp")
        setattr(module, name, before)
    model.epoch = 7  # no step reads it
    model.eval()  # of the whole, as beside a training, not of one module
    for _ in range(FIRST_STEPS + 2):
        stage.step(*BATCH)
    gone = weakref.ref(model)
    del model, module, step
    gc.collect()
    assert gone() is None
    stage.step(*BATCH)


class Dropped(nn.Module):
    """Dropout by a tensor, as the error for a rate that has changed writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(BATCH[0].shape[1], BATCH[1].shape[1])
        self.register_buffer("p", torch.tensor(0.5))
        self.p: Tensor

    def forward(self, x: Tensor, p: Tensor | None = None) -> Tensor:
        p = self.p if p is None else p
        y: Tensor = self.linear(x)
        return y * (torch.rand_like(y) >= p) / (1 - p)


def test_a_dropout_rate_changes_as_a_buffer_or_an_input(alone: None) -> None:
    model = Dropped()

    def by_input(model: nn.Module, x: Tensor, y: Tensor, p: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x, p), y)

    stage: Any = partc.compile(model, "dp=1", BATCH, loss=loss_of, plan="ddp").module()
    given = (*BATCH, torch.tensor(0.5))
    other: Any = partc.compile(model, "dp=1", given, loss=by_input, plan="ddp").module()
    losses = []
    for rate in (0.5, 0.1):
        stage.p.fill_(rate)
        losses += [(stage.step(*BATCH), other.step(*BATCH, torch.tensor(rate)))]
    assert all(one.equal(two) for one, two in losses)
    assert losses[0][0] != losses[1][0]


def test_hooks_that_the_script_adds_or_removes_stop_the_step(alone: None) -> None:
    model = Cooled()
    before = model.linear.register_forward_hook(lambda module, args, result: result * 2)
    step = partc.compile(model, "dp=1", BATCH, loss=loss_of, plan="ddp")
    stage = step.module()
    stage.load_full(model)
    stage.step(*BATCH)
    for added in (
        model.dropout.register_forward_pre_hook(lambda module, args: None),
        model.linear.weight.register_hook(lambda grad: grad * 0),
    ):
        with pytest.raises(RunError, match=r"the set of hooks of model\.(linear|dropout) is not"):
            stage.step(*BATCH)
        added.remove()
    stage.step(*BATCH)
    before.remove()
    with pytest.raises(RunError, match=r"the set of hooks of model\.linear is not"):
        stage.step(*BATCH)


def test_numbers_of_a_loss_are_looked_at_too(alone: None) -> None:
    factor, rate = [1.0], 3.0

    def scaled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model, x, y) * factor[0] * rate

    program = partc.compile(Cooled(), "dp=1", BATCH, loss=scaled, plan="ddp")
    assert "frozen at trace time: factor[0] of scaled, 1.0" in program.plan
    stage = program.module()
    stage.step(*BATCH)
    factor[0] = 0.1
    with pytest.raises(RunError, match=r"factor\[0\] of scaled was 1\.0 when compiled and is 0\.1"):
        stage.step(*BATCH)
    factor[0], rate = 1.0, 4.0
    with pytest.raises(RunError, match=r"rate of scaled was 3\.0 when compiled and is 4\.0"):
        stage.step(*BATCH)


class Rate:
    """Has a number of its own and, in its class, one for all."""

    common = 1.0
    __slots__ = ("own",)

    def __init__(self) -> None:
        self.own = 1.0


class Penalty:
    """A loss that is a plain object."""

    def __init__(self) -> None:
        self.beta = 1.0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model, x, y) * self.beta


class Kinds:
    """Numbers in objects of many kinds, and a loss that reads them."""

    def __init__(self) -> None:
        self.array, self.many, self.rate = np.ones(1), np.ones(6, dtype="float32"), Rate()
        self.known, self.history, self.function = {1.0}, [1.0], one
        self.module = ModuleType("config")
        self.module.beta = 1.0  # type: ignore[attr-defined]
        self.unread = 1.0

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scale = float(self.array[0]) * self.rate.own * Rate.common * max(self.known)
        scale *= self.history[-1] * self.function() * one.rate  # type: ignore[attr-defined]
        scale *= self.module.beta
        return loss_of(model, x, y).mul(scale).mul(torch.from_numpy(self.many).sum())


def one(h: list[float] = [1.0]) -> float:  # noqa: B006
    return h[0]


def two() -> float:
    return 2.0


def test_numbers_are_looked_at_in_objects_of_every_kind(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one, "rate", 1.0, raising=False)
    given = Kinds()
    changes: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
        "self.array of loss was array([1.])": lambda m: m.setattr(given, "array", np.zeros(1)),
        "self.rate.own of loss was 1.0": lambda m: m.setattr(given.rate, "own", 2.0),
        "Rate.common was 1.0": lambda m: m.setattr(Rate, "common", 2.0),
        "self.known of loss was {1.0}": lambda m: m.setattr(given, "known", {1.0, 2.0}),
        "len(self.history of loss) was 1": lambda m: m.setattr(given, "history", [1.0, 2.0]),
        "self.function of loss is not": lambda m: m.setattr(given, "function", two),
        "self.module.beta of loss was 1.0": lambda m: m.setattr(given.module, "beta", 2.0),
        "one.rate was 1.0": lambda m: m.setattr(one, "rate", 2.0),
        "h[0] of one was 1.0": lambda m: m.setattr(one, "__defaults__", ([2.0],)),
    }
    numbers = partc.compile(Cooled(), "dp=1", BATCH, loss=given.loss, plan="ddp").numbers
    given.unread = 2.0
    for text, change in changes.items():
        assert numbers.all_changes() == []
        with monkeypatch.context() as patched:
            change(patched)
            assert any(text in each for each in numbers.all_changes()), text
    given.many[5] = 2.0
    assert [each.partition(" was ")[0] for each in numbers.all_changes()] == ["self.many of loss"]


UNCOUNTED: dict[str, Callable[[Tensor, Any], object]] = {
    "data": lambda held, array: held.data.mul_(2.0),
    "rows of data": lambda held, array: held.data[1:].zero_(),
    "other data": lambda held, array: setattr(held, "data", held.data * 2.0),
    "an array": lambda held, array: array.__imul__(2.0),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [4, 4096])
@pytest.mark.parametrize("write", UNCOUNTED)
def test_writes_that_torch_does_not_count_stop_the_step(alone: None, write: str, size: int) -> None:
    array = np.ones(size)
    held = torch.from_numpy(array)
    stage = partc.compile(
        Cooled(), "dp=1", BATCH, loss=lambda *given: loss_of(*given) * held.sum(), plan="ddp"
    ).module()
    stage.step(*BATCH)
    UNCOUNTED[write](held, array)
    with pytest.raises(RunError, match=r"held of a lambda is not what it was when compiled"):
        stage.step(*BATCH)


class Options:
    """Options of a script, in a class of its own."""


MADE_UP: dict[str, Callable[[Any, str], Any]] = {
    "getattr": lambda args, name: getattr(args, f"w_{name}"),
    "attrgetter": lambda args, name: operator.attrgetter(f"w_{name}")(args),
    "vars": lambda args, name: vars(args)[f"w_{name}"],
    "__dict__": lambda args, name: args.__dict__[f"w_{name}"],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [Options, Namespace, SimpleNamespace])
@pytest.mark.parametrize("read", MADE_UP)
def test_numbers_that_are_read_by_names_that_a_script_makes_up(
    alone: None, kind: Any, read: str
) -> None:
    args = kind()
    args.w_first, args.w_second, args.epoch = 1.0, 2.0, 0

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        first, second = (MADE_UP[read](args, name) for name in ("first", "second"))
        scaled: Tensor = loss_of(model, x, y) * first * second
        return scaled

    stage = partc.compile(Cooled(), "dp=1", BATCH, loss=loss, plan="ddp").module()
    stage.step(*BATCH)
    if read == "getattr":  # which alone says which attributes are read
        args.epoch = 1
        stage.step(*BATCH)
    args.w_second = 3.0
    with pytest.raises(RunError, match=r"args\.w_second of loss was 2\.0 when compiled"):
        stage.step(*BATCH)


def test_numbers_of_a_script_are_looked_at_in_every_step(alone: None) -> None:
    """Also beside a model of many numbers, of which each step looks at some."""
    args = Namespace(beta=1.0)
    model = nn.Sequential(nn.Linear(6, 6), *(nn.Dropout(0.0) for _ in range(3 * AT_ONCE)))
    program = partc.compile(
        model, "dp=1", BATCH[:1], loss=lambda m, x: m(x).sum() * args.beta, plan="ddp"
    )
    for _ in range(4):
        assert program.numbers.changes() == []
        args.beta = 2.0
        assert len(program.numbers.changes()) == 1
        args.beta = 1.0


def test_numbers_of_a_loss_that_is_no_function(alone: None) -> None:
    penalty, config = Penalty(), {"beta": 1.0}

    def with_config(model: nn.Module, x: Tensor, y: Tensor, config: dict[str, float]) -> Tensor:
        return loss_of(model, x, y) * config["beta"]

    bound = partial(with_config, config=config)
    stages = [
        partc.compile(Cooled(), "dp=1", BATCH, loss=loss, plan="ddp").module()
        for loss in (penalty, bound)
    ]
    penalty.beta = config["beta"] = 2.0
    with pytest.raises(RunError, match=r"loss\.beta was 1\.0 when compiled and is 2\.0 now"):
        stages[0].step(*BATCH)
    with pytest.raises(RunError, match=r"argument config\['beta'\] of the loss was 1\.0"):
        stages[1].step(*BATCH)


def test_what_tells_nothing_of_its_state_is_noted() -> None:
    model = Cooled()
    model.weights["first"] = io.StringIO("0.5")  # type: ignore[assignment]
    model.forward = lambda x: model.linear(x) * len(model.weights["first"].getvalue())  # type: ignore
    numbers = partc.compile(
        model, "dp=1", BATCH[:1], loss=lambda m, x: m(x).sum(), plan="ddp"
    ).numbers
    assert any("no step sees whether it changes" in note for note in numbers.notes())


def test_a_submodule_that_is_exchanged_stops_the_step() -> None:
    inner = nn.Sequential(nn.GELU(), nn.Linear(6, 6))
    model = nn.Sequential(nn.Linear(6, 6), inner)
    program = partc.compile(model, "dp=1", BATCH[:1], loss=lambda m, x: m(x).sum(), plan="ddp")
    assert program.numbers.all_changes() == []
    inner[0] = nn.ReLU()
    assert program.numbers.all_changes() == ["model.1.0 is not what it was when compiled"]
    del inner[0]
    assert len(program.numbers.all_changes()) == 2  # what stood behind it has moved


def test_what_lies_too_deep_or_too_far_behind_in_a_list_is_noted() -> None:
    deep: list[Any] = [2.0]
    for _ in range(8):
        deep = [deep]
    long, model = [1.0] * 300, nn.Linear(6, 6)

    def loss_of(m: nn.Module, x: Tensor) -> Tensor:
        scale: Any = deep
        while isinstance(scale, list):
            scale = scale[0]
        result: Tensor = m(x).sum() * scale * long[250]
        return result

    notes = [*partc.compile(model, "dp=1", BATCH[:1], loss=loss_of, plan="ddp").numbers.notes()]
    unseen = [note for note in notes if "no step sees whether it changes" in note]
    assert any("what is in deep[0][0]" in note and "objects deep" in note for note in unseen)
    assert any("the entries of long of loss_of behind the first" in note for note in unseen)


def test_later_steps_look_at_some_numbers_each() -> None:
    layers = 2 * AT_ONCE
    model = nn.Sequential(nn.Linear(6, 6), *(nn.Dropout(0.0) for _ in range(layers)))
    program = partc.compile(model, "dp=1", BATCH[:1], loss=lambda m, x: m(x).sum(), plan="ddp")
    numbers = program.numbers
    model[layers].p = 0.5  # type: ignore[assignment]
    rounds = -(-len(numbers.numbers) // AT_ONCE)
    found = [numbers.changes() for _ in range(2 * rounds)]
    assert rounds > 3
    assert [bool(each) for each in found].count(True) == 2
    assert found[:rounds] == found[rounds:]
    assert numbers.all_changes() in found
    assert pickle.loads(pickle.dumps(program)).numbers.numbers == ()


def hooked() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
    model[0].weight.register_hook(lambda grad: grad / grad.norm())
    model[2].bias.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return model


def steps_with_hooks() -> None:
    batch = [each.double() for each in BATCH]
    model = hooked()
    stage = partc.compile(model, "dp=2", batch, loss=loss_of, plan="fsdp").module()
    ours = torch.optim.SGD(stage.parameters(), lr=0.1)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    stage.load_full(model)
    for _ in range(3):
        loss = loss_of(model, *batch)
        torch.testing.assert_close(stage.step(*batch), loss.detach())
        loss.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    whole = stage.full_state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(whole[name], tensor)


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_ranks_train_with_hooks_as_one_device_does() -> None:
    with Processes(2, timeout=patience()) as world:
        world.run(steps_with_hooks)
