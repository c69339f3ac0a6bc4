"""What a pass may not leave behind: calls out of order or not described, and calls that read other
shapes than before, which would compute something else, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from partc.errors import UsageError
from partc.graph import Graph, fake_of, has_value, typed, value
from partc.graph.fake_calls import quiet_log
from partc.graph.graph_edits import run_on_fakes
from partc.graph.targets import check_target
from partc.plan.sharding import DTYPE_NAMES

_CAST = torch.ops.aten._to_copy.default
_SET = (
    "call set_like(new, old) of partc.graph where its result is as that of the call which it "
    "replaces, or set_value and set_fake; partc.graph.graph_edits.call_before makes a call that "
    "has them"
)
Read = tuple[str, str]  # the name of an operand's node, and the form that it has: ``f32[8,16]``
Reads = Mapping[fx.Node, tuple[Read, ...]]  # by the node that reads


def unsound(graph: Graph) -> str:
    """Why later passes cannot read a graph: a call before what it reads, or one without Value or
    fake; "" if they can.
    """
    seen = set()
    for node in graph.fx.nodes:
        for read in node.all_input_nodes:
            if read not in seen:
                return f"{node.name} stands before {read.name}, which it reads"
        if node.op != "output" and not has_value(node):
            return f"{_call(node)} says nothing of its result, as it has no Value: {_SET}"
        if node.op != "output" and "val" not in node.meta:
            return f"{_call(node)} says nothing of its shape, as it holds no fake: {_SET}"
        seen.add(node)
    return ""


def _call(node: fx.Node) -> str:
    """``mul = mul.Tensor(x, 2)``, as a dump shows a call."""
    given = ", ".join(map(str, node.args))
    return f"{node.name} = {getattr(node.target, '__name__', node.target)}({given})"


def reads(graph: Graph) -> Reads:
    """What each node reads; to be compared behind a pass."""
    return {
        node: tuple((read.name, form(read)) for read in node.all_input_nodes)
        for node in graph.fx.nodes
    }


def other_form(graph: Graph, before: Reads) -> str:
    """Why the calls of a graph do not fit together: a new one does not give the shape and dtype
    that are noted for it, or one reads others than before and then gives others; "" if they fit.
    """
    for node in graph.fx.nodes:
        if node in before:
            change = _change(node, before[node])
            if change and (_is_fixed(node, change) or _given(node) != form(node)):
                (old, had), (new, has) = change
                return f"{node.name} reads {new}: {has} where {old}: {had} stood"
        elif isinstance(node.target, OpOverload) and form(node) and _given(node) != form(node):
            return f"{node.name} gives {_given(node)}, and {form(node)} is noted for it"
    return ""


def no_step(graph: Graph, before: Reads) -> str:
    """Why a graph is none of a step: it has no results, or a new call calls what is no op."""
    if next(iter(reversed(graph.fx.nodes)), graph.fx._root).op != "output":
        return "the graph has no results: its last node is that of the step's loss and gradients"
    assert graph.outputs is not None  # or what it raises
    for node in graph.fx.nodes:
        if node.op == "call_function" and node not in before:
            try:
                check_target(node.target, "")
            except UsageError as error:
                return f"{error.what}: {error.why}. {error.do}".removesuffix(".")
    return ""


def unfit_note(graph: Graph, before: Reads) -> str:
    """Why the note of a new call does not fit what a rank gets from it; "" if each fits.

    The proof would find it, and not know that the call is new: in a graph of one rank,
    ``call_before`` takes over the sharding of a call, and the rank's shape as that of the whole.
    """
    news = (node for node in graph.fx.nodes if node not in before and node.op == "call_function")
    new = next((node for node in news if not _is_noted(graph, node)), None)
    if new is None or not all(_is_noted(graph, node) for node in graph.fx.nodes if node in before):
        return ""  # a graph that nobody has cut yet may have shardings of what will be cut
    return (
        f"{_call(new)} is new: a rank gets {form(new)} from it, and {typed(new)} is noted for the "
        "whole. Call set_like(new, old) of partc.graph where its result is as that of the call "
        "which it replaces, or set_value with the whole's shape and its sharding"
    )


def _is_noted(graph: Graph, node: fx.Node) -> bool:
    """Whether a node's shape here is what its Value makes of the whole's."""
    held = fake_of(node) if "val" in node.meta else None
    if not isinstance(held, Tensor):
        return True
    known = value(node)
    return known.sharding.local_shape(known.shape, graph.mesh) == tuple(held.shape)


def _change(node: fx.Node, was: Sequence[Read]) -> tuple[Read, Read] | None:
    """The first operand that has another form than before: what it was, and what it is."""
    now = [(read.name, form(read)) for read in node.all_input_nodes]
    pairs = zip(was, now, strict=False) if len(was) == len(now) else ()
    return next(((old, new) for old, new in pairs if old[1] != new[1]), None)


def form(node: fx.Node) -> str:
    """Shape and dtype of a node's tensor as texts show them: ``f32[8,16]``; "" of other values."""
    return _text(fake_of(node)) if "val" in node.meta else ""


def _text(held: object) -> str:
    if not isinstance(held, Tensor):
        return ""
    return f"{DTYPE_NAMES.get(held.dtype, str(held.dtype))}[{','.join(map(str, held.shape))}]"


def _is_fixed(reader: fx.Node, change: tuple[Read, Read]) -> bool:
    """Whether a reader takes no such change: a result of the step, or a call that is given another
    dtype, as fakes compute with two that no kernel takes.
    """
    (_, had), (_, has) = change
    other_dtype = had.partition("[")[0] != has.partition("[")[0]
    return reader.op != "call_function" or (other_dtype and reader.target != _CAST)


def _given(node: fx.Node) -> str:
    """What a call gives, or why it gives nothing."""
    try:
        with quiet_log():
            return _text(run_on_fakes(node))
    except Exception as error:  # whatever torch says of operands that do not fit
        return f"nothing ({error})"
