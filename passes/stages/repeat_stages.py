"""Make the graphs of all stages from those of the distinct stages, which alone were compiled.

A stage that is like another one has a copy of its graph, with the parameters of its own layers. The
activations that it receives and sends are named after the stages around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from partc.graph import Graph, Outputs, Phase, set_like, update, value
from partc.graph.folds import RepeatedBlocks, StageLike
from partc.passes.canonical.dedupe_layers import Unfolded


def repeat_stages(compiled: Sequence[Graph], whole: Graph) -> list[Graph]:
    """One graph per stage; ``whole`` is the local graph that the compiled ones were cut from.

    Unfolded if several stages would give the same result of the step, as only one of them does.
    """
    if whole.kept is None:
        return list(compiled)
    given = [n for like in whole.kept.stages for n in compiled[like.number].outputs.results]
    if len(given) > len({*given}):
        raise Unfolded(f"{given[0]} is a result of one stage")
    assert {*given} == {*whole.outputs.results}, "a result is of no stage"
    graphs = [
        _moved(compiled[like.number], like, number, whole)
        for number, like in enumerate(whole.kept.stages)
    ]
    _name_links(graphs, "F")
    _name_links(graphs[::-1], "B")  # gradients are sent the other way
    return graphs


def _moved(graph: Graph, like: StageLike, number: int, whole: Graph) -> Graph:
    """A copy of a stage's graph for stage ``number``, whose layers have other indices."""
    copies: dict[fx.Node, fx.Node] = {}
    nodes = fx.Graph()
    for node in graph.fx.nodes:
        if node.op == "output":
            continue
        copy = copies[node] = nodes.node_copy(node, copies.__getitem__)
        set_like(copy, node)
        known = value(copy)
        name = like.moved(known.name) if known.kind in ("param", "buffer") else known.name
        site = like.moved(known.site)
        update(copy, name=name, module=like.moved(known.module), stage=number, site=site)
        update(copy, at=like.moved(known.at))
    nodes.output(_outputs(graph.outputs, like, copies).as_dict())
    names = {value(copy).name for copy in copies.values() if copy.op == "placeholder"}
    return replace(
        graph,
        fx=nodes,
        aliases={a: b for a, b in whole.aliases.items() if b in names},
        constants={n: t for n, t in whole.constants.items() if n in names},
        folds=tuple(_moved_fold(fold, like) for fold in graph.folds),
        trained_elsewhere=frozenset(map(like.moved, graph.trained_elsewhere)),
    )


def _outputs(outputs: Outputs, like: StageLike, copies: dict[fx.Node, fx.Node]) -> Outputs:
    def copied(table: dict[str, fx.Node]) -> dict[str, fx.Node]:
        return {like.moved(name): copies[node] for name, node in table.items()}

    return Outputs(
        loss=copies[outputs.loss] if outputs.loss is not None else None,
        grads=copied(outputs.grads),
        buffers=copied(outputs.buffers),
        results={name: copies[node] for name, node in outputs.results.items()},
        sent={name: copies[node] for name, node in outputs.sent.items()},
    )


def _moved_fold(fold: RepeatedBlocks, like: StageLike) -> RepeatedBlocks:
    shift = like.shift if fold.path == like.path else 0
    return RepeatedBlocks(fold.path, fold.first + shift, fold.last + shift)


def _name_links(graphs: Iterable[Graph], phase: Phase) -> None:
    """Name each received value as the sender names it; ``graphs`` are in the order of sending."""
    sent: list[str] = []
    for number, graph in enumerate(graphs):
        received = [n for n in graph.placeholders("received").values() if value(n).phase == phase]
        for node, name in zip(received, sent, strict=False):
            update(node, name=name)
        names = {node: value(node).name for node in received}
        outputs, sent, table = graph.outputs, [], dict[str, Any]()
        for old, node in outputs.sent.items():
            name = old
            if value(node).phase == phase:
                name = names.get(node, f"{node.name}_{number}")
                sent.append(name)
            table[name] = node
        graph.set_outputs(replace(outputs, sent=table))
