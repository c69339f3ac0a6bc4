"""Settings of the process under which a model runs on fakes, put back afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from partc.graph.fake_calls import storage_of
from partc.trace.python_random import quiet_python_random


@contextmanager
def converted_to_themselves() -> Iterator[None]:
    """Let a forward call ``module.to(dtype)`` with the dtype that the module has already.

    torch swaps each fake parameter with its conversion, and raises where the parameter has other
    references. A conversion to itself shares the memory, so nothing has to be swapped.
    """
    swap: Any = torch.utils.swap_tensors

    def swap_others(one: Tensor, other: Tensor) -> None:
        if one.dtype != other.dtype or storage_of(one) != storage_of(other):
            swap(one, other)

    torch.utils.swap_tensors = swap_others
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


@contextmanager
def quiet_generator() -> Iterator[None]:
    """Restore the states of the default random generators afterwards, Python's among them."""
    state = torch.default_generator.get_state()
    try:
        with quiet_python_random():
            yield
    finally:
        torch.default_generator.set_state(state)


@contextmanager
def quiet_warnings() -> Iterator[None]:
    """Let fakes of a tensor with a history be made, which looks at its ``.grad``, and be copied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield
