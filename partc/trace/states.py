"""Say in what state a value of Python is: a number, an array, an iterator, how long a list is.

Two states are equal where a step that reads the value would read the same.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Hashable
from enum import Enum
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import Any

import torch
from torch import Tensor

NUMBERS = (bool, int, float, complex, str, bytes, type(None))
FIXED = (*NUMBERS, Enum, range, slice, torch.dtype, torch.device, torch.layout, torch.memory_format)
FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)
MOST = 200  # entries of a list or dict that are looked at
SAMPLED_BYTES, BLOCK = 1 << 20, 1 << 12  # of a larger array, evenly spread blocks stand for all
SHOWN_BYTES = 80
_PRINTED = ("numpy", "itertools", "builtins", "decimal", "fractions", "datetime")
_DEEP, _LONG = 12, 1000  # what the state of an iterator or generator names: inside, in a row
_KNOWN = {  # packages whose objects tell their state when they are asked to be pickled
    "_random", "array", "builtins", "collections", "datetime", "decimal", "fractions", "functools",
    "itertools", "numpy", "operator", "pathlib", "random", "uuid",
}  # fmt: skip


class Unknown(Exception):
    """An object does not tell in what state it is."""


def state_of(value: Any) -> Hashable:
    """The state of a number, of the size of a list or dict, of an array, a set or an iterator.

    Raises:
        Unknown: the object does not tell.
    """
    if isinstance(value, FIXED):
        return type(value), repr(value)
    if isinstance(value, list | tuple | dict | deque):
        return "length", _length(value)
    if isinstance(value, set | frozenset):
        fixed = all(isinstance(each, FIXED) for each in value)
        return "set", frozenset(value) if fixed else len(value)
    if isinstance(value, GeneratorType):
        return _of_generator(value, _DEEP)
    return _bytes(value) or _pickled(value, _DEEP)


def shown(value: Any) -> str:
    """A number, a length or a small object as it is printed in an error; "" for others."""
    if isinstance(value, list | tuple | dict | deque):
        return str(_length(value))
    if isinstance(value, FIXED):
        return repr(value)
    small = type(value).__module__ in _PRINTED and getattr(value, "nbytes", 0) <= SHOWN_BYTES
    text = repr(value) if small else ""
    return "" if " at 0x" in text or len(text) > SHOWN_BYTES else text


def _length(value: Any) -> int:
    kind = next(kind for kind in (list, tuple, dict, deque) if isinstance(value, kind))
    return kind.__len__(value)


def _of_generator(value: Any, deep: int) -> Hashable:
    """Where a generator is, its variables, and the iterator from which it yields."""
    frame = value.gi_frame
    if frame is None or not deep:
        return "generator", -1
    inner = dict(frame.f_locals), value.gi_yieldfrom
    return "generator", frame.f_lasti, _described(inner, deep - 1)


def _bytes(value: Any) -> Hashable:
    """Type, shape and bytes of an array; None for what has no memory of its own."""
    try:
        memory = memoryview(value)
        if memory.format is None or "O" in memory.format:
            return None
        flat = memory.cast("B") if memory.c_contiguous else memoryview(memory.tobytes())
        step = BLOCK * (1 + memory.nbytes // SAMPLED_BYTES)
        held = b"".join(flat[at : at + BLOCK] for at in range(0, memory.nbytes, step))
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return None
    return type(value).__name__, memory.shape, memory.format, held


def _pickled(value: Any, deep: int) -> Hashable:
    root = type(value).__module__.partition(".")[0]
    if root not in _KNOWN or isinstance(value, (type, Tensor, *FUNCTIONS)):
        raise Unknown
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # iterators of Python 3.12 warn that they will not tell
        try:
            parts = value.__reduce_ex__(2)
        except Exception as error:  # whatever a class raises that cannot be pickled
            return _printed(value, error)
    return type(value).__name__, _described(parts, deep - 1)


def _printed(value: Any, error: Exception) -> Hashable:
    text = repr(value)
    if " at 0x" in text:
        raise Unknown from error
    return text


def _described(value: Any, deep: int) -> Hashable:
    """A part of an object's state; what is no number and no iterator by its identity."""
    if isinstance(value, FIXED):
        return repr(value)
    if deep and isinstance(value, tuple | list):
        return len(value), tuple(_described(each, deep - 1) for each in value[:_LONG])
    if deep and isinstance(value, dict):
        pairs = list(value.items())[:_LONG]
        return len(value), tuple((repr(k), _described(v, deep - 1)) for k, v in pairs)
    if isinstance(value, GeneratorType):
        return _of_generator(value, deep)
    try:
        return (_bytes(value) or _pickled(value, deep)) if deep else type(value).__name__
    except Unknown:
        return type(value).__name__
