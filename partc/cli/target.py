"""What a name on the command line stands for: a model, example inputs, a loss; their sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

LARGE = 2**28  # numbers of a tensor: 1 GB of float32
_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn}


@dataclass(frozen=True)
class Target:
    """A model, its example inputs and its loss."""

    model: nn.Module
    inputs: Any  # as ``partc.compile`` takes them
    loss: Callable[..., Any] | None = None
    labels: int = 0  # how many of the last inputs only the loss reads
    note: str = ""  # what a user should know of batch and loss

    def for_inference(self) -> Target:
        """The model in eval mode, without a loss and the inputs that only the loss reads."""
        if isinstance(self.inputs, dict):
            names = [*self.inputs][: len(self.inputs) - self.labels]
            return Target(self.model.eval(), {name: self.inputs[name] for name in names})
        inputs = self.inputs[: -self.labels] if self.labels else self.inputs
        return Target(self.model.eval(), inputs)


@dataclass(frozen=True)
class Sizes:
    """The options of the command line for a Hugging Face model; None: not given."""

    batch: int | None = None
    seq: int | None = None
    layers: int | None = None
    dtype: torch.dtype = torch.float32
    dropout: bool = True


class _LargeOnMeta(TorchFunctionMode):
    """Makes tensors on the meta device that are too large for anything but a parameter."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if function in _MAKERS and given.get("device") is None and _size(args, given) > LARGE:
            given["device"] = "meta"
        return function(*args, **given)


def _size(args: Any, given: dict[str, Any]) -> int:
    """How many numbers a call of torch.empty and its like asks for."""
    sizes = given.get("size", args[0] if len(args) == 1 else args)
    sizes = sizes if isinstance(sizes, list | tuple) else [sizes]
    return math.prod(size for size in sizes if isinstance(size, int))


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters that are made inside of the ``with`` on the meta device.

    Buffers keep their values, as the compiler uses those of small tables. Only what is larger than
    any buffer that models have, such as the experts of a layer in one tensor, is on meta at once.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # else a tied weight would become two
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
