"""Calls of elementwise ops made from their schemas: an overload in, signatures that run out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from partc.errors import RuleError
from partc.rules.experiment import Refused, whole_run
from partc.rules.signature import Signature, Spec

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
SHAPE = (12, 24)
LITERALS: dict[str, Any] = {"float": 0.4, "int": 1, "bool": True, "str": "none"}
NUMBERS = (0.7, 2)  # for arguments that may be either


def elementwise_cases(overload: OpOverload) -> list[Signature]:
    """A call with equal shapes and, where the op broadcasts, one with a smaller last operand."""
    plain = _first_that_runs(overload, SHAPE)
    if plain is None:
        return []
    if len(plain.operands) < 2:
        return [plain]
    broadcast = _first_that_runs(overload, SHAPE[1:])
    return [plain, broadcast] if broadcast else [plain]


def _first_that_runs(overload: OpOverload, last: tuple[int, ...]) -> Signature | None:
    """The call with the first dtypes that the op takes: all alike, or a mask among floats."""
    for dtype in DTYPES:
        for mask, number in itertools.product((dtype, torch.bool), NUMBERS):
            signature = _written(overload, last, (dtype, mask), number)
            if signature is not None and _runs(signature):
                return signature
    return None


def _written(
    overload: OpOverload,
    last: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    number: float,
) -> Signature | None:
    """The overload with every argument that has no default filled in by its type."""
    tensors = [a.name for a in overload._schema.arguments if _takes_tensor(a)]
    if not tensors:
        return None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in overload._schema.arguments:
        if argument.name in tensors:
            shape = last if argument.name == tensors[-1] and len(tensors) > 1 else SHAPE
            is_mask = "mask" in argument.name or argument.name == "condition"
            given: Any = Spec(shape, dtypes[is_mask])
        elif argument.has_default_value():
            continue
        elif str(argument.type) in (*LITERALS, "number"):
            given = LITERALS.get(str(argument.type), number)
        else:
            return None
        if argument.kwarg_only or len(args) < overload._schema.arguments.index(argument):
            kwargs[argument.name] = given
        else:
            args.append(given)
    return Signature.call(overload, *args, **kwargs)


def _takes_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]") and argument.name != "generator"


def _runs(signature: Signature) -> bool:
    """Whether the call runs and gives tensors whose shapes do not depend on data."""
    try:
        _, results = whole_run(signature, seed=1)
        signature.node()
    except (Refused, RuleError):
        return False
    return any(result is not None for result in results)


def functional_overloads(packet: OpOverloadPacket) -> Iterator[OpOverload]:
    """The overloads of an op that write nothing in place, in the schema's order."""
    for name in packet.overloads():
        overload = getattr(packet, name)
        if not overload._schema.is_mutable:
            yield overload
