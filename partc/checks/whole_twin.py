"""Turn a call of a local graph back into the call on whole tensors, which rules speak of.

``view(x, [4, 256])`` on a rank with tp=2 becomes ``view(x, [4, 512])``: literal sizes and bounds
that ``partc.rules.local`` made smaller grow again. An op that reads a window of indices becomes the
op of the model (``masked_embedding -> aten.embedding``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from partc.graph import fake_of, is_tensor, results_of, set_fake, set_like, set_value, value
from partc.graph.graph_edits import run_fake
from partc.rules.call import local_call, parameters
from partc.rules.notation import resolve
from partc.rules.strategy import applied
from partc.rules.table import RULES, Rule, find


def whole_twin(node: fx.Node, outs: Sequence[fx.Node | None]) -> fx.Node:
    """The call on whole tensors, in a graph of its own.

    ``outs``: the nodes of the local call's results, None for an unread one. The caller has to be in
    a FakeTensorMode.
    """
    graph = fx.Graph()
    twins = {operand: _placeholder(graph, operand) for operand in node.all_input_nodes}
    twin = graph.node_copy(node, twins.__getitem__)
    twin.target = _unwindowed(node.target)
    results = [
        None if carrier is None else _whole_fake(carrier, fake)
        for carrier, fake in zip(outs, results_of(node), strict=True)
    ]
    set_like(twin, node)
    set_fake(twin, results[0] if is_tensor(node) else results)
    entry = find(node.target)
    if entry is not None and (entry.sizes or entry.scales):
        _set(twin, dict(_literals(node, entry, [_shape(r) for r in results])))
    if None in outs and len(outs) > 1:  # a result that nobody reads may fix letters of the rule
        made = run_fake(twin.target, twin.args, twin.kwargs)
        set_fake(twin, [new if r is None else r for r, new in zip(results, made, strict=True)])
    return twin


def _placeholder(graph: fx.Graph, operand: fx.Node) -> fx.Node:
    twin = graph.placeholder(operand.name)
    set_value(twin, value(operand))
    set_fake(twin, _whole_fake(operand, fake_of(operand)))
    return twin


def _whole_fake(node: fx.Node, fake: Any) -> Any:
    if not isinstance(fake, Tensor):
        return fake
    return torch.empty(value(node).shape, dtype=fake.dtype, device=fake.device)


def _unwindowed(target: Any) -> Any:
    """The model's op for an op that reads a window: ``masked_embedding -> aten.embedding``."""
    if isinstance(target, OpOverload):
        return target
    for name, rule in RULES.items():
        windowed = rule.windowed
        if windowed is not None and windowed.target is target:
            namespace, op = name.split(".")[:2]
            return getattr(getattr(torch.ops, namespace), op).default
    return target


def _literals(
    node: fx.Node, entry: Rule, results: list[tuple[int, ...] | None]
) -> Iterator[tuple[str, Any]]:
    """The sizes and bounds of the call on whole tensors, by argument."""
    if entry.sizes:
        yield entry.sizes, list(results[0] or ())
    if not entry.scales:
        return
    here = [_shape(r) for r in results_of(node)]
    local = local_call(node, here, node.args, node.kwargs)
    notation, factors = applied(entry, local)
    shapes = [None if s is None else value(s).shape for s in local.slots]
    # letters that are never sharded are as large here, and known where a result is not read
    known = {f: factors.sizes[f] for f in notation.frozen if f in factors.sizes}
    whole = resolve(notation, shapes[: len(notation.operands)], results, known).sizes
    for name, letters in entry.scales.items():
        these = [letter for letter in letters if letter in whole]
        times = prod(whole[x] for x in these), prod(factors.sizes[x] for x in these)
        if not these and name in ("split_size", "split_sizes"):
            times = _along(local.dim(), results, here)
        if local[name] is not None:
            yield name, _scaled(local[name], *times)


def _along(
    dim: int, results: list[tuple[int, ...] | None], here: list[tuple[int, ...] | None]
) -> tuple[int, int]:
    """The size of a result along a dim, on whole tensors and here: parts of one have no letter."""
    pairs = zip(results, here, strict=True)
    known = ((large[dim], small[dim]) for large, small in pairs if large and small)
    return next(((large, small) for large, small in known if small), (1, 1))


def _scaled(given: Any, large: int, small: int) -> Any:
    """A size, bound or list of sizes, proportionally larger; "to the end" stays what it is."""
    if isinstance(given, list | tuple):
        return [_scaled(each, large, small) for each in given]
    # aten spells "to the end" as 2**63 - 1, which is no size
    return given if given >= 2**62 else given * large // small


def _set(twin: fx.Node, changes: dict[str, Any]) -> None:
    """Replace arguments by name: positional ones in place, others as keywords."""
    names = [name for name, _, _ in parameters(twin.target)]
    twin.args = tuple(changes.get(n, a) for n, a in zip(names, twin.args, strict=False))
    named = {name: x for name, x in changes.items() if name not in names[: len(twin.args)]}
    twin.kwargs = {**twin.kwargs, **named}


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
