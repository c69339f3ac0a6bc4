"""Refuse a step that reads, sets or fills the ``.grad`` of the model's own parameters.

What a gradient is when a step begins depends on the script: on ``zero_grad``, on an accumulation
over several steps. A trace has none, and a program adds to gradients that it never reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from partc.errors import TraceError
from partc.trace.source_lines import source_here

_TORCH = str(Path(torch.__file__).parent) + os.sep
_FAKES = str(Path(_TORCH, "_subclasses")) + os.sep
_COPIES = {"_apply", "__deepcopy__"}  # they convert and copy whatever a tensor has
_GRAD: Any = Tensor.grad


@contextmanager
def grads_unread(params: Mapping[str, Tensor], fakes: Mapping[str, Tensor]) -> Iterator[None]:
    """Run a step; TraceError where it uses the ``.grad`` of a parameter, or has added to one.

    ``fakes`` stand in the step for the model's own ``params``.
    """
    names = {id(each): name for own in (params, fakes) for name, each in own.items()}
    watched = _watched({at: name for at, name in names.items() if name in params})
    for kind in (FakeTensor, nn.Parameter):
        type.__setattr__(kind, "grad", watched)
    try:
        yield
    finally:
        for kind in (FakeTensor, nn.Parameter):
            type.__delattr__(kind, "grad")
    for name in params:
        if fakes[name].grad is not None:
            raise _refusal(name, "the step calls backward(), which adds to its .grad", "the step")


def _watched(names: Mapping[int, str]) -> Any:
    """The attribute ``.grad``, by which code of a step reaches no gradient of a parameter."""

    def checked(tensor: Tensor) -> None:
        reader = sys._getframe(2).f_code
        ours = reader.co_filename.startswith(_TORCH) and reader.co_name in _COPIES
        if id(tensor) in names and not ours and not reader.co_filename.startswith(_FAKES):
            raise _refusal(names[id(tensor)], "the step uses its .grad", source_here())

    def read(tensor: Tensor) -> Any:
        checked(tensor)
        return _GRAD.__get__(tensor)

    def write(tensor: Tensor, grad: Any) -> None:
        checked(tensor)
        _GRAD.__set__(tensor, grad)

    def delete(tensor: Tensor) -> None:
        checked(tensor)
        _GRAD.__delete__(tensor)

    return property(read, write, delete)


def _refusal(name: str, what: str, where: str) -> TraceError:
    return TraceError(
        where=f"{name} ({where})" if where else name,
        what=what,
        why="a program computes a step from weights, buffers and inputs, whatever gradients are",
        do="Use torch.autograd.grad, or a hook of the parameter; keep what a later step reads in a "
        "buffer, and clip, step an optimizer, and call backward() and zero_grad() behind the step.",
    )
