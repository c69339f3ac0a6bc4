"""What an op costs that is decomposed where it arrives cut (``passes/shard/decompose_ops.py``).

In the search it is one call with one more strategy: that of propagation through what it becomes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from partc.graph import (
    Graph,
    Outputs,
    Value,
    fake_of,
    results_of,
    set_fake,
    set_value,
    tensor_args,
    value,
)
from partc.machines.topology import Device
from partc.passes.search.shardings.call_costs import CallCost
from partc.passes.search.shardings.transfers import Transfers
from partc.passes.shard.decompose_ops import decomposes
from partc.passes.shard.propagate import propagate
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, R, Sharding, cut
from partc.rules import Strategy

OPENED = "opened"
Work = tuple[CallCost, tuple[int, ...], tuple[int, ...]]  # a call, and how its values lie
Move = tuple[int, int, int]  # bytes, from one sharding to another


@dataclass(frozen=True)
class Decomposition:
    """The strategy that an opened call follows on one axis, and what it is made of."""

    strategy: Strategy
    calls: tuple[Work, ...]
    moves: tuple[Move, ...]

    def seconds(self, share: float, lies: Transfers, device: Device) -> float:
        """All calls and transfers inside it, where other axes leave this share of every value."""
        total = 0.0
        for cost, ins, outs in self.calls:
            total += cost.shrunk(share).seconds(ins, outs, lies, device)
        return total + sum(lies.seconds(n * share, have, want) for n, have, want in self.moves)


def openings(
    node: fx.Node, axis: str, known: Sequence[Strategy], lies: Transfers
) -> list[Decomposition]:
    """The cuts of its first operand that a call takes only when it is opened."""
    if not decomposes(node):
        return []
    first, num = tensor_args(node)[0], lies.mesh.size(axis)
    taken = {strategy.ins[0] for strategy in known}
    cuts = [cut(dim) for dim, size in enumerate(value(first).shape) if size % num == 0]
    found = (_opening(node, axis, each, lies) for each in cuts if each not in taken)
    return [opening for opening in found if opening is not None]


def _opening(node: fx.Node, axis: str, layout: Layout, lies: Transfers) -> Decomposition | None:
    """The call alone in a graph, its operands given as cut, propagated."""
    operands = tensor_args(node)
    alike = value(operands[0]).shape
    ins = tuple(layout if value(o).shape == alike else R for o in operands)
    graph, inputs = _alone(node, Mesh(((axis, lies.mesh.size(axis)),)))
    cuts = {value(inputs[o]).name: {axis: lay} for o, lay in zip(operands, ins, strict=True)}
    given = {name: each for name, each in cuts.items() if each[axis] != R}
    choices = propagate(graph, Plan(mesh=graph.mesh, inputs=given))
    if len(list(graph.calls())) == 1:
        return None  # it was not opened: this cut leads nowhere
    outs = [R] * len(results_of(node))
    for name, result in graph.outputs.sent.items():
        outs[int(name)] = value(result).sharding.on(axis)
    calls = tuple(_works(graph, choices, lies))
    moves = tuple(_moves(graph, choices, lies))
    return Decomposition(Strategy(ins, tuple(outs), OPENED), calls, moves)


def _alone(node: fx.Node, mesh: Mesh) -> tuple[Graph, dict[fx.Node, fx.Node]]:
    """A graph of one call; its results are those of the graph, by number."""
    out = fx.Graph()
    inputs: dict[fx.Node, fx.Node] = {}
    for operand in dict.fromkeys(tensor_args(node)):
        name, known = f"x{len(inputs)}", value(operand)
        inputs[operand] = out.placeholder(name)
        set_value(inputs[operand], Value("input", known.shape, known.dtype, name=name))
        set_fake(inputs[operand], fake_of(operand))
    call = out.node_copy(node, inputs.__getitem__)
    results = {}
    if isinstance(fake_of(node), tuple | list):
        for user in node.users:
            results[str(user.args[1])] = out.node_copy(user, lambda _: call)
    else:
        results["0"] = call
    out.output(Outputs(sent=results).as_dict())
    return Graph(out, mesh), inputs


def _works(
    graph: Graph, choices: dict[fx.Node, dict[str, Strategy]], lies: Transfers
) -> Iterator[Work]:
    for node in graph.calls():
        chosen = choices.get(node, {})
        ins = range(len(tensor_args(node)))
        outs = range(len(results_of(node)))
        yield (
            CallCost.of(node),
            tuple(lies.number({a: s.ins[i] for a, s in chosen.items()}) for i in ins),
            tuple(lies.number({a: s.outs[i] for a, s in chosen.items()}) for i in outs),
        )


def _moves(
    graph: Graph, choices: dict[fx.Node, dict[str, Strategy]], lies: Transfers
) -> Iterator[Move]:
    """Every layout that some reader wants, once, from the one it was made in."""
    done: set[tuple[fx.Node, Sharding]] = set()
    for node in graph.calls():
        chosen = choices.get(node, {})
        for i, operand in enumerate(tensor_args(node)):
            want = Sharding.of({a: s.ins[i] for a, s in chosen.items()}, graph.mesh)
            have = value(operand).sharding
            if want != have and (operand, want) not in done:
                done.add((operand, want))
                num_bytes = fake_of(operand).numel() * fake_of(operand).element_size()
                have_number, want_number = (lies.number(dict(s.layouts)) for s in (have, want))
                yield num_bytes, have_number, want_number
