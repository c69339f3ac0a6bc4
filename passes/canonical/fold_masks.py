"""Replace attention masks that are constants by ``is_causal=True``, or drop them if all true."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from partc.graph import Graph, fake_of
from partc.graph.ancestors import ancestors
from partc.graph.graph_edits import drop_dead

aten = torch.ops.aten
IS_CAUSAL: dict[Any, int] = {  # attention op -> position of its is_causal argument
    aten._scaled_dot_product_flash_attention_for_cpu.default: 4,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 7,
}
LARGEST = 1 << 28  # elements; a larger mask would cost too much time and memory while compiling


def fold_masks(graph: Graph) -> None:
    """``attention(q, k, v, attn_mask=triangle)`` becomes ``attention(q, k, v, is_causal=True)``."""
    constants = _Constants()
    for node in list(graph.calls()):
        mask = node.kwargs.get("attn_mask")
        if node.target in IS_CAUSAL and isinstance(mask, fx.Node) and not _is_causal(node):
            shown = constants.shown(mask)
            if shown is not None:
                _fold(node, causal=shown == "triangle")
    drop_dead(graph)


def _fold(node: fx.Node, causal: bool) -> None:
    """Drop the mask from one attention call and set its ``is_causal``."""
    position = IS_CAUSAL[node.target]
    defaults = (0.0, False)  # dropout_p and is_causal, the last two before the keywords
    missing = position + 1 - len(node.args)
    arguments = [*node.args, *defaults[len(defaults) - missing :]]
    arguments[position] = causal
    node.args = tuple(arguments)
    node.kwargs = {name: given for name, given in node.kwargs.items() if name != "attn_mask"}


def _is_causal(node: fx.Node) -> bool:
    position = IS_CAUSAL[node.target]
    return len(node.args) > position and node.args[position] is True


# Verdicts by recipe, for the whole process: a model is traced more than once in a compile.
_SHOWN: dict[str, str | None] = {}


class _Constants:
    """Evaluates masks that read no placeholder; equal masks are evaluated once."""

    def __init__(self) -> None:
        self.known: dict[fx.Node, bool] = {}  # whether it is constant

    def shown(self, mask: fx.Node) -> str | None:
        """The positions that a mask shows: "all", "triangle" (causal), or None for any other mask.

        None also for a mask that is no constant, or too large.
        """
        steps = ancestors(mask)
        for step in steps:
            if step not in self.known:
                self.known[step] = self._is_constant(step)
        if not self.known[mask]:
            return None
        recipe = _recipe(steps)
        if recipe not in _SHOWN:
            _SHOWN[recipe] = _verdict(_evaluate(steps))
        return _SHOWN[recipe]

    def _is_constant(self, node: fx.Node) -> bool:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        called = node.op == "call_function" and not random
        return called and all(self.known[read] for read in node.all_input_nodes)


def _recipe(steps: list[fx.Node]) -> str:
    """The calls as text with ``%i`` for node i: equal texts compute equal values."""
    place = {node: f"%{i}" for i, node in enumerate(steps)}
    calls = (fx.map_arg((n.args, n.kwargs), place.__getitem__) for n in steps)
    return "\n".join(f"{n.target} {call}" for n, call in zip(steps, calls, strict=True))


def _evaluate(steps: list[fx.Node]) -> Tensor | None:
    """Compute the value of the last node; None where a value on the way is larger than LARGEST.

    A dim along which a value is constant is kept as size 1. Masks are broadcast over the batch and
    the heads, so that pointwise ops then cost the triangle of one sample alone.
    """
    env: dict[fx.Node, Any] = {}
    for node in steps:
        fake = fake_of(node)
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if node.target is aten.expand.default:
            env[node] = _aligned(env[node.args[0]], fake.dim())  # type: ignore[index]
            continue
        if pointwise and not _largest(node, env) <= LARGEST:
            return None
        if not pointwise and _elements(node) > LARGEST:
            return None
        read = env if pointwise else _Expanded(env)
        args, kwargs = fx.map_arg((node.args, node.kwargs), read.__getitem__)
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        env[node] = _collapsed(result) if isinstance(result, Tensor) else result
    found = env[steps[-1]]
    return found if isinstance(found, Tensor) else None


class _Expanded(dict[fx.Node, Any]):
    """The values of ``env``, each expanded from size-1 dims to its shape in the graph."""

    def __init__(self, env: dict[fx.Node, Any]) -> None:
        super().__init__()
        self.env = env

    def __missing__(self, node: fx.Node) -> Any:
        known, fake = self.env[node], fake_of(node)
        return known.expand(fake.shape) if isinstance(known, Tensor) else known


def _elements(node: fx.Node) -> int:
    """The number of elements of the largest tensor among a call's operands and results."""
    fakes = [fake_of(n) for n in (node, *node.all_input_nodes)]
    return max(prod(fake.shape) for fake in fakes if isinstance(fake, Tensor))


def _largest(node: fx.Node, env: dict[fx.Node, Any]) -> int:
    """The number of elements of a pointwise call's result, on operands with size-1 dims kept."""
    shapes = [known.shape for n in node.all_input_nodes if isinstance(known := env[n], Tensor)]
    return prod(torch.broadcast_shapes(*shapes))


def _aligned(known: Tensor, dims: int) -> Tensor:
    """The tensor with leading dims of size 1 added up to ``dims`` dims."""
    return known.reshape((1,) * (dims - known.dim()) + known.shape)


def _collapsed(known: Tensor) -> Tensor:
    """The tensor with size 1 in every dim along which it is constant."""
    for dim in range(known.dim()):
        if known.shape[dim] > 1 and _is_constant(known, dim):
            known = known.narrow(dim, 0, 1)
    return known


def _is_constant(known: Tensor, dim: int) -> bool:
    """Whether a tensor has one value along a dim; its ends tell nearly all that have several."""
    first, last = known.narrow(dim, 0, 1), known.narrow(dim, known.shape[dim] - 1, 1)
    return known.stride(dim) == 0 or (
        torch.equal(first, last) and torch.equal(known, first.expand_as(known))
    )


def _verdict(mask: Tensor | None) -> str | None:
    """ "all" for a mask without effect, "triangle" for a causal mask, None for any other.

    A float mask, which is added to the scores, must be 0 or at most the dtype's minimum everywhere.
    """
    if mask is None:
        return None
    shown = mask
    if mask.dtype != torch.bool:
        shown = mask == 0
        if not bool((shown | (mask <= torch.finfo(mask.dtype).min)).all()):
            return None
    if bool(shown.all()):
        return "all"
    rows, columns = shown.shape[-2:]
    triangle = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "triangle" if rows == columns and torch.equal(shown, triangle.expand_as(shown)) else None
