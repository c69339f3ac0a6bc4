"""A call that comes again gives what executing it would give, memory included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from partc.graph import collectives, fake_calls, ops
from partc.graph.fake_calls import FakeCalls, Form, call_on_fakes, tensors_in
from partc.graph.fake_kernels import OTHER_STRIDES

aten = torch.ops.aten


class Counted(FakeCalls):
    """Notes for every execution how many there have been."""

    def __init__(self) -> None:
        super().__init__(self.executed)
        self.times = 0

    def executed(self, target: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, int]:
        self.times += 1
        return target(*args, **kwargs), self.times


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    with torch.no_grad(), FakeTensorMode():
        yield


def shown(result: Any, args: Sequence[Any]) -> list[Any]:
    """The forms of a result, whether it is an operand, and which memory it shares with what."""
    tensors = [*tensors_in(result), *tensors_in(args)]
    memories = [t.untyped_storage()._cdata for t in tensors]
    return [
        (Form.of(t, t.untyped_storage()), memories.index(memory), [t is arg for arg in args])
        for t, memory in zip(tensors, memories, strict=True)
    ]


def x() -> Tensor:
    """A view that starts inside of its memory."""
    return torch.empty(10, 6)[2:].T


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "new": (aten.add.Tensor, lambda: (x(), x()), {"alpha": 2}),
    "view": (aten.transpose.int, lambda: (x(), 0, 1), {}),
    "operand itself": (aten.add_.Tensor, lambda: (x(), 1.0), {}),
    "views of one new memory": (
        collectives.reduce_scatter_joined,
        lambda: ([x(), x()],),
        {"axis": "tp", "num": 2, "dims": [0, 1], "outers": [1, 1]},
    ),
    "views of one operand": (aten.split.Tensor, lambda: (x(), 2), {}),
    "a named tuple": (torch.max, lambda: (x(), 0), {}),
    "absent results": (
        aten.native_layer_norm_backward.default,
        lambda: (
            x(), x(), [8], torch.empty(6, 1), torch.empty(6, 1), None, None, [True, False, False]
        ),
        {},
    ),
    "several ops": (ops.weight_grad, lambda: (torch.empty(2, 3, 4), torch.empty(2, 3, 5)), {}),
    "a number": (collectives.axis_index, lambda: (x(),), {"axis": "tp", "num": 2}),
    "a slice": (torch.Tensor.__getitem__, lambda: (x(), slice(1, 3)), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_second_time_is_as_the_first(name: str) -> None:
    target, operands, kwargs = CALLS[name]
    calls = Counted()
    first, second = operands(), operands()
    expected = shown(calls(target, first, kwargs)[0], first)
    assert shown(calls(target, second, kwargs)[0], second) == expected
    assert calls.times == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: (x(), 1), lambda: (x(), 1.0)),
        (lambda: (x(), True), lambda: (x(), 1)),
        (lambda: (x(), x()), lambda: (y := x(), y)),
        (lambda: (x(), x()), lambda: (x(), x().contiguous())),
        (lambda: (x(), 1), lambda: (x().contiguous(), 1)),
        (lambda: (x(), 1), lambda: (x().to(torch.bfloat16), 1)),
        (lambda: (x(), 1), lambda: (torch.empty(10, 6)[:8].T, 1)),
    ],
)
def test_what_differs_is_executed(one: Callable[[], Any], other: Callable[[], Any]) -> None:
    calls = Counted()
    calls(torch.add, one(), {})
    calls(torch.add, other(), {})
    assert calls.times == 2


def test_another_mode_gets_fakes_of_its_own() -> None:
    calls = Counted()
    calls(aten.add.Tensor, (x(), x()), {})
    with FakeTensorMode() as mode:
        result, _ = calls(aten.add.Tensor, (x(), x()), {})
    assert calls.times == 1
    assert result.fake_mode is mode


def test_two_operands_share_memory_or_not() -> None:
    """A result over the second operand's memory is found there, wherever that lies."""
    calls = Counted()

    def second(a: Tensor, b: Tensor) -> Tensor:
        return b.T

    for a, b in ((x(), x()), (x(), x())):
        result, _ = calls(second, (a, b), {})
        assert result.untyped_storage()._cdata == b.untyped_storage()._cdata
    assert calls.times == 1


def test_what_no_form_describes_is_always_executed() -> None:
    calls = Counted()
    for _ in range(2):
        conjugate, _ = calls(torch.conj, (torch.empty(3, dtype=torch.complex64),), {})
        assert conjugate.is_conj()
    for _ in range(2):
        calls(aten.t_.default, (x(),), {})
    assert calls.times == 4


@pytest.mark.parametrize("op", OTHER_STRIDES, ids=str)
@pytest.mark.parametrize("turned", [0, 1])
def test_strides_are_the_kernels(op: Any, turned: int) -> None:
    """A collective overwrites what is dense: a fake must not say so of what is not."""
    literals = {"softplus": (1, 20), "elu": (1, 1, 1, False), "hardtanh": (-1, 1)}
    given = literals.get(op._schema.name.removeprefix("aten::").removesuffix("_backward"), ())

    def call(run: Callable[..., Any]) -> Any:
        sides = [torch.rand(2, 6, 4), torch.rand(2, 6, 4)]
        sides[turned] = torch.rand(2, 4, 6).transpose(1, 2)
        args = (sides[0], *given, sides[1]) if op is aten.elu_backward.default else (*sides, *given)
        return run(op, args, {}).stride()

    with unset_fake_temporarily():
        kernel = call(lambda op, args, _: op(*args))
    assert call(call_on_fakes) == kernel


def test_caches_do_not_grow_with_the_models_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_calls, "MOST", 4)
    calls = Counted()
    often = torch.empty(100)
    for rows in range(1, 9):
        calls(aten.relu.default, [often], {})
        calls(aten.relu.default, [torch.empty(rows)], {})
    assert len(calls.known) == 4
    assert calls.times == 9  # what is asked for again is kept
    assert len(FakeTensorMode.cache) <= 8


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.empty_strided.default, ([2, 3], [1, 2])),
        (aten.empty_strided.default, ([2, 3], [8, 1])),  # with gaps in its memory
        (aten.arange.start_step, (0, 6, 2)),
    ],
)
def test_a_call_without_operands_is_remembered_where_the_mode_is_known(
    op: Any, args: tuple[Any, ...]
) -> None:
    calls, mode, other = Counted(), FakeTensorMode(), FakeTensorMode()
    with unset_fake_temporarily(), mode:
        first, _ = calls(op, args, {}, mode)
    with unset_fake_temporarily():
        again, times = calls(op, args, {}, other)
    assert times == calls.times == 1
    assert again.fake_mode is other
    assert shown(again, ()) == shown(first, ())
    assert calls(op, args, {"dtype": torch.float64}, other)[0].dtype == torch.float64
    calls(op, args, {})
    assert calls.times == 3, "without a mode it is executed"
