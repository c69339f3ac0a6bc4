"""Tensors that a model keeps from its first call on: none of a trace may stay there."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partc.api import compile
from partc.errors import TraceError
from partc.lowering import trace
from partc.trace import kept_fakes
from tests.compare import check

X = torch.randn(4, 6)


@functools.lru_cache
def rope(size: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(size) / 4.0
    return angles.cos(), angles.sin()


@functools.cache
def row(size: int) -> Tensor:
    return torch.linspace(0, 1, size)


class Lazy:
    """Makes its table when it is first asked for."""

    @functools.cached_property
    def table(self) -> Tensor:
        return row.__wrapped__(6)


class Slotted:
    """Has a table once there is one."""

    __slots__ = ("__weakref__", "table")
    table: Tensor


def endless() -> Iterator[Tensor]:
    table = torch.linspace(0, 1, 6)
    while True:
        yield table


LAZY, SLOTTED, KEPT = Lazy(), Slotted(), dict[str, Any]()
WEAK: Any = weakref.WeakKeyDictionary()
TABLE: Tensor | None = None
ENDLESS: Iterator[Tensor] | None = None


def in_rope(x: Tensor) -> Tensor:
    cos, sin = rope(6)
    return x * cos + x * sin


def in_attribute(x: Tensor) -> Tensor:
    if not hasattr(in_attribute, "table"):
        in_attribute.table = torch.linspace(0, 1, 6)  # type: ignore[attr-defined]
    return x * in_attribute.table  # type: ignore[attr-defined,no-any-return]


def in_slots(x: Tensor) -> Tensor:
    if not hasattr(SLOTTED, "table"):
        SLOTTED.table = torch.linspace(0, 1, 6)
    return x * SLOTTED.table


def in_global(x: Tensor) -> Tensor:
    global TABLE
    if TABLE is None:
        TABLE = torch.linspace(0, 1, 6)
    return x * TABLE


def in_generator(x: Tensor) -> Tensor:
    global ENDLESS
    if ENDLESS is None:
        ENDLESS = endless()
    return x * next(ENDLESS)


def in_weak(x: Tensor) -> Tensor:
    if LAZY not in WEAK:
        WEAK[LAZY] = torch.linspace(0, 1, 6)
    table: Tensor = WEAK[LAZY]
    return x * table


def in_dict(x: Tensor) -> Tensor:
    if "table" not in KEPT:
        KEPT["table"] = torch.linspace(0, 1, 6)
    table: Tensor = KEPT["table"]
    return x * table


class Net(nn.Module):
    """Layers that each call a function with a cache."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(self.function(x))
        return x.square().mean()


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    "function",
    [
        in_rope,
        lambda x: x * row(6),
        lambda x: x * LAZY.table,
        in_attribute,
        in_slots,
        in_global,
        in_generator,
        in_weak,
        in_dict,
    ],
)
def test_a_model_runs_after_a_trace_whatever_it_caches(
    function: Callable[[Tensor], Tensor],
) -> None:
    model = Net(function)
    check(model, (X,))  # traces, and runs the model on real tensors
    check(model, (X,))  # with a cache that is full


@pytest.mark.exhaustive
def test_a_cache_that_nobody_found_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    far = ModuleType("far")
    monkeypatch.setitem(sys.modules, "far", far)
    far.table = None  # type: ignore[attr-defined]

    def hidden(x: Tensor) -> Tensor:
        there: Any = sys.modules["far"]
        if there.table is None:
            there.table = torch.linspace(0, 1, 6)
        return x * there.table  # type: ignore[no-any-return]

    with pytest.raises(TraceError, match=r"far\.table: the step keeps a tensor of shape \(6,\)"):
        trace(Net(hidden), (X,))
    far.table = None  # type: ignore[attr-defined]
    trace(Net(lambda x: x), (X,))  # what was told once is no matter of other models
    Net(hidden)(X)
    trace(Net(hidden), (X,))


@torch.library.custom_op("partc_caches::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


halved.register_autograd(lambda ctx, grad: grad / 2)


def test_operands_that_a_recording_notes_are_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recording notes the operands of an op of the user's; a search for who holds a tensor goes
    through all objects of the process.
    """
    monkeypatch.delattr(kept_fakes, "_holders")
    trace(Net(lambda x: halved(x.exp())), (X,))


def test_casts_that_torch_keeps_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until autocast ends torch keeps a weight's cast, and with it the fake that was cast."""
    monkeypatch.delattr(kept_fakes, "_holders")
    with torch.autocast("cpu", torch.bfloat16):
        compile(nn.Linear(6, 6), "dp=2", (X,), loss=lambda model, x: model(x).float().sum())


@pytest.mark.exhaustive
def test_many_that_are_kept_are_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, referrers = [], kept_fakes._referrers

    def counted(objects: list[Any]) -> list[Any]:
        looks.append(len(objects))
        return referrers(objects)

    monkeypatch.setattr(kept_fakes, "_referrers", counted)
    far = ModuleType("far")
    far.rows = {}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "far", far)

    def hidden(x: Tensor) -> Tensor:
        rows: Any = sys.modules["far"]
        rows.rows["all"] = [torch.full((6,), 1.0 * i) for i in range(40)]
        return x

    with pytest.raises(TraceError, match=r"far\.rows: the step keeps a tensor"):
        trace(Net(hidden), (X,))
    assert len(looks) <= 2 * (kept_fakes._DEEP + 1)
