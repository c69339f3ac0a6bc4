"""The collectives with which a pipeline stage ends a step, taken out of its graph.

In: a stage's graph. Out: the same graph without the calls of phase ``E`` (end of the step); for
each gradient the collectives that reduce its sum over microbatches.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from partc.codegen.files.narrow_ends import NarrowEnd
from partc.errors import PlanError
from partc.graph import Graph, collectives, fake_of, first_operand, is_tensor, picked, value
from partc.graph.moves import kind_of, state_of, wire_of
from partc.passes.stages.early_sums import Chain, Leaving, closing_chain, leaving


@dataclass(frozen=True)
class Joined:
    """How a result comes of those of the microbatches: as the last one has it, unless a node says
    more. ``side_by_side``: they are joined along its dim. ``sums``: they are added up, and then
    reduced over ranks by these collectives.
    """

    side_by_side: fx.Node | None = None
    sums: Chain | None = None


@dataclass(frozen=True)
class Ends:
    """The collectives that reduce a stage's sums over microbatches when the step ends.

    ``grads`` has a chain of collectives for each parameter; an empty chain means that the sum over
    microbatches is the gradient. ``narrow`` are sums with fewer bytes, which come behind the chains
    of their gradients. The nodes of chains are in no graph any more. ``leaving`` says which
    gradients are reduced before the end, beside the last backward.
    """

    grads: dict[str, Chain]
    loss: Chain | None  # None: the stage has no loss, or it is not summed over microbatches
    results: dict[str, Joined] = field(default_factory=dict)
    leaving: Leaving | None = None
    narrow: tuple[NarrowEnd, ...] = ()

    @property
    def reduces(self) -> bool:
        """Whether any gradient is summed over ranks once per step."""
        return any(self.grads.values()) or bool(self.narrow)

    def groups(self) -> Iterator[tuple[Chain, list[str]]]:
        """Each different chain, with the parameters whose gradients it finishes."""
        narrow = self._narrow_params()
        yield from _by_way({n: chain for n, chain in self.grads.items() if n not in narrow})

    def before_narrow(self) -> Iterator[tuple[Chain, list[str]]]:
        """The same for gradients that a sum with fewer bytes finishes, behind the chain."""
        narrow = self._narrow_params()
        yield from _by_way({n: chain for n, chain in self.grads.items() if chain and n in narrow})

    def _narrow_params(self) -> set[str]:
        return {name for each in self.narrow for name in each.params}


def _by_way(chains: Mapping[str, Chain]) -> Iterable[tuple[Chain, list[str]]]:
    """Each different chain, with the names that have it."""
    found: dict[object, tuple[Chain, list[str]]] = {}
    for name, chain in chains.items():
        found.setdefault(_way(chain), (chain, []))[1].append(name)
    return found.values()


def _way(chain: Chain) -> object:
    """A key that is equal for chains which do the same: ops, axes, dims and dtypes."""
    return tuple((kind_of(n), tuple(sorted(n.kwargs.items())), _dtype(n)) for n in chain)


def _dtype(node: fx.Node) -> torch.dtype:
    """The dtype of what a collective gives; the node is in no graph any more."""
    fakes = (fake_of(node),) if is_tensor(node) else fake_of(node)
    dtype: torch.dtype = next(iter(fakes)).dtype
    return dtype


ON_RANKS_OF_THEIR_OWN = "Take a schedule that has these stages on ranks of their own, as 1f1b."


def check_one_way(name: str, ends: Mapping[int, Ends]) -> None:
    """PlanError if a rank's stages, by number, reduce a tied parameter's gradient differently."""
    chains = {stage: its.grads[name] for stage, its in ends.items() if name in its.grads}
    if len({_way(chain) for chain in chains.values()}) > 1:
        raise PlanError(
            where=name,
            what=f"stages {', '.join(map(str, chains))} of one rank sum its gradient over other "
            "ranks in different ways",
            why="they add to one gradient, and what one has summed another would sum again",
            do=ON_RANKS_OF_THEIR_OWN,
        )
    narrow = [stage for stage, its in ends.items() for end in its.narrow if name in end.params]
    if len(narrow) > 1:
        raise PlanError(
            where=name,
            what=f"stages {', '.join(map(str, narrow))} of one rank compress sums of its gradient",
            why="it is one gradient, of which two sums would each keep what they have not sent",
            do=f"{ON_RANKS_OF_THEIR_OWN} Or leave [compress] out.",
        )


def take_ends(graph: Graph) -> Ends:
    """Take the calls of phase ``E`` out of a graph, in place, and return what they did.

    The graph then gives what one microbatch adds to the gradients, the loss and the results.
    """
    outputs = graph.outputs
    grads, chains = dict(outputs.grads), {}
    for name, node in outputs.grads.items():
        grads[name], chains[name] = closing_chain(node)
    narrow = _narrow_ends(outputs.grads, chains)
    loss, chain = outputs.loss, None
    if loss is not None and value(loss).phase == "E":
        loss, chain = closing_chain(loss)
    results, joined = dict(outputs.results), {}
    for name, node in outputs.results.items():
        results[name], joined[name] = _joined(node)
    graph.set_outputs(replace(outputs, grads=grads, loss=loss, results=results))
    for node in reversed(list(graph.calls())):
        if value(node).phase == "E" and not node.users:
            graph.fx.erase_node(node)
    made = {name: (grads[name], chain) for name, chain in chains.items()}
    early = leaving(graph, graph.early, made) if graph.early else None
    return Ends(chains, chain, joined, early, narrow)


def _narrow_ends(grads: Mapping[str, fx.Node], chains: dict[str, Chain]) -> tuple[NarrowEnd, ...]:
    """The sums with fewer bytes at the end of the chains of gradients, which lose them."""
    found: dict[fx.Node, dict[int, str]] = {}
    for name, chain in chains.items():
        if chain and wire_of(chain[-1]):
            grad = grads[name]
            index = picked(grad)[1] if grad.target is operator.getitem else 0
            found.setdefault(chain[-1], {})[index] = name
            chains[name] = chain[:-1]
    return tuple(
        NarrowEnd(node, tuple(names[i] for i in sorted(names)), tuple(state_of(node)))
        for node, names in found.items()
    )


def _joined(node: fx.Node) -> tuple[fx.Node, Joined]:
    """What one microbatch gives of a result, and how the microbatches' are joined."""
    if value(node).phase != "E":
        return node, Joined()
    if node.target is collectives.collect:
        return first_operand(node), Joined(side_by_side=node)
    made, chain = closing_chain(node)
    strange = [each for each in chain if each.target is not collectives.all_reduce]
    assert not strange, "a result's sum over microbatches is reduced over ranks, and no more"
    return made, Joined(sums=chain)
