"""Find along which dim each input has the rows that islands compute in unequal numbers.

In: a plan with ``[uneven]``, whose ``[inputs]`` say where the batch is not dim 0. Out: the plan,
with ``dims`` in that table for these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partc.errors import PlanError
from partc.graph import Graph, value
from partc.plan import Plan
from partc.plan.batch import is_pinned, layout_of
from partc.plan.sharding import R
from partc.plan.uneven import UNEVEN, WHOLE

NOTE = "the loss is the mean of the losses of all islands' microbatches"


def find_rows(graph: Graph, plan: Plan) -> Plan:
    """The plan, with the dims of rows that are not dim 0.

    PlanError where no input has rows, or one has them in several runs (``i64[T*B]`` of a model that
    has the sequence first).
    """
    how = plan.uneven
    assert how is not None
    if not how.dims:
        how = replace(how, dims=dict(_dims(graph, plan)))
    unknown = [name for name in how.dims if name not in graph.inputs]
    if unknown:
        raise _refused(
            f"dims names {unknown[0]!r}", f"inputs are {', '.join(graph.inputs)}",
            "Write the name of an input.",
        )  # fmt: skip
    for name, node in graph.inputs.items():
        dim, dims = how.dim_of(name), len(value(node).shape)
        if dim is not None and dim >= dims:
            raise _refused(
                f"{name} has no dim {dim}", f"it has {dims}", "Write a dim that it has, or -1."
            )
    if all(how.dim_of(name) is None for name in graph.inputs):
        raise _refused(
            "no input has rows", "an island that is faster computes more rows than another",
            "Say along which dim they are: dims = { x = 0 }.",
        )  # fmt: skip
    return plan.changed(uneven=how, notes=tuple(dict.fromkeys((*plan.notes, NOTE))))


def _dims(graph: Graph, plan: Plan) -> Iterator[tuple[str, int]]:
    """By input the dim of its rows, where that is not dim 0."""
    for name, node in graph.inputs.items():
        layout = layout_of(plan.stored(name, plan.inputs))
        if layout.outer != 1:
            raise _refused(
                f"the rows of {name} are in {layout.outer} runs along dim {layout.dim}",
                "a microbatch is one run of rows", "Give it a dim of its own for the sequence.",
            )  # fmt: skip
        whole = layout == R and is_pinned(name, plan)
        if whole or not value(node).shape:
            yield name, WHOLE
        elif layout != R and layout.dim != 0:
            yield name, layout.dim


def _refused(what: str, why: str, do: str) -> PlanError:
    return PlanError(where=f"plan, {UNEVEN}", what=what, why=why, do=do)
