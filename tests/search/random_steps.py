"""Small random steps as graphs, and the best sharding of one by trying everything.

What costs what is written down here once more, from the formulas and without the search's tables.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from functools import cache

import torch
from torch import fx

from partc.cost.collective_cost import collective_seconds
from partc.cost.flops import node_flops
from partc.graph import Graph, fake_of, is_backward, tensor_args, value
from partc.graph.graph_parse import parse_graph
from partc.graph.input_only import input_only
from partc.passes.shard.propagate import whole_strategy
from partc.plan.mesh import Mesh
from partc.plan.sharding import DTYPE_NAMES, Layout, R, cut
from partc.rules import Strategy
from partc.rules.discover import strategies_for

OPS = (
    "matmul({a}, {b})",
    "mul.Tensor({a}, {b})",
    "add.Tensor({a}, {b})",
    "gelu({a})",
    "transpose.int({a}, 0, 1)",
    "_softmax({a}, -1, False)",
    "sum.dim_IntList({a}, [0], True)",
)


def random_step(seed: int, num_calls: int) -> Graph:
    """Calls on two square weights and an input, each on random values before it; the last ones of
    the weights' shape are their gradients.
    """
    source = random.Random(seed)
    size = source.choice((96, 1536, 6144))
    lines = ["graph Random", f"param w0 : f32[{size},{size}]", f"param w1 : f32[{size},{size}]"]
    lines += [f"input x : f32[{size},{size}]", "forward"]
    shapes = dict.fromkeys(("w0", "w1", "x"), (size, size))
    for i in range(num_calls):
        if i == num_calls // 2:
            lines.append("backward")
        known = list(shapes)[-4:] if i else ["w0", "x"]
        a, b = source.choice(known), source.choice(known)
        op = source.choice([op for op in OPS if _fits(op, shapes[a], shapes[b])])
        shape = max(shapes[a], shapes[b]) if "{b}" in op else shapes[a]
        shape = (1, size) if op.startswith("sum") else shape
        shapes[f"v{i}"] = shape
        lines.append(f"  v{i} = {op.format(a=a, b=b)} : f32[{shape[0]},{shape[1]}]")
    square = [name for name in shapes if name[0] == "v" and shapes[name] == (size, size)]
    lines += ["outputs"]
    lines += [f"  grad w{i} = {name}" for i, name in enumerate(square[-2:])]
    return parse_graph("\n".join([*lines, f"  result y = v{num_calls - 1}"]))


def _fits(op: str, a: tuple[int, int], b: tuple[int, int]) -> bool:
    if op.startswith("matmul"):
        return a[0] == a[1] == b[0] == b[1]
    if op.startswith("transpose"):
        return a[0] == a[1]
    return "{b}" not in op or a == b or 1 not in (*a, *b)


class BruteForce:
    """All ways to lay out a step on the one axis of a mesh."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.graph, self.mesh = graph, mesh
        ((self.axis, self.num),) = mesh.axes
        self.free = input_only(graph)
        self.calls = [node for node in graph.calls() if node not in self.free]
        self.options = [
            [whole_strategy(n), *strategies_for(n, self.num), *self.decomposed(n)]
            for n in self.calls
        ]
        self.stored = [[R, cut(0), cut(1)] for _ in graph.params]
        self.read = cache(self._read)

    def least(self) -> float:
        """The least time of all, whether gathered parameters live for a phase or for the step."""
        return min(
            self.seconds(dict(zip(self.calls, chosen, strict=True)), stored, again)
            for chosen in itertools.product(*self.options)
            for stored in itertools.product(*self.stored)
            for again in (True, False)
        )

    def seconds(
        self, chosen: Mapping[fx.Node, Strategy], stored: tuple[Layout, ...], again: bool
    ) -> float:
        """Calls, then for every value what it takes to bring it to its readers; parameters are
        gathered ``again`` for the backward.
        """
        total = sum(self.call_seconds(node, strategy) for node, strategy in chosen.items())
        made = {node: strategy.outs[0] for node, strategy in chosen.items()}
        made |= dict(zip(self.graph.params.values(), stored, strict=True))
        wants: dict[fx.Node, tuple[list[Layout], list[Layout]]] = {n: ([], []) for n in made}
        for node, strategy in chosen.items():
            for operand, want in zip(tensor_args(node), strategy.ins, strict=True):
                if operand in self.free:
                    total += math.inf if want.kind == "M" else 0.0
                else:
                    wants[operand][is_backward(node)].append(want)
        for name, node in self.graph.grads.items():
            if node in made:
                wants[node][1].append(made[self.graph.params[name]])
        for node in self.graph.outputs.results.values():
            if node in made:
                wants[node][1].append(R)
        for node, (forward, backward) in wants.items():
            num_bytes = fake_of(node).numel() * fake_of(node).element_size()
            first, last = (tuple(sorted(side)) for side in (forward, backward))
            parted = again and value(node).kind == "param"
            total += self.read(num_bytes, made[node], first, last, parted)
        return total

    def _read(
        self,
        num_bytes: int,
        have: Layout,
        first: tuple[Layout, ...],
        last: tuple[Layout, ...],
        parted: bool,
    ) -> float:
        """One more layout at most in each phase; the backward finds the forward's unless they are
        ``parted``.
        """
        layouts = [R, cut(0), cut(1)]
        best = math.inf
        for spare in [None, *layouts]:
            ways = [have, *([] if spare is None else [spare])]
            cost = 0.0 if spare is None else self.move(num_bytes, have, spare)
            cost += sum(min(self.move(num_bytes, w, want) for w in ways) for want in first)
            later = [have] if parted else ways
            behind = [sum(min(self.move(num_bytes, w, want) for w in later) for want in last)]
            for other in layouts:
                start = min(self.move(num_bytes, w, other) for w in later)
                ends = (min(self.move(num_bytes, w, want) for w in (have, other)) for want in last)
                behind.append(start + sum(ends))
            best = min(best, cost + min(behind))
        return best

    def move(self, num_bytes: int, have: Layout, want: Layout) -> float:
        """From one layout to another."""
        if have == want or (have == R and want.kind in ("cut", "U")):
            return 0.0
        if want.kind in "UM":
            return math.inf
        if have.kind == "cut":
            kind = "all_gather" if want == R else "all_to_all"
            return collective_seconds(kind, num_bytes / self.num, self.mesh, self.axis)
        scatters = have.kind == "U" and want.kind == "cut"
        kind = "reduce_scatter" if scatters else "all_reduce"
        return collective_seconds(kind, num_bytes, self.mesh, self.axis)

    def decomposed(self, node: fx.Node) -> list[Strategy]:
        """A softmax along a dim that is cut is several calls with two reductions between them."""
        if node.target is not torch.ops.aten._softmax.default:
            return []
        return [Strategy((cut(1),), (cut(1),), "decomposed")]

    def _softmax_seconds(self, node: fx.Node) -> float:
        """Maximum, difference, exponential, sum and quotient of a piece."""
        rows, columns = fake_of(node).shape
        piece, column = 4 * rows * columns // self.num, 4 * rows
        reduced = collective_seconds("all_reduce", column, self.mesh, self.axis)
        moved = [piece + column, 2 * piece + column, 2 * piece, piece + column, 2 * piece + column]
        device = self.mesh.hardware.device
        return 2 * reduced + sum(device.seconds(0, "f32", num_bytes) for num_bytes in moved)

    def call_seconds(self, node: fx.Node, strategy: Strategy) -> float:
        """The roofline of a rank's share."""
        if strategy.variant == "decomposed":
            return self._softmax_seconds(node)
        if node.target.is_view:  # type: ignore[union-attr]
            return 0.0
        operands = dict(zip(tensor_args(node), strategy.ins, strict=True))
        if node.all_input_nodes != tensor_args(node):  # x * x reads x once, as its first operand
            operands = {o: strategy.ins[tensor_args(node).index(o)] for o in node.all_input_nodes}
        tensors = [*operands.items(), (node, strategy.outs[0])]
        num_bytes = sum(
            fake_of(n).numel() * 4 / (self.num if layout.kind == "cut" else 1)
            for n, layout in tensors
        )
        shares = any(layout.kind == "cut" for layout in (*strategy.ins, *strategy.outs))
        flops = node_flops(node) / (self.num if shares else 1)
        device = self.mesh.hardware.device
        return device.seconds(flops, DTYPE_NAMES[value(node).dtype], num_bytes)
