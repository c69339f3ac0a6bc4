"""Small calls that every rule is proved on: the table in, signatures by the rule's name out.

Elementwise ops get theirs from their schema; all others stand in two tables by hand. Dims have
different sizes, most of which 2, 3 and 4 divide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from partc.rules.signature import Signature
from partc.rules.table import RULES, name_of
from tests.rule_cases import cases_dense as dense
from tests.rule_cases import cases_shape as shape
from tests.rule_cases.schema_cases import elementwise_cases, functional_overloads

BY_HAND = (
    *dense.MATMUL, *dense.LINALG, *dense.NORM, *dense.ATTENTION, *dense.EMBEDDING, *dense.LOSS,
    *dense.CONV, *dense.POOLING, *shape.VIEW, *shape.REDUCE, *shape.ALONG, *shape.SLICE,
    *shape.INDEX, *shape.FACTORY,
)  # fmt: skip


def cases_by_rule() -> dict[str, list[Signature]]:
    """For every name in the table the calls it is proved on, in the table's order."""
    by_hand: dict[str, list[Signature]] = {}
    for case in BY_HAND:
        by_hand.setdefault(rule_name(case.target), []).append(case)
    return {name: by_hand.get(name) or _from_schema(name) for name in RULES}


def rule_name(target: Any) -> str:
    """The name under which the table holds an op: its own or, failing that, its packet's."""
    name = name_of(target)
    return name if name in RULES or "." not in name else name.rpartition(".")[0]


def _from_schema(name: str) -> list[Signature]:
    packet, overload = _packet(name), name.split(".")[2:]
    if packet is None:
        return []
    named = [getattr(packet, overload[0])] if overload else functional_overloads(packet)
    return [case for each in named for case in elementwise_cases(each)]


def why_not_run(name: str) -> str:
    """Why a rule without a case has none; empty if there is no reason but forgetting it."""
    if name == "operator.getitem":
        return "hands on a result of a call, and is proved with that call"
    if name == "partc.hooked":
        return "calls a function that the user writes"
    if not name.startswith("aten."):
        return ""
    packet = _packet(name)
    if packet is None:
        return "this torch has no such op"
    overloads = list(functional_overloads(packet))
    if not any(_has_kernel(overload) for overload in overloads):
        return "the op has no kernel for the CPU"
    if any(torch.Tag.dynamic_output_shape in overload.tags for overload in overloads):
        return "the shapes of its results depend on data"
    return ""


def _has_kernel(overload: OpOverload) -> bool:
    keys = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(overload.name(), key) for key in keys)


def _packet(name: str) -> OpOverloadPacket | None:
    namespace, op = name.split(".")[:2]
    found: OpOverloadPacket | None = getattr(getattr(torch.ops, namespace), op, None)
    return found
