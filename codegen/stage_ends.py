"""What a pipeline stage does once per step, after all microbatches: sums over ranks.

In: a stage's graph. Out: the same graph without its phase ``E``, and for each result the
collectives that its sum over microbatches still has to pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from partc import collectives
from partc.errors import CheckError
from partc.graph import Graph, value

Chain = tuple[fx.Node, ...]  # collectives in order; the nodes stand in no graph any more


@dataclass(frozen=True)
class Ends:
    """``grads`` by parameter; an empty chain means that nothing is left to do."""

    grads: dict[str, Chain]
    loss: Chain | None  # None: the stage has no loss, or it is not summed over microbatches
    results: dict[str, int] = field(default_factory=dict)  # the dim on which turns lie side by side

    @property
    def reduces(self) -> bool:
        """Whether any gradient is summed over ranks once per step."""
        return any(self.grads.values())

    def groups(self) -> Iterator[tuple[Chain, list[str]]]:
        """Parameters whose gradients pass the same collectives."""
        found: dict[object, tuple[Chain, list[str]]] = {}
        for name, chain in self.grads.items():
            key = tuple((n.target, tuple(sorted(n.kwargs.items()))) for n in chain)
            found.setdefault(key, (chain, []))[1].append(name)
        yield from found.values()


def take_ends(graph: Graph) -> Ends:
    """Cut phase ``E`` off a graph, in place: its results are then sums that turns add to."""
    outputs = graph.outputs
    grads, chains = dict(outputs.grads), {}
    for name, node in outputs.grads.items():
        grads[name], chains[name] = _before(node)
    loss, chain = outputs.loss, None
    if loss is not None and value(loss).phase == "E":
        loss, chain = _before(loss)
    results, dims = dict(outputs.results), {}
    for name, node in outputs.results.items():
        if node.target is collectives.collect:
            results[name], dims[name] = node.all_input_nodes[0], int(str(node.kwargs["dim"]))
    graph.set_outputs(replace(outputs, grads=grads, loss=loss, results=results))
    for node in reversed(list(graph.calls())):
        if value(node).phase == "E" and not node.users:
            graph.fx.erase_node(node)
    return Ends(chains, chain, dims)


def _before(node: fx.Node) -> tuple[fx.Node, Chain]:
    """The value that each microbatch adds to a sum, and what the sum passes after that."""
    chain: list[fx.Node] = []
    while value(node).phase == "E":
        operand = node.all_input_nodes[0]
        if node.target is collectives.accumulate:
            return operand, tuple(reversed(chain))
        if node.target in collectives.COLLECTIVES:
            chain.append(node)
        elif node.target is not collectives.wait:
            raise CheckError(
                where=value(node).module or node.name,
                what=f"{node.name} follows the sum over microbatches",
                why="only collectives are expected there",
                do="Use reduce = 'microbatch' in the plan.",
            )
        node = operand
    return node, ()


def paths_text(paths: Sequence[str], everything: bool) -> str:
    """Parameters as an expression that gives them one after the other.

    >>> paths_text(["embed", "layers.0.w", "layers.1.w"], False)
    '[self.embed, *(w for layer in self.layers for w in (layer.w,))]'
    """
    if everything:
        return "self.parameters()"
    alone = [f"self.{path}" for path in paths if "." not in path]
    lists: dict[str, dict[str, None]] = {}
    for path in paths:
        if "." in path:
            attribute, _, suffix = path.split(".", 2)
            lists.setdefault(attribute, {})[suffix] = None
    for attribute, suffixes in lists.items():
        each = ", ".join(f"layer.{suffix}" for suffix in suffixes)
        alone.append(f"*(w for layer in self.{attribute} for w in ({each},))")
    return f"[{', '.join(alone)}]"
