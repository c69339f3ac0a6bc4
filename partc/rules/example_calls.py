"""Small calls of an op that are made from its signature alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from partc.errors import RuleError
from partc.rules.signature import Signature, Spec

SHAPES = ((12, 24), (6, 12, 24), (24,))  # of all operands of an example call
SQUARE = ((24,), (24, 24), (24, 24, 24), (24, 24, 24, 24))  # of operands by themselves
MOST = 64  # calls that are tried with operands of unequal shapes
_LITERALS: dict[str, Any] = {"float": 0.4, "number": 0.4, "int": 1, "bool": True, "str": "none"}
_SIZES = {"List[int]": (24,)}  # of a norm


def alike(overload: OpOverload) -> Iterator[Signature]:
    """Calls whose operands have one shape, and that run on fake tensors."""
    for shape in SHAPES:
        yield from _running(overload, itertools.repeat(shape), _LITERALS)


def unlike(overload: OpOverload) -> Iterator[Signature]:
    """Calls whose operands have any numbers of dims, all of one size, and that run."""
    num = sum(str(each.type) == "Tensor" for each in overload._schema.arguments)
    for shapes in itertools.islice(itertools.product(SQUARE, repeat=num), MOST):
        yield from _running(overload, iter(shapes), {**_LITERALS, **_SIZES})


def _running(
    overload: OpOverload, shapes: Iterator[tuple[int, ...]], literals: Mapping[str, Any]
) -> Iterator[Signature]:
    num = sum(str(each.type) == "Tensor" for each in overload._schema.arguments)
    given = [next(shapes) for _ in range(num)]
    for mask in (torch.float32, torch.bool):
        call = _call(overload, given, mask, literals)
        if call.operands and runs(call):
            yield call


def _call(
    overload: OpOverload,
    shapes: Sequence[tuple[int, ...]],
    mask: torch.dtype,
    literals: Mapping[str, Any],
) -> Signature:
    """A call of what must be given; ``mask`` is the dtype of tensors that are called one."""
    args, kwargs, left = list[Any](), dict[str, Any](), iter(shapes)
    for argument in overload._schema.arguments:
        if argument.has_default_value():
            continue
        dtype = mask if "mask" in argument.name else torch.float32
        kind = str(argument.type)
        given = Spec(next(left), dtype) if kind == "Tensor" else literals.get(kind)
        kwargs |= {argument.name: given} if argument.kwarg_only else {}
        args += [] if argument.kwarg_only else [given]
    return Signature.call(overload, *args, **kwargs)


def runs(call: Signature) -> bool:
    """Whether torch takes a call."""
    try:
        call.node()
    except RuleError:
        return False
    return True
