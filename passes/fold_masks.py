"""Replace attention masks that are known when compiling by ``is_causal=True``, or by nothing."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from partc.graph import Graph, drop_dead, shape_of

aten = torch.ops.aten
IS_CAUSAL = {  # attention op -> position of its is_causal argument; attn_mask is a keyword
    aten._scaled_dot_product_flash_attention_for_cpu.default: 4,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 7,
}
LARGEST = 1 << 28  # elements of a mask that is worth computing while compiling


def fold_masks(graph: Graph) -> None:
    """``attention(q, k, v, attn_mask=lower triangle)`` becomes ``attention(q, k, v, is_causal=True)``."""
    known: dict[fx.Node, Any] = {}
    for node in list(graph.calls()):
        mask = node.kwargs.get("attn_mask")
        if node.target in IS_CAUSAL and isinstance(mask, fx.Node):
            shown = _visible(_evaluate(mask, known))
            if shown is not None and not _is_causal(node):
                _fold(node, shown)
    drop_dead(graph)


def _fold(node: fx.Node, shown: Tensor) -> None:
    """Drop the mask from one attention call if ``shown`` says all, or all up to the diagonal."""
    rows, columns = shown.shape[-2:]
    triangle = rows == columns and torch.equal(
        shown, torch.ones(rows, columns, dtype=torch.bool).tril().expand_as(shown)
    )
    if not triangle and not shown.all():
        return
    position = IS_CAUSAL[node.target]
    defaults = [0.0, False][: max(0, position + 1 - len(node.args))]
    arguments = [*node.args, *defaults[-(position + 1 - len(node.args)) :]] if defaults else [*node.args]
    arguments[position] = triangle
    node.args = tuple(arguments)
    node.kwargs = {name: given for name, given in node.kwargs.items() if name != "attn_mask"}


def _is_causal(node: fx.Node) -> bool:
    position = IS_CAUSAL[node.target]
    return len(node.args) > position and node.args[position] is True


def _visible(mask: Any) -> Tensor | None:
    """Where a mask lets look, None if it is unknown or does more than let or not let look."""
    if not isinstance(mask, Tensor) or mask.dtype == torch.bool:
        return mask
    shown = mask == 0
    blocked = mask <= torch.finfo(mask.dtype).min
    return shown if bool((shown | blocked).all()) else None


def _evaluate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The value of a node that depends on no placeholder and no random draw, else None."""
    for step in _ancestors(node):
        if step not in known:
            known[step] = _run(step, known)
    return known[node]


def _run(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded in _tags(node):
        return None
    if any(known[read] is None for read in node.all_input_nodes):
        return None
    fake = node.meta["val"]
    if isinstance(fake, Tensor) and prod(fake.shape) > LARGEST:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _tags(node: fx.Node) -> Any:
    return getattr(node.target, "tags", ())


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """Everything a node is computed from and the node itself, in order."""
    found, waiting = {node}, [node]
    while waiting:
        for read in waiting.pop().all_input_nodes:
            if read not in found:
                found.add(read)
                waiting.append(read)
    return sorted(found)
