"""What a step keeps outside of parameters and buffers: refused if a later step reads it."""

from __future__ import annotations

import contextvars
import itertools
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc.errors import TraceError
from partc.lowering import trace
from tests.compare import check

X = torch.randn(8, 6, dtype=torch.float64)
Forward = Callable[[Any, Tensor], Tensor]


class Slotted:
    """Counts where there is no table of attributes."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Keeps(nn.Module):
    """Has attributes of several kinds, of which the given function makes use."""

    seen = 0

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.hidden = torch.zeros(6, dtype=torch.float64)
        self.latest: Tensor | None = None
        self.cache: list[Tensor] = []
        self.known: dict[str, Any] = {"hidden": torch.zeros(6, dtype=torch.float64)}
        self.count, self.size = 0, 0
        self.own = random.Random(0)
        self.array, self.slotted = np.zeros(1), Slotted()
        self.iterators: dict[str, Any] = {
            "count": itertools.count(1),
            "list": iter(range(100)),
            "made": made(),
        }
        self.iterators["numpy"] = np.random.default_rng(0)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(self, self.linear(x)).sum()
        return result


def hidden_state(model: Any, y: Tensor) -> Any:
    model.hidden = (model.hidden + y.detach().mean(0)).tanh()
    return y.mul(model.hidden)


def state_once_there_is_one(model: Any, y: Tensor) -> Any:
    y = y if model.latest is None else y + model.latest
    model.latest = y.detach()
    return y


def first_batch(model: Any, y: Tensor) -> Any:
    if model.latest is None:
        model.latest = y.detach()
    return y - model.latest


def growing_cache(model: Any, y: Tensor) -> Any:
    model.cache.append(y.detach())
    return y * torch.stack(model.cache).mean(0)


def in_a_dict(model: Any, y: Tensor) -> Any:
    model.known["hidden"], before = y.detach().mean(0), model.known["hidden"]
    return y * before


def counted(model: Any, y: Tensor) -> Any:
    model.count += 1
    return y / model.count


def lazy_buffer(model: Any, y: Tensor) -> Any:
    if not hasattr(model, "mean"):
        model.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
    model.mean.mul_(0.9).add_(y.detach().mean(0))
    return y * model.mean


def in_backward(model: Any, y: Tensor) -> Any:
    def hook(grad: Tensor) -> Any:
        model.known["calls"] = model.known.get("calls", 0) + 1
        return grad * model.known["calls"]

    y.register_hook(hook)
    return y * 2


def clock(model: Any, y: Tensor) -> Any:
    return y * time.perf_counter()


def own_generator(model: Any, y: Tensor) -> Any:
    return y * model.own.random()


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (hidden_state, r"step before has left; a step sets model\.hidden"),
        (state_once_there_is_one, r"step before has left; a step sets model\.latest"),
        (first_batch, r"step before has left; a step sets model\.latest"),
        (growing_cache, r"step before has left; a step sets model\.cache\[0\]"),
        (in_a_dict, r"step before has left; a step sets model\.known\['hidden'\]"),
        (counted, r"a step sets model\.count"),
        (lazy_buffer, "step before has left"),
        (in_backward, r"a step sets .*model\.known"),
        (clock, "something outside of parameters and buffers"),
        (own_generator, "something outside of parameters and buffers"),
    ],
)
def test_what_the_next_step_reads_is_refused(forward: Forward, why: str) -> None:
    model = Keeps(forward)
    before, known = dict(vars(model)), dict(model.known)
    with pytest.raises(TraceError, match="second step computes something else") as caught:
        trace(model, (X,))
    assert caught.match(why)
    assert "test_second_run.py:" in caught.value.where
    assert "register_buffer" in caught.value.do
    assert vars(model) == before
    assert model.known == known
    assert model.cache == []


def kept_for_looking(model: Any, y: Tensor) -> Any:
    model.latest = y.detach() * 2
    return y


def cached_constant(model: Any, y: Tensor) -> Any:
    if model.size != y.shape[1]:
        model.size = y.shape[1]
        model.latest = torch.arange(model.size, dtype=y.dtype).cos()
    return y * model.latest


def log_of_a_mean(model: Any, y: Tensor) -> Any:
    model.known["mean"] = 0.9 * model.known.get("mean", 0.0) + y.detach().mean()
    return y


def refilled(model: Any, y: Tensor) -> Any:
    model.cache.clear()
    model.cache += [y * 2, y * 3]
    return sum(model.cache)


@pytest.mark.parametrize(
    ("forward", "notes"),
    [
        (refilled, ("the step sets model.cache[*]; a program does not",)),
        (kept_for_looking, ("the step sets model.latest; a program does not",)),
        (cached_constant, ()),
        (log_of_a_mean, ("the step sets model.known['mean']; a program does not",)),
    ],
)
def test_what_no_step_reads_is_noted(forward: Forward, notes: tuple[str, ...]) -> None:
    assert check(Keeps(forward), (X,)).frozen == notes


class WeightDrop(nn.Module):
    """Drops some of the weights of an LSTM, which it sets before each of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4).double()
        weight: Any = self.lstm.weight_hh_l0
        self.raw = nn.Parameter(weight.detach().clone())
        del self.lstm._parameters["weight_hh_l0"]

    def forward(self, x: Tensor) -> Tensor:
        lstm: Any = self.lstm
        lstm.weight_hh_l0 = F.dropout(self.raw, 0.5, self.training)
        lstm._flat_weights = [getattr(lstm, name) for name in lstm._flat_weights_names]
        loss: Tensor = lstm(x[None])[0].square().mean()
        return loss


