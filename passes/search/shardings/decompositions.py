"""The cost of an op that is decomposed because its operand arrives sharded.

``passes/shard/decompose_ops.py`` decomposes it. In the search the op stays one call, with one more
strategy: the layouts and the transfers that propagation chooses inside of the decomposition.
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
from partc.machines.devices import Device
from partc.passes.search.shardings.call_costs import CallCost
from partc.passes.search.shardings.transfers import Transfers
from partc.passes.shard.decompose_ops import decomposes
from partc.passes.shard.propagate import propagate
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, R, Sharding, cut
from partc.rules import Strategy

DECOMPOSED = "decomposed"
Work = tuple[CallCost, tuple[int, ...], tuple[int, ...]]  # a call; operands', results' shardings
Move = tuple[int, int, int]  # bytes, from one sharding to another


@dataclass(frozen=True)
class Decomposition:
    """The strategy of a decomposed call on one axis, with the calls and transfers inside of it."""

    strategy: Strategy
    calls: tuple[Work, ...]
    moves: tuple[Move, ...]

    def seconds(self, share: float, transfers: Transfers, device: Device) -> float:
        """Seconds of all calls and transfers inside; other axes leave ``share`` of each value."""
        total = 0.0
        for cost, ins, outs in self.calls:
            total += cost.shrunk(share).seconds(ins, outs, transfers, device)
        return total + sum(transfers.seconds(n * share, have, want) for n, have, want in self.moves)


def decompositions(
    node: fx.Node, axis: str, known: Sequence[Strategy], transfers: Transfers
) -> list[Decomposition]:
    """The decompositions of a call: one for each shardable dim of its first operand that no
    strategy in ``known`` allows.
    """
    if not decomposes(node):
        return []
    first, num = tensor_args(node)[0], transfers.mesh.size(axis)
    taken = {strategy.ins[0] for strategy in known}
    cuts = [cut(dim) for dim, size in enumerate(value(first).shape) if size % num == 0]
    found = (_decomposition(node, axis, each, transfers) for each in cuts if each not in taken)
    return [each for each in found if each is not None]


def _decomposition(
    node: fx.Node, axis: str, layout: Layout, transfers: Transfers
) -> Decomposition | None:
    """The decomposition for a first operand with this layout, by propagating the call alone.

    Operands of the first one's shape have its layout. None if the call is not decomposed then.
    """
    operands = tensor_args(node)
    alike = value(operands[0]).shape
    ins = tuple(layout if value(o).shape == alike else R for o in operands)
    graph, inputs = _alone(node, Mesh(((axis, transfers.mesh.size(axis)),)))
    cuts = {value(inputs[o]).name: {axis: lay} for o, lay in zip(operands, ins, strict=True)}
    given = {name: each for name, each in cuts.items() if each[axis] != R}
    choices = propagate(graph, Plan(mesh=graph.mesh, inputs=given))
    if len(list(graph.calls())) == 1:
        return None  # not decomposed: the call gathers the operand instead
    outs = [R] * len(results_of(node))
    for name, result in graph.outputs.sent.items():
        outs[int(name)] = value(result).sharding.on(axis)
    calls = tuple(_works(graph, choices, transfers))
    moves = tuple(_moves(graph, choices, transfers))
    return Decomposition(Strategy(ins, tuple(outs), DECOMPOSED), calls, moves)


def _alone(node: fx.Node, mesh: Mesh) -> tuple[Graph, dict[fx.Node, fx.Node]]:
    """A graph with a copy of one call alone, and its placeholder of each operand.

    The graph's results are the call's, named by their number.
    """
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
    graph: Graph, choices: dict[fx.Node, dict[str, Strategy]], transfers: Transfers
) -> Iterator[Work]:
    for node in graph.calls():
        chosen = choices.get(node, {})
        ins = range(len(tensor_args(node)))
        outs = range(len(results_of(node)))
        yield (
            CallCost.of(node),
            tuple(transfers.number({a: s.ins[i] for a, s in chosen.items()}) for i in ins),
            tuple(transfers.number({a: s.outs[i] for a, s in chosen.items()}) for i in outs),
        )


def _moves(
    graph: Graph, choices: dict[fx.Node, dict[str, Strategy]], transfers: Transfers
) -> Iterator[Move]:
    """The transfers inside of a decomposition: each wanted sharding of a value once."""
    done: set[tuple[fx.Node, Sharding]] = set()
    for node in graph.calls():
        chosen = choices.get(node, {})
        for i, operand in enumerate(tensor_args(node)):
            want = Sharding.of({a: s.ins[i] for a, s in chosen.items()}, graph.mesh)
            have = value(operand).sharding
            if want != have and (operand, want) not in done:
                done.add((operand, want))
                num_bytes = fake_of(operand).numel() * fake_of(operand).element_size()
                have_number, want_number = (transfers.number(dict(s.layouts)) for s in (have, want))
                yield num_bytes, have_number, want_number
