"""What comes out of a step beside its gradients: how each result lies, and in words for the plan.

A result is that of the single-device step on the global batch. One that is cut along the batch is
gathered, one that is summed over the batch is reduced; over microbatches the same is done in time.
Where ranks are given samples of their own (``batch = "local"``), they keep their own rows, or take
these where samples were moved on the way, and the graph's ``rows`` say where they lie.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from partc.graph import Graph, value
from partc.plan import Plan
from partc.plan.batch import given
from partc.plan.mesh import MICROBATCH_AXIS
from partc.plan.sharding import Layout, R, Sharding
from partc.trace.returns import EXTRA


def sharding_of_result(
    node: fx.Node, graph: Graph, plan: Plan, *, in_turn: bool = False
) -> Sharding:
    """How a result lies when the step ends, or with ``in_turn`` what one microbatch adds to it.

    A rank's own rows are those that it was given. Where the model has cut the rows over another
    axis before, ``f32[8@tp+dp]``, the rank's part of each piece would be rows of other ranks.
    """
    kept = {MICROBATCH_AXIS} if in_turn else set()
    have, own = value(node).sharding, own_rows(graph, plan)
    kept |= {axis for axis, _ in have.cuts() if axis in own}
    before = _dealt_before(graph, plan, own)
    cuts = {axis: x for axis, x in have.cuts() if axis in kept | before}
    if (rows := rows_told(node, graph)) is not None:
        cuts |= dict.fromkeys(own | before if rows != R else own, rows)
        kept |= own
    lies = Sharding.of(cuts, graph.mesh)
    return lies.without([axis for axis in graph.mesh.names if axis not in kept], graph.mesh)


def _dealt_before(graph: Graph, plan: Plan, own: Collection[str]) -> set[str]:
    """The axes that cut samples of inputs before the axes ``own`` do, such as microbatches."""
    before = set[str]()
    for name in graph.inputs:
        cuts = Sharding.of(plan.stored(name, plan.inputs), graph.mesh).cuts()
        for i, (axis, x) in enumerate(cuts):
            if axis in own:
                before |= {b for b, y in cuts[:i] if (y.dim, y.outer) == (x.dim, x.outer)}
    return before


def rows_told(node: fx.Node, graph: Graph) -> Layout | None:
    """How a result lies on each axis of ranks' own rows, where samples were moved on the way to it;
    None where its own sharding tells.
    """
    names = [name for name, each in graph.outputs.results.items() if each is node]
    return next((graph.rows[name] for name in names if name in graph.rows), None)


def own_rows(graph: Graph, plan: Plan) -> set[str]:
    """The axes along which ranks are given samples of their own."""
    return {axis for name in graph.inputs for axis, _ in given(name, plan, graph.mesh).cuts()}


def notes_on_extras(graph: Graph, plan: Plan) -> Iterator[str]:
    """A sentence on each extra of a training step: ``extra logits: f32[8,10], gathered over dp``.

    The graph has its shardings, and no collectives yet.
    """
    if graph.loss is None:
        return
    for name, node in graph.outputs.results.items():
        known, lies = value(node), sharding_of_result(node, graph, plan)
        ways = [*(["this rank's rows"] if lies.cuts() else []), *_ways(node, lies)]
        told = ", ".join(ways) or "the same on every rank"
        yield f"{EXTRA}{name}: {lies.typed(known.shape, known.dtype)}, {told}"


def _ways(node: fx.Node, lies: Sharding) -> Iterator[str]:
    """How ranks and microbatches come to the whole of a result."""
    words = {"cut": "gathered over", "U": "summed over", "M": "the largest over"}
    layouts = dict(value(node).sharding.layouts)
    for kind, word in words.items():
        left = {*dict(lies.layouts), MICROBATCH_AXIS}
        axes = [a for a, each in layouts.items() if each.kind == kind and a not in left]
        if axes:
            yield f"{word} {' and '.join(axes)}"
    over = layouts.get(MICROBATCH_AXIS)
    if over is not None:
        yield "of all microbatches side by side" if over.kind == "cut" else "of all microbatches"
