"""Replace custom ops by the torch ops that implement them, as programs import only torch."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._library.custom_ops import OPDEFS
from torch.fx.experimental.proxy_tensor import make_fx

from partc.errors import TraceError
from partc.graph import Graph, fake_of, set_fake, set_value, value
from partc.graph.draws import draws_numbers
from partc.graph.graph_edits import replace_by
from partc.rules.table import own_name
from partc.users_line import warn

OWN = ("aten", "prims", "prim", "partc")


def decompose_custom_ops(graph: Graph) -> None:
    """``mylib.scale(x, 2)`` becomes the torch ops that tracing its Python implementation shows.

    TraceError for an op without a Python implementation, or with one that cannot be traced.
    """
    for node in list(graph.calls()):
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace not in OWN:
            _warn_of_rule(target)
            _splice(node, _traced(node, target))


def _warn_of_rule(target: torch._ops.OpOverload) -> None:
    """Warn where the op has a rule, which nobody will ask for."""
    if name := own_name(target):
        warn(
            f"partc: rule({name!r}, ...) is not read: programs import only torch, so that the op "
            "becomes the torch ops of its Python body, each with a rule of its own. Leave this "
            "rule out, and write those of ops in the body that have none."
        )


def _traced(node: fx.Node, target: torch._ops.OpOverload) -> fx.Graph:
    """Trace the op's implementation; the placeholders stand for the node's tensor arguments."""
    definition = OPDEFS.get(target._schema.name)
    if definition is None:
        raise _refusal(node, "its implementation is not Python code that torch.library knows")
    implementation = definition._init_fn

    def call(*tensors: Tensor) -> Any:
        given = dict(zip(node.all_input_nodes, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return implementation(*args, **kwargs)

    try:
        body = make_fx(call, tracing_mode="fake")(*(fake_of(n) for n in node.all_input_nodes)).graph
    except Exception as error:
        raise _refusal(node, f"its implementation cannot be traced: {error}") from error
    if any(map(draws_numbers, body.nodes)):
        raise _refusal(node, "its implementation draws random numbers, which nothing seeds")
    return body


def _splice(node: fx.Node, body: fx.Graph) -> None:
    """Replace the call ``node`` by the nodes of ``body``."""
    inputs = dict(
        zip([n for n in body.nodes if n.op == "placeholder"], node.all_input_nodes, strict=True)
    )
    with node.graph.inserting_before(node):
        results: Any = node.graph.graph_copy(body, inputs)
    for inner, copy in inputs.items():
        if inner.op == "call_function":
            set_value(copy, value(node))
            set_fake(copy, fake_of(inner))
    if isinstance(results, fx.Node):
        replace_by(node, results)
        return
    for user in list(node.users):
        assert user.target is operator.getitem
        replace_by(user, results[user.args[1]])
    node.graph.erase_node(node)


def _refusal(node: fx.Node, why: str) -> TraceError:
    return TraceError(
        where=value(node).source or value(node).module,
        what=f"{node.target} is no op of torch",
        why=why.splitlines()[0],
        do="Write it with torch ops, or by torch.library.custom_op with a body that traces.",
    )
