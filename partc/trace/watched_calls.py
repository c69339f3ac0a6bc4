"""What a mode that watches the calls of a step is given: each call but the question for a device.

The backward asks every tensor for its device, twice as often as it calls an op, and a fake tells it
without any mode's help.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE = torch.ops.prim.device.default


class WatchedCalls(TorchDispatchMode):
    """Gives ``call`` every call of an op. A subclass has ``call`` in place of torch's method."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls, **options: Any) -> None:
        """As torch has it for its own method: what a mode does is not for torch.compile."""
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]
        if "call" in vars(cls):
            cls.call = _disable_dynamo(vars(cls)["call"])  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # of the method below, which torch calls for devices too

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call."""
        raise NotImplementedError
