"""Runs a local graph for all ranks of a mesh in one process, call by call.

This is the meaning of partc's collectives: ``all_reduce`` of the pieces of all ranks is their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from partc.graph import Graph, collectives, value
from partc.graph.moves import moves
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, cut, join_pieces, take_piece

Pieces = list[Any]  # what each rank holds of one value, in the order of ranks


def simulate(graph: Graph, whole: Mapping[str, Tensor]) -> dict[str, Any]:
    """Execute a local graph for every rank; its loss, grads, buffers and results, as whole tensors.

    ``whole`` has whole parameters, buffers and inputs by name, of which each rank gets its shard.
    The ranks' pieces of each output are joined to the whole tensor by its sharding.
    """
    return simulate_stages([graph], whole)


def simulate_stages(graphs: Sequence[Graph], whole: Mapping[str, Tensor]) -> dict[str, Any]:
    """Execute the graphs of all pipeline stages, forward and then backward, for every rank.

    A tied parameter's gradient is the sum of the gradients from all stages that hold it.
    """
    env: dict[fx.Node, Pieces] = {}
    sent: dict[str, Pieces] = {}
    waiting = [_placeholders_first(graph) for graph in graphs]
    while any(waiting):
        ran = False
        for graph, nodes in zip(graphs, waiting, strict=True):
            while nodes and _ready(nodes[0], sent):
                _run(nodes.pop(0), graph, whole, env, sent)
                ran = True
        assert ran, "a stage waits for what no other sends"
    return _joined(graphs, env)


def _placeholders_first(graph: Graph) -> list[fx.Node]:
    """A graph's nodes in order, each received value right before its first reader."""
    nodes: list[fx.Node] = []
    seen: set[fx.Node] = set()
    for node in graph.fx.nodes:
        if node.op != "placeholder" or value(node).kind != "received":
            nodes += [n for n in node.all_input_nodes if n.op == "placeholder" and n not in seen]
            nodes += [node] if node not in seen else []
            seen |= {node, *node.all_input_nodes}
    return nodes


def _ready(node: fx.Node, sent: Mapping[str, Pieces]) -> bool:
    """Whether a node can run: what another stage sends it has been sent."""
    return node.op != "placeholder" or value(node).kind != "received" or value(node).name in sent


def _run(
    node: fx.Node, graph: Graph, whole: Mapping[str, Tensor],
    env: dict[fx.Node, Pieces], sent: dict[str, Pieces],
) -> None:  # fmt: skip
    known = value(node) if node.op != "output" else None
    if known is not None and known.kind == "received":
        env[node] = sent[known.name]
    elif known is not None and node.op == "placeholder":
        coords = graph.mesh.all_coords()
        env[node] = [known.sharding.local(whole[known.name], at, graph.mesh) for at in coords]
    elif node.op == "call_function":
        env[node] = _call(node, env, graph.mesh)
    sent |= {name: env[n] for name, n in graph.outputs.sent.items() if n is node}


def _joined(graphs: Sequence[Graph], env: Mapping[fx.Node, Pieces]) -> dict[str, Any]:
    """The outputs of all graphs, every tensor joined to the whole."""
    found: dict[str, Any] = {"loss": None, "grads": {}, "buffers": {}, "results": {}}
    for graph in graphs:
        mesh = graph.mesh
        outputs = fx.map_arg(
            replace(graph.outputs, sent={}).as_dict(),
            lambda n: value(n).sharding.whole(env[n], mesh),  # noqa: B023  (called at once)
        )
        found["loss"] = outputs["loss"] if outputs["loss"] is not None else found["loss"]
        for kind in ("grads", "buffers", "results"):
            for name, tensor in outputs[kind].items():
                tied = kind == "grads" and name in found[kind]
                found[kind][name] = found[kind][name] + tensor if tied else tensor
    return found


