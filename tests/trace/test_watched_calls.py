"""A mode that watches calls is given those of ops, and not the backward's questions for devices."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from partc.trace.watched_calls import WatchedCalls


class Noted(WatchedCalls):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs)


def test_a_fake_tells_its_device_by_itself() -> None:
    noted = Noted()
    with FakeTensorMode():
        weight = torch.empty(4, 8, requires_grad=True)
        x = torch.empty(2, 8)
        with noted:
            y = torch.tanh(torch.nn.functional.linear(x, weight))
            (grad,) = torch.autograd.grad(y.sum(), [weight])
    assert "aten.tanh_backward.default" in noted.names
    assert not any("device" in name for name in noted.names)
    assert grad.device == torch.device("cpu")