def test_weights_that_a_step_puts_into_an_lstm_are_no_news() -> None:
    assert trace(WeightDrop(), (X,)).frozen == ()


class Rotary(nn.Module):
    """Keeps a table that follows from a buffer, as language models keep cosines of angles."""

    frequency: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.length = nn.Linear(6, 6).double(), kind, 0
        self.register_buffer("frequency", 10.0 ** -torch.arange(3, dtype=torch.float64))
        self.table = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "changed":
            self.frequency += 0.1
        if self.length != x.shape[0]:
            self.length = x.shape[0]
            angles = torch.outer(torch.arange(self.length).type_as(x), self._frequencies())
            self.table = torch.cat([angles, angles], 1).cos()
        if self.kind == "written":
            self.table.mul_(2)
        result: Tensor = (self.linear(x) * self.table[None, :, :]).sum()
        return result

    def _frequencies(self) -> Tensor:
        return self.linear.bias.detach()[:3] if self.kind == "of a weight" else self.frequency


def test_a_table_kept_from_a_buffer_is_computed_in_every_step() -> None:
    notes = check(Rotary("plain"), (X,)).frozen
    assert len(notes) == 1
    assert re.match("frozen at trace time: the value of buffer frequency, asked for at", notes[0])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("changed", "the step asks for the value of this buffer, and changes it"),
        ("of a weight", "step before has left"),
        ("written", "second step computes something else"),
    ],
)
def test_a_kept_table_of_what_changes_is_refused(kind: str, why: str) -> None:
    with pytest.raises(TraceError, match=why):
        trace(Rotary(kind), (X,))


@pytest.mark.parametrize("threshold", [1, 1000])
def test_a_count_of_steps_is_refused_even_where_it_does_not_matter_yet(threshold: int) -> None:
    def warm_up(model: Any, y: Tensor) -> Any:
        model.count += 1
        return y * 2 if model.count > threshold * 10 else y

    with pytest.raises(TraceError, match=r"^model\.count: it changes with every step \(1 behind"):
        trace(Keeps(warm_up), (X,))


def made() -> Iterator[int]:
    yield from range(1, 100)


def count_in_a_class(model: Any) -> Any:
    type(model).seen += 1
    return type(model).seen


def count_in_another_class(model: Any) -> int:
    Counter.seen += 1
    return Counter.seen


class Counter:
    seen = 0


def count_in_an_array(model: Any) -> Any:
    model.array[0] += 1
    return model.array[0]


def count_in_slots(model: Any) -> Any:
    model.slotted.count += 1
    return model.slotted.count


def count_in_a_function(model: Any) -> int:
    made.calls = getattr(made, "calls", 0) + 1  # type: ignore[attr-defined]
    return made.calls  # type: ignore[attr-defined, no-any-return]


def count_in_a_default(model: Any, known: list[int] = [0]) -> int:  # noqa: B006
    known[0] += 1
    return known[0]


def next_of_a_count(model: Any) -> Any:
    return next(model.iterators["count"])


def next_of_a_list(model: Any) -> Any:
    return next(model.iterators["list"])


def draw_of_numpy(model: Any) -> Any:
    return model.iterators["numpy"].integers(5)


def draw_of_python(model: Any) -> Any:
    return model.own.random()


def next_of_a_generator(model: Any) -> Any:
    return next(model.iterators["made"])


@pytest.mark.parametrize(
    ("count", "name"),
    [
        (count_in_a_class, "Keeps.seen"),
        (count_in_another_class, "Counter.seen"),
        (count_in_an_array, "model.array"),
        (count_in_slots, "model.slotted.count"),
        (count_in_a_function, "made.calls"),
        (count_in_a_default, "known[0] of count_in_a_default"),
        (next_of_a_count, "model.iterators['count']"),
        (next_of_a_list, "model.iterators['list']"),
        (draw_of_numpy, "model.iterators['numpy']"),
        (draw_of_python, "model.own"),
        (next_of_a_generator, "model.iterators['made']"),
    ],
)
def test_a_count_is_refused_wherever_it_is_kept(count: Callable[[Any], Any], name: str) -> None:
    def warm_up(model: Any, y: Tensor) -> Any:
        return y * (0.1 if count(model) <= 10 else 1.0)

    model = Keeps(warm_up)
    with pytest.raises(TraceError, match="it changes with every step") as caught:
        trace(model, (X,))
    assert caught.value.where == name
    kept = Keeps.seen, Counter.seen, model.array[0], model.slotted.count
    assert kept == (0, 0, 0.0, 0)


