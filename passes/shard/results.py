"""What comes out of a step beside its gradients: how each result lies, and in words for the plan.

A result is that of the single-device step on the global batch. One that is cut along the batch is
gathered, one that is summed over the batch is reduced; over microbatches the same is done in time.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from partc.graph import Graph, value
from partc.plan.mesh import MICROBATCH_AXIS
from partc.plan.sharding import Sharding

NOTE = "extra "  # with which the plan's note on each begins


def sharding_of_result(node: fx.Node) -> Sharding:
    """How a result lies when the step ends: every rank has the whole of it."""
    return Sharding()


def notes_on_extras(graph: Graph) -> Iterator[str]:
    """A sentence on each extra of a training step: ``extra logits: f32[8,10], gathered over dp``.

    The graph has its shardings, and no collectives yet.
    """
    if graph.loss is None:
        return
    for name, node in graph.outputs.results.items():
        known = value(node)
        typed = Sharding().typed(known.shape, known.dtype)
        yield f"{NOTE}{name}: {typed}, {', '.join(_ways(node)) or 'the same on every rank'}"


def _ways(node: fx.Node) -> Iterator[str]:
    """How ranks and microbatches come to the whole of a result."""
    words = {"cut": "gathered over", "U": "summed over", "M": "the largest over"}
    layouts = dict(value(node).sharding.layouts)
    for kind, word in words.items():
        axes = [a for a, each in layouts.items() if each.kind == kind and a != MICROBATCH_AXIS]
        if axes:
            yield f"{word} {' and '.join(axes)}"
    over = layouts.get(MICROBATCH_AXIS)
    if over is not None:
        yield "of all microbatches side by side" if over.kind == "cut" else "of all microbatches"
