"""Local graphs written by hand, one line per call, for tests of what reads them."""

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
    """Writes a local graph: each call is given the layouts of its result, ``tp=cut(0)``."""

    def __init__(self, mesh: str) -> None:
        self.mesh = Mesh.parse(mesh)
        self.fx = fx.Graph()
        self.fake = FakeTensorMode()
        self.phase = "F"

    def tensor(self, kind: Any, name: str, shape: list[int], **layouts: Layout) -> fx.Node:
        """A parameter, buffer or input; ``shape`` is the whole's."""
        node = self.fx.placeholder(name.replace(".", "_"))
        sharding = Sharding.of(layouts, self.mesh)
        known = Value(kind=kind, shape=tuple(shape), name=name, sharding=sharding)
        local = sharding.local_shape(shape, self.mesh)
        assert local is not None
        with self.fake:
            self._note(node, known, torch.empty(local))
        return node

    def __call__(self, target: Callable[..., Any], *args: Any, **named: Any) -> fx.Node:
        """A call; keywords that are Layouts say how the result lies, the others are arguments."""
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
        """A collective over an axis; its other axes lie as the operand's."""
        before = {a: value(x).sharding.on(a) for a in self.mesh.names if a != axis}
        after = named.pop("after", R)
        return self(
            target, x, axis=axis, num=self.mesh.size(axis), **named, **{**before, axis: after}
        )

    def joined(
        self, target: Callable[..., Any], xs: list[fx.Node], axis: str, after: Layout, **named: Any
    ) -> list[fx.Node]:
        """Several tensors in one transfer, waited for and picked."""
        num = self.mesh.size(axis)
        start = self(target, xs, axis=axis, num=num, **named)
        waited = self(collectives.wait, start)
        before = ({a: value(x).sharding.on(a) for a in self.mesh.names} for x in xs)
        return [
            self(operator.getitem, waited, i, **{**layouts, axis: after})
            for i, layouts in enumerate(before)
        ]

    def reduced(self, x: fx.Node, axis: str) -> fx.Node:
        """An all_reduce and its wait."""
        started = self.collective(collectives.all_reduce, x, axis)
        return self(collectives.wait, started, **dict(value(started).sharding.layouts))

    def done(self, **outputs: Any) -> Graph:
        """The graph with these outputs."""
        self.fx.output(Outputs(**outputs).as_dict())
        return Graph(self.fx, self.mesh, "Hand")

    def _note(self, node: fx.Node, known: Value, result: Any) -> None:
        set_value(node, known)
        set_fake(node, result)

    def _known(self, node: fx.Node, result: Any, sharding: Sharding) -> Value:
        """The whole's shape is the local one with every cut dim that many times as large."""
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
    """Forward and backward of ``sum((w2 relu(w1 x))^2) / 80``, cut as Megatron does, scheduled."""
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
