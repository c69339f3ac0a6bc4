"""Compute the numbers that Python code reads from constant tensors while a step is traced.

``if mask.all():`` reads a value, and fakes have none. The value is computed here if it depends on
no weight, no input and no random number, as that of a causal mask which the model makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, has_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from partc.graph.fake_calls import tensors_in

aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)
LARGEST = 1 << 20  # elements of a constant that is worth computing while tracing


class UnknownNumberError(Exception):
    """A tensor's value depends on weights, inputs or a random generator."""


def known_number(func: Any, tensors: Sequence[Any]) -> Any:
    """The result of ``item()``, ``equal`` or ``is_nonzero`` on tensors that are being recorded.

    UnknownNumberError if the value depends on weights, inputs or random numbers.
    """
    mode = get_proxy_mode()
    if mode is None or not all(has_proxy_slot(x, mode.tracer) for x in tensors):
        raise UnknownNumberError
    slots: list[Any] = [get_proxy_slot(x, mode.tracer) for x in tensors]
    with _disable_current_modes():
        constants = _constants(mode.tracer.graph)
        if not all(slot.proxy.node in constants for slot in slots):
            raise UnknownNumberError
        return func(*(constants[slot.proxy.node] for slot in slots))


def _constants(graph: fx.Graph) -> dict[fx.Node, Any]:
    """The values of all recorded calls that read no placeholder, directly or through others.

    All are executed in order, as one may write in place into another's result.
    """
    known: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _is_constant(node, known):
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
        elif _is_mutable(node):
            _forget([known[read] for read in node.all_input_nodes if read in known], known)
    return known


def _is_constant(node: fx.Node, known: Mapping[fx.Node, Any]) -> bool:
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    small = all(fake.numel() <= LARGEST for fake in tensors_in(node.meta.get("val")))
    return small and not random and all(read in known for read in node.all_input_nodes)


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _forget(written: Sequence[Any], known: dict[fx.Node, Any]) -> None:
    """Forget values whose memory a call with unknown operands may write into."""
    memories = {x.untyped_storage().data_ptr() for each in written for x in tensors_in(each)}
    for node, value in list(known.items()):
        if any(x.untyped_storage().data_ptr() in memories for x in tensors_in(value)):
            del known[node]
