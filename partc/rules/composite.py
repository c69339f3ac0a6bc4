"""Ops that torch writes as other ops before a graph is made: no graph has them, so that nothing
reads a rule of theirs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from partc.rules.example_calls import alike, unlike
from partc.rules.signature import Signature, fake_mode

LOG = logging.getLogger("partc")
MOST_NAMED = 6
_KERNELS = ("CPU", "CUDA", "Meta", "CompositeExplicitAutograd", "AutogradCPU")  # of its own


def is_composite(overload: OpOverload) -> bool:
    """Whether torch opens an op on every device, with a gradient and without one."""
    name = overload.name()
    if not torch._C._dispatch_has_kernel(name):
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not any(has(name, key) for key in _KERNELS)


def written_as(overload: OpOverload) -> list[str]:
    """The ops that a small call of a composite op becomes; [] where no call can be made."""
    return next(filter(None, map(_parts, itertools.chain(alike(overload), unlike(overload)))), [])


def opened(op: str) -> list[OpOverload]:
    """The overloads that a rule's name means, if torch opens them all; [] of any other op."""
    namespace, _, rest = op.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    if found is None:
        return []
    each = [o for o in _tensor_ops(found) if overload in ("", o._overloadname)]
    return each if all(map(is_composite, each)) else []


def tell_if_opened(op: str) -> None:
    """Tell that a rule is of an op that no graph has, and which ops a graph has in its place."""
    overloads = opened(op)
    if overloads:
        named = list(dict.fromkeys(name for each in overloads for name in written_as(each)))
        LOG.warning(
            "partc: rule(%r, ...) is not read: no graph has this op, as torch writes it as other "
            "ops%s. Write the rule of an op that the graph has.",
            op, f", such as {', '.join(named[:MOST_NAMED])}" if named else "",
        )  # fmt: skip


def _tensor_ops(packet: Any) -> Iterator[OpOverload]:
    """The overloads of an op that graphs may call: of tensors, with results of their own."""
    for name in packet.overloads():
        overload = getattr(packet, name)
        is_op = torch._C._dispatch_has_kernel(overload.name())
        if is_op and not overload._schema.is_mutable:
            yield overload


def _parts(call: Signature) -> list[str]:
    with fake_mode():
        operands = [torch.empty(spec.shape, dtype=spec.dtype) for spec in call.operands]
    for operand in operands:
        operand.requires_grad_(operand.dtype.is_floating_point)
    recorder = _Recorder()
    with fake_mode(), recorder:
        try:
            call.run(operands)
        except Exception:  # whatever torch says of such operands
            return []
    return list(dict.fromkeys(recorder.names))[:MOST_NAMED]


class _Recorder(TorchDispatchMode):
    """Notes the ops that are called, without those that only look at memory anew."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace != "prim":
            name = func._schema.name.split("::")[1].rstrip("_")  # graphs write into no operand
            self.names.append(f"{func.namespace}.{name}")
        return func(*args, **(kwargs or {}))