def _call(node: fx.Node, env: Mapping[fx.Node, Pieces], mesh: Mesh) -> Pieces:
    if node.target in (*collectives.COLLECTIVES, *collectives.LOCAL, collectives.axis_index):
        results = [_MEANING[m.target](env[m.operand], mesh, **m.kwargs) for m in moves(node)]
        joined = node.target in collectives.JOINED
        return list(zip(*results, strict=True)) if joined else results[0]
    call: Any = node.target

    def run(rank: int) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n][rank])
        return call(*args, **kwargs)

    return [run(rank) for rank in range(mesh.num_ranks)]


def _groups(
    x: Pieces, mesh: Mesh, axis: str, make: Callable[[list[Tensor]], list[Tensor]]
) -> Pieces:
    """Apply ``make`` to the pieces of every group of ranks along an axis.

    ``make`` maps the pieces of a group's ranks to their results.
    """
    results: Pieces = [None] * mesh.num_ranks
    for rank in range(mesh.num_ranks):
        if mesh.coords(rank)[axis] == 0:
            peers = mesh.peers(rank, axis)
            for peer, result in zip(peers, make([x[p] for p in peers]), strict=True):
                results[peer] = result
    return results


def _all_reduce(x: Pieces, mesh: Mesh, axis: str, num: int, op: str = "sum") -> Pieces:
    kind = Layout("U" if op == "sum" else "M")
    return _groups(x, mesh, axis, lambda p: [join_pieces(p, kind, 1)] * num)


def _all_gather(
    x: Pieces, mesh: Mesh, axis: str, num: int, dim: int, outer: int = 1,
    dtype: torch.dtype | None = None,
) -> Pieces:  # fmt: skip
    def make(pieces: list[Tensor]) -> list[Tensor]:
        sent = [piece.to(dtype or piece.dtype) for piece in pieces]
        return [join_pieces(sent, cut(dim), outer)] * num

    return _groups(x, mesh, axis, make)


def _reduce_scatter(x: Pieces, mesh: Mesh, axis: str, num: int, dim: int, outer: int = 1) -> Pieces:
    def make(pieces: list[Tensor]) -> list[Tensor]:
        total = join_pieces(pieces, Layout("U"), 1)
        return [take_piece(total, dim, outer, num, i) for i in range(num)]

    return _groups(x, mesh, axis, make)


def _all_to_all(
    x: Pieces,
    mesh: Mesh,
    axis: str,
    num: int,
    dim: int,
    to_dim: int,
    outer: int = 1,
    to_outer: int = 1,
) -> Pieces:
    def make(pieces: list[Tensor]) -> list[Tensor]:
        total = join_pieces(pieces, cut(dim), outer)
        return [take_piece(total, to_dim, to_outer, num, i) for i in range(num)]

    return _groups(x, mesh, axis, make)


def _keep_piece(x: Pieces, mesh: Mesh, axis: str, num: int, dim: int, outer: int = 1) -> Pieces:
    return _groups(
        x, mesh, axis, lambda p: [take_piece(t, dim, outer, num, i) for i, t in enumerate(p)]
    )


def _keep_first(x: Pieces, mesh: Mesh, axis: str, num: int) -> Pieces:
    return _groups(x, mesh, axis, lambda p: [p[0], *(torch.zeros_like(t) for t in p[1:])])


def _axis_index(x: Pieces, mesh: Mesh, axis: str, num: int) -> Pieces:
    return [at[axis] for at in mesh.all_coords()]


_MEANING: dict[Any, Callable[..., Pieces]] = {
    collectives.all_reduce: _all_reduce,
    collectives.accumulate: _all_reduce,
    collectives.collect: _all_gather,
    collectives.all_gather: _all_gather,
    collectives.reduce_scatter: _reduce_scatter,
    collectives.all_to_all: _all_to_all,
    collectives.keep_piece: _keep_piece,
    collectives.keep_first: _keep_first,
    collectives.axis_index: _axis_index,
}
