"""Writes local graphs (of one rank) by hand, one line for each call.

``b = Build("tp=2"); w = b.tensor("param", "w", [8, 4], tp=cut(0))`` is ``param w : f32[8@tp,4]``.
``mlp()`` below is a whole step as an example.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from partc.graph import Graph, Outputs, Value, collectives, ops, set_fake, set_value, value
from partc.graph.graph_edits import run_fake
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, R, Sharding, U, cut

aten = torch.ops.aten


class Build:
    """A local graph to which calls are added in order, ended by ``done``.

    Each call states how its result is laid out along mesh axes, by keywords such as ``tp=cut(0)``,
    ``dp=U`` (an unfinished sum); an axis that is not named is replicated. Shapes of ranks are
    computed on fake tensors.
    """

    def __init__(self, mesh: str) -> None:
        self.mesh = Mesh.parse(mesh)
        self.fx = fx.Graph()
        self.fake = FakeTensorMode()
        self.phase = "F"

    def tensor(self, kind: Any, name: str, shape: list[int], **layouts: Layout) -> fx.Node:
        """Add a parameter, buffer or input; ``shape`` is that of the whole tensor."""
        node = self.fx.placeholder(name.replace(".", "_"))
        sharding = Sharding.of(layouts, self.mesh)
        known = Value(kind=kind, shape=tuple(shape), name=name, sharding=sharding)
        local = sharding.local_shape(shape, self.mesh)
        assert local is not None
        with self.fake:
            self._note(node, known, torch.empty(local))
        return node

    def __call__(self, target: Callable[..., Any], *args: Any, **named: Any) -> fx.Node:
        """Add a call; keywords that are Layouts are the result's layouts, others are arguments."""
        layouts = {k: v for k, v in named.items() if isinstance(v, Layout)}
        kwargs = {k: v for k, v in named.items() if not isinstance(v, Layout)}
        node = self.fx.call_function(target, args, kwargs)
        with self.fake:
            result = run_fake(target, args, kwargs)
        self._note(node, self._known(node, result, Sharding.of(layouts, self.mesh)), result)
        return node

    def collective(
        self, target: Callable[..., Any], x: fx.Node, axis: str, **named: Any
    ) -> fx.Node:
        """Add a collective over an axis, without its wait.

        ``after`` is the result's layout along this axis, replicated if not given; along the other
        axes the result is laid out as the operand.
        """
        before = {a: value(x).sharding.on(a) for a in self.mesh.names if a != axis}
        after = named.pop("after", R)
        return self(
            target, x, axis=axis, num=self.mesh.size(axis), **named, **{**before, axis: after}
        )

    def joined(
        self, target: Callable[..., Any], xs: list[fx.Node], axis: str, after: Layout, **named: Any
    ) -> list[fx.Node]:
        """Add a collective of several tensors, its wait, and the getitem of each result."""
        num = self.mesh.size(axis)
        start = self(target, xs, axis=axis, num=num, **named)
        waited = self(collectives.wait, start)
        before = ({a: value(x).sharding.on(a) for a in self.mesh.names} for x in xs)
        return [
            self(operator.getitem, waited, i, **{**layouts, axis: after})
            for i, layouts in enumerate(before)
        ]

    def reduced(self, x: fx.Node, axis: str) -> fx.Node:
        """Add an all_reduce over an axis and its wait: ``f32[8]{U:tp} -> f32[8]``."""
        started = self.collective(collectives.all_reduce, x, axis)
        return self(collectives.wait, started, **dict(value(started).sharding.layouts))

    def done(self, **outputs: Any) -> Graph:
        """End the graph with outputs (``loss=...``, ``grads={name: node}``) and return it."""
        self.fx.output(Outputs(**outputs).as_dict())
        return Graph(self.fx, self.mesh, "Hand")

    def _note(self, node: fx.Node, known: Value, result: Any) -> None:
        set_value(node, known)
        set_fake(node, result)

    def _known(self, node: fx.Node, result: Any, sharding: Sharding) -> Value:
        """What the graph knows of a call; each sharded dim is larger in the whole shape."""
        if not isinstance(result, Tensor):
            return Value(module="mlp", phase=cast(Any, self.phase))
        shape = list(result.shape)
        for axis, layout in sharding.cuts():
            shape[layout.dim] *= self.mesh.size(axis)
        phase: Any = self.phase
        return Value(
            shape=tuple(shape), dtype=result.dtype, sharding=sharding, module="mlp", phase=phase
        )


def mlp(mesh: str = "dp=2,tp=2") -> Graph:
    """A step of ``loss = sum((w2 relu(w1 x))^2) / 80``, sharded over tp as Megatron does.

    ``w1`` is sharded by column, ``w2`` by row, the batch over dp. Every collective has its wait.
    """
    b = Build(mesh)
    dp, tp = {"dp": cut(0)}, {"tp": cut(0)}
    w1 = b.tensor("param", "w1.weight", [16, 12], **tp)
    w2 = b.tensor("param", "w2.weight", [10, 16], tp=cut(1))
    x = b.tensor("input", "x", [8, 12])
    mine = b.collective(collectives.keep_piece, x, "dp", dim=0, after=cut(0))
    h = b(aten.linear.default, mine, w1, **dp, tp=cut(1))
    a = b(aten.relu.default, h, **dp, tp=cut(1))
    y = b.reduced(b(aten.linear.default, a, w2, **dp, tp=U), "tp")
    total = b(aten.sum.dim_IntList, b(aten.mul.Tensor, y, y, **dp), [0, 1], dp=U)
    loss = b.reduced(b(aten.div.Tensor, total, 80, dp=U), "dp")
    b.phase = "B"
    d_y = b(aten.mul.Tensor, y, 2 / 80, **dp)
    d_a = b(aten.matmul.default, d_y, w2, **dp, tp=cut(1))
    d_w2 = b.reduced(b(ops.weight_grad, d_y, a, dp=U, tp=cut(1)), "dp")
    d_h = b(aten.threshold_backward.default, d_a, h, 0, **dp, tp=cut(1))
    d_w1 = b.reduced(b(ops.weight_grad, d_h, mine, dp=U, tp=cut(0)), "dp")
    return b.done(loss=loss, grads={"w1.weight": d_w1, "w2.weight": d_w2})
