"""Give every random op one constant, so that a whole tensor and its pieces draw the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partc.graph.draws import takes_numbers
from partc.verification.precision import Raised

DRAWN = 0.5  # in place of a random float; of an integer 0


class SteadyDraws(TorchDispatchMode):
    """While this is open, what ops draw is 0.5 for floats, 0 for integers, True for bools.

    Two programs that draw masks of other shapes can then be compared. It holds in this thread.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if takes_numbers(func, args, kwargs):
            for tensor in result if isinstance(result, tuple | list) else (result,):
                _settle(tensor)
        return result


def _settle(tensor: Any) -> None:
    if isinstance(tensor, Tensor):
        is_float = tensor.is_floating_point() or tensor.is_complex()
        tensor.fill_(DRAWN if is_float else tensor.dtype == torch.bool)


@contextmanager
def as_on_any_device() -> Iterator[None]:
    """Compute in float64 and with constants in place of random numbers, as whole and in pieces."""
    with Raised(), SteadyDraws():
        yield
