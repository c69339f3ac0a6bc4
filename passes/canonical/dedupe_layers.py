"""Drop the middle of long stacks of equal blocks; the first and last block of each stack stay.

Blocks are equal if they compute the same calls from their neighbours' values, their own parameters
and values outside of the stack. If in addition only its neighbours read a block, then a property of
the first and the last block as neighbours holds of every block between them, by induction. Every
later pass then takes as long for 126 layers as for 4. The printed loop runs over all layers again.

In: a functional joint graph. Out: the graph with fewer blocks; ``folds`` lists the dropped blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from partc.graph import Graph, Outputs, fake_of, value
from partc.graph.draws import site_in
from partc.graph.folds import RepeatedBlocks, TracedStages, list_member
from partc.plan import Plan


class Unfolded(Exception):
    """Blocks that were dropped as equal differ after all; compile again with every block."""


FEWEST = 3  # steps from the first to the last block of a span: with fewer too little is dropped


def dedupe_layers(graph: Graph, skipped: Sequence[RepeatedBlocks] = ()) -> None:
    """Drop the middle of every stack of equal blocks, in place, and list it in ``graph.folds``.

    ``skipped`` are blocks that were not even traced. Unfolded if the blocks around them differ.
    """
    for path, blocks in _lists(graph, skipped).items():
        for first, last in _equal_spans(graph, blocks):
            num = blocks[last].index - blocks[first].index
            if num >= FEWEST and _is_closed(graph, blocks, first, last):
                _leave_out(graph, blocks, first + 1, last - 1)
                fold = RepeatedBlocks(path, blocks[first].index + 1, blocks[last].index - 1)
                graph.folds = (*graph.folds, fold)
    for fold in skipped:
        if not any(found.covers(f"{fold.path}.{fold.first}") for found in graph.folds):
            raise Unfolded(f"{fold.path}.{fold.first}")


def confirm(graph: Graph, kept: TracedStages) -> None:
    """Set ``folds`` and ``kept`` of a graph that was traced without the blocks ``kept.left_out``.

    Unfolded if the blocks around the left-out ones differ.
    """
    for path, blocks in _lists(graph, kept.left_out).items():
        spans = _equal_spans(graph, blocks)
        for fold in (fold for fold in kept.left_out if fold.path == path):
            before = max(place for place, block in blocks.items() if block.index < fold.first)
            if not any(first <= before < last for first, last in spans):
                raise Unfolded(fold.like)
    graph.folds, graph.kept = kept.folds, kept


def check_plan(graph: Graph, plan: Plan) -> None:
    """Raise Unfolded if the plan, read back from text, shards a dropped block otherwise than the
    block that stands for it.
    """
    # As read back: the text has patterns (``h.*.w``), which dropped blocks then follow.
    written = Plan.parse(str(plan))
    for fold in graph.folds:
        for name in graph.params:
            if name.startswith(f"{fold.like}."):
                twin = f"{fold.path}.{fold.first}{name.removeprefix(fold.like)}"
                if written.stored(twin) != plan.stored(name):
                    raise Unfolded(twin)
        for name in plan.values:
            if name.startswith((f"{fold.like}.", f"{fold.like}:")):
                twin = f"{fold.path}.{fold.first}{name.removeprefix(fold.like)}"
                if written.planned(twin) != plan.planned(name):
                    raise Unfolded(twin)


# what stands in a block ---------------------------------------------------------------------------
Place = tuple[str, int]  # phase, and position among the block's calls of that phase


@dataclass
class _Block:
    """One member of a list of modules: its calls by phase, and its own parameters and buffers."""

    prefix: str
    index: int
    calls: dict[str, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    own: list[fx.Node] = field(default_factory=list)

    def places(self) -> dict[fx.Node, Place]:
        return {n: (phase, i) for phase, nodes in self.calls.items() for i, n in enumerate(nodes)}

    def nodes(self) -> Iterator[fx.Node]:
        return (n for nodes in self.calls.values() for n in nodes)


def _lists(graph: Graph, skipped: Sequence[RepeatedBlocks]) -> dict[str, dict[int, _Block]]:
    """Per list of modules (the outermost on each path) its blocks by place in the list.

    The place is the block's index, less the number of skipped blocks before it: the blocks around
    skipped ones count as neighbours.
    """
    found: dict[str, dict[int, _Block]] = {}
    for node in graph.fx.nodes:
        if node.op == "output":
            continue
        known = value(node)
        path, index = list_member(known.module if node.op == "call_function" else known.name)
        if path:
            place = index - sum(f.num for f in skipped if f.path == path and f.last < index)
            block = found.setdefault(path, {}).setdefault(place, _Block(f"{path}.{index}.", index))
            (block.calls[known.phase] if node.op == "call_function" else block.own).append(node)
    return {path: dict(sorted(blocks.items())) for path, blocks in found.items()}


# equal blocks -------------------------------------------------------------------------------------
def _equal_spans(graph: Graph, blocks: Mapping[int, _Block]) -> list[tuple[int, int]]:
    """The longest runs of equal blocks, as the places of the first and last block of each."""
    signatures = _Signatures(graph, blocks)
    texts = {i: signatures.of(i) for i in blocks}
    spans: list[tuple[int, int]] = []
    for before, index in pairwise(blocks):
        if index == before + 1 and texts[index] == texts[before]:
            first = spans.pop()[0] if spans and spans[-1][1] == before else before
            spans.append((first, index))
    return spans


@dataclass
class _Signatures:
    """Descriptions of blocks that are the same for equal blocks.

    An operand is described by its block's offset (0, -1, 1) and its position there, not by name.
    """

    graph: Graph
    blocks: Mapping[int, _Block]
    results: dict[str, list[tuple[str, fx.Node]]] = field(default_factory=lambda: defaultdict(list))
    constants: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        outputs = self.graph.outputs
        for kind, results in (("grad", outputs.grads), ("buffer", outputs.buffers)):
            for name, node in results.items():
                self.results[name].append((kind, node))
        for name, constant in self.graph.constants.items():
            self.constants[name] = constant.dtype, tuple(constant.flatten().tolist())

    def of(self, index: int) -> Any:
        """The description of a block: its calls, its parameters, its gradients and new buffers."""
        block, near = self.blocks[index], self._near(index)

        def spelled(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                return near[arg] if arg in near else self._outside(arg)
            if isinstance(arg, list | tuple):
                return tuple(map(spelled, arg))
            return (type(arg).__name__, repr(arg))

        calls = tuple(
            (
                n.target, spelled(n.args), spelled(sorted(n.kwargs.items())), _kind(fake_of(n)),
                site_in(n, block.prefix.removesuffix(".")),
            )
            for n in block.nodes()
        )  # fmt: skip
        given = tuple(
            (near[own], kind, spelled(node))
            for own in block.own
            for kind, node in self.results.get(value(own).name, ())
        )
        return calls, tuple(near[n] for n in block.own), given

    def _near(self, index: int) -> dict[fx.Node, Any]:
        """Descriptions of the values of a block and of its two neighbours, by node."""
        known: dict[fx.Node, Any] = {}
        for off in (0, -1, 1):
            if index + off in self.blocks:
                known |= {n: (off, *at) for n, at in self.blocks[index + off].places().items()}
        prefix = self.blocks[index].prefix
        return known | {n: self._own(n, prefix) for n in self.blocks[index].own}

    def _own(self, node: fx.Node, prefix: str) -> Any:
        """A parameter or buffer as its kind, its name in the block, its type and its values if
        constant.
        """
        known = value(node)
        return known.kind, known.name.removeprefix(prefix), self._constant(node)

    def _outside(self, node: fx.Node) -> Any:
        """A value outside of the neighbours as its name; a constant as its values, since each block
        may have its own copy.
        """
        is_constant = node.op == "placeholder" and value(node).name in self.constants
        return self._constant(node) if is_constant else node.name

    def _constant(self, node: fx.Node) -> Any:
        return _kind(fake_of(node)), self.constants.get(value(node).name)


def _kind(fake: Any) -> Any:
    if isinstance(fake, Tensor):
        return fake.shape, fake.dtype, fake.stride()
    if isinstance(fake, list | tuple):
        return tuple(map(_kind, fake))
    return type(fake)


# leaving them out ---------------------------------------------------------------------------------
def _is_closed(graph: Graph, blocks: Mapping[int, _Block], first: int, last: int) -> bool:
    """Whether only blocks of the span read the blocks between ``first`` and ``last``.

    The step's outputs may read those blocks' own gradients and buffers.
    """
    outputs = graph.outputs
    named: dict[fx.Node, list[str]] = defaultdict(list)
    for name, node in (*outputs.grads.items(), *outputs.buffers.items()):
        named[node].append(name)
    others = {outputs.loss, *outputs.results.values(), *outputs.sent.values()}
    inside = {n for i in range(first + 1, last) for n in (*blocks[i].own, *blocks[i].nodes())}
    around = (
        inside | {n for i in (first, last) for n in blocks[i].nodes()} | {graph.fx.output_node()}
    )
    return not any(
        n in others or not around.issuperset(n.users)
        or not all(name.startswith(blocks[i].prefix) for name in named.get(n, ()))
        for i in range(first + 1, last)
        for n in (*blocks[i].own, *blocks[i].nodes())
    )  # fmt: skip


def _leave_out(graph: Graph, blocks: Mapping[int, _Block], first: int, last: int) -> None:
    """Erase the blocks from ``first`` to ``last``; the block behind then reads the one before."""
    _read_instead(blocks[last + 1], blocks[last], blocks[first - 1])
    _read_instead(blocks[first - 1], blocks[first], blocks[last + 1])
    gone = [blocks[i] for i in range(first, last + 1)]
    graph.set_outputs(_without(graph.outputs, [b.prefix for b in gone]))
    going = {n for block in gone for n in (*block.own, *block.nodes())}
    for node in reversed(list(graph.fx.nodes)):
        if node in going:
            graph.fx.erase_node(node)


def _read_instead(reader: _Block, old: _Block, new: _Block) -> None:
    """Let ``reader`` read the values of block ``new`` where it read those of block ``old``."""
    twin = {n: new.calls[phase][i] for n, (phase, i) in old.places().items()}
    for node in reader.nodes():
        node.args = fx.map_arg(node.args, lambda n: twin.get(n, n))
        node.kwargs = fx.map_arg(node.kwargs, lambda n: twin.get(n, n))


def _without(outputs: Outputs, prefixes: Sequence[str]) -> Outputs:
    gone = tuple(prefixes)
    return Outputs(
        loss=outputs.loss,
        grads={name: n for name, n in outputs.grads.items() if not name.startswith(gone)},
        buffers={name: n for name, n in outputs.buffers.items() if not name.startswith(gone)},
        results=outputs.results,
    )
