"""Views as steps: how each view op is undone, so that writing through a view writes its base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from partc.errors import TraceError
from partc.graph import fake_of, value
from partc.graph.graph_edits import call_before

aten = torch.ops.aten

Undo = Callable[
    [fx.Node, fx.Node, "Step", fx.Node], fx.Node
]  # where, base, step, new view -> new base


@dataclass(frozen=True)
class Step:
    """One view op and its arguments after the tensor it looks at."""

    target: Any
    rest: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def redo(self, where: fx.Node, base: fx.Node) -> fx.Node:
        """The view of ``base``, computed right before ``where``."""
        return call_before(where, self.target, base, *self.rest, **dict(self.kwargs))

    def undo(self, where: fx.Node, base: fx.Node, new: fx.Node) -> fx.Node:
        """``base`` with the part that this step shows replaced by ``new``."""
        undo = UNDO.get(self.target)
        if undo is None:
            raise TraceError(
                where=value(where).source or value(where).module,
                what=f"an in-place op writes through {self.target}",
                why="what it writes cannot be traced back to the whole tensor",
                do="Write to the tensor itself, or use the out-of-place op.",
            )
        return undo(where, base, self, new)


def step_of(node: fx.Node) -> Step:
    """A view call as a step; a piece of a split as the slice or selection it is."""
    if node.args and isinstance(node.args[0], fx.Node) and _is_list_view(node.args[0]):
        return _piece(node.args[0], int(node.args[1]))  # type: ignore[arg-type]
    return Step(node.target, node.args[1:], tuple(node.kwargs.items()))


def _is_list_view(node: fx.Node) -> bool:
    return node.target in (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)


def _piece(parts: fx.Node, index: int) -> Step:
    """Element ``index`` of a split or unbind as one step from the tensor that was split."""
    dim = _argument(parts, "dim", 2 if parts.target != aten.unbind.int else 1)
    if parts.target == aten.unbind.int:
        return Step(aten.select.int, (dim, index))
    sizes = [part.shape[dim] for part in fake_of(parts)]
    start = sum(sizes[:index])
    return Step(aten.slice.Tensor, (dim, start, start + sizes[index]))


def _argument(node: fx.Node, name: str, position: int, default: Any = 0) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


# undoing -------------------------------------------------------------------------------------
def _same(where: fx.Node, base: fx.Node, step: Step, new: fx.Node) -> fx.Node:
    return new


def _reshaped(where: fx.Node, base: fx.Node, step: Step, new: fx.Node) -> fx.Node:
    return call_before(where, aten.reshape.default, new, list(fake_of(base).shape))


def _swapped(where: fx.Node, base: fx.Node, step: Step, new: fx.Node) -> fx.Node:
    return call_before(where, step.target, new, *step.rest)


def _permuted(where: fx.Node, base: fx.Node, step: Step, new: fx.Node) -> fx.Node:
    dims = [dim % len(step.rest[0]) for dim in step.rest[0]]
    inverse = [dims.index(i) for i in range(len(dims))]
    return call_before(where, aten.permute.default, new, inverse)


def _scattered(op: Any) -> Undo:
    def undo(where: fx.Node, base: fx.Node, step: Step, new: fx.Node) -> fx.Node:
        return call_before(where, op, base, new, *step.rest, **dict(step.kwargs))

    return undo


UNDO: dict[Any, Undo] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
    aten._reshape_alias.default: _reshaped,
    aten.reshape.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.t.default: _swapped,
    aten.transpose.int: _swapped,
    aten.permute.default: _permuted,
    aten.slice.Tensor: _scattered(aten.slice_scatter.default),
    aten.select.int: _scattered(aten.select_scatter.default),
    aten.diagonal.default: _scattered(aten.diagonal_scatter.default),
    aten.as_strided.default: _scattered(aten.as_strided_scatter.default),
}