def test_state_of_a_loss_is_refused_and_restored() -> None:
    before: list[Any] = [torch.zeros(6, dtype=torch.float64)]
    losses: list[Tensor] = []

    def momentum(model: Any, x: Tensor) -> Tensor:
        y = model.linear(x)
        result: Tensor = (y * before[0]).sum()
        before[0] = y.detach().mean(0)
        return result

    def logs(model: Any, x: Tensor) -> Tensor:
        losses.append(model(x))
        return losses[-1]

    model, zeros = Keeps(lambda model, y: y), before[0]
    with pytest.raises(TraceError, match=r"a step sets before\[0\] of momentum"):
        trace(model, (X,), momentum)
    with pytest.raises(TraceError, match=r"^len\(losses of logs\): it changes.*\(loss, extras\)"):
        trace(model, (X,), logs)
    assert before[0] is zeros
    assert losses == []


@pytest.mark.parametrize("clears", [False, True])
def test_a_hook_that_collects_is_named_and_may_clear_its_list(clears: bool) -> None:
    kept: list[Tensor] = []

    def loss(model: Any, x: Tensor) -> Any:
        kept.clear() if clears else None
        return model(x).sum(), {"kept": kept[-1]}

    model = Keeps(lambda model, y: y)
    model.linear.register_forward_hook(lambda module, given, result: kept.append(result))
    if clears:
        trace(model, (X,), loss)
        return
    with pytest.raises(TraceError, match="clear it where the step begins") as caught:
        trace(model, (X,), loss)
    name, line = caught.value.where.split(" (", 1)
    assert name == "len(kept of a lambda, a forward hook of model.linear)"
    assert "test_second_run.py:" in line
    assert kept == []


def skipped_layer(model: Any, y: Tensor) -> Any:
    if random.random() < 1e-9:
        y = y * 2
    return y


def scaled_by_numpy(model: Any, y: Tensor) -> Any:
    scale = float(np.random.rand())
    return y * scale


CONTEXT, OF_THREAD = contextvars.ContextVar("count", default=0), threading.local()


def in_environment(model: Any, y: Tensor) -> Any:
    os.environ["PARTC_COUNT"] = str(int(os.environ.get("PARTC_COUNT", 0)) + 1)
    return y * (1.0 if int(os.environ["PARTC_COUNT"]) < 4 else 2.0)


def in_context(model: Any, y: Tensor) -> Any:
    CONTEXT.set(CONTEXT.get() + 1)
    return y * (1.0 if CONTEXT.get() < 4 else 2.0)


def in_thread(model: Any, y: Tensor) -> Any:
    OF_THREAD.count = getattr(OF_THREAD, "count", 0) + 1
    return y * (1.0 if OF_THREAD.count < 4 else 2.0)


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (in_environment, "os.environ['PARTC_COUNT']"),
        (in_context, "the context variable count"),
        (in_thread, "OF_THREAD.count of in_thread"),
    ],
)
def test_a_count_in_the_process_is_refused(forward: Forward, name: str) -> None:
    with pytest.raises(TraceError, match="it changes with every step") as caught:
        trace(Keeps(forward), (X,))
    assert caught.value.where == name
    assert "PARTC_COUNT" not in os.environ


@pytest.mark.parametrize(
    ("forward", "line", "module"),
    [
        (skipped_layer, "random.random()", "from random"),
        (scaled_by_numpy, "np.random.rand()", "from numpy.random"),
    ],
)
def test_numbers_drawn_in_python_are_refused(forward: Forward, line: str, module: str) -> None:
    states = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]
    with pytest.raises(TraceError, match=f"it draws {module} ") as caught:
        trace(Keeps(forward), (X,))
    assert line in caught.value.where
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tobytes() == states[1]  # type: ignore[index]


def test_numbers_drawn_from_a_seed_are_constants() -> None:
    def seeded(model: Any, y: Tensor) -> Any:
        random.seed(3)
        return y * random.random()

    check(Keeps(seeded), (X,))


class Casts(nn.Module):
    """An LSTM under autocast, whose cache of cast weights lives for one run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.mse_loss(self.rnn(x)[0], x)


def test_autocast_keeps_nothing() -> None:
    trace(Casts(), (torch.randn(4, 5, 6),))
