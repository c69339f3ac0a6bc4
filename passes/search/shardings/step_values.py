"""What a search has to know of a step's values whatever their layouts: who reads them, how often
they stand for a block that was left out, which of them the backward keeps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from partc.graph import Graph, fake_of, is_backward, is_tensor, tensor_args, value
from partc.graph.folds import RepeatedBlocks
from partc.graph.input_only import input_only
from partc.passes.shard.value_names import value_names
from partc.plan import Plan, fits


@dataclass(frozen=True)
class Reader:
    """One place where a value is read. ``node`` is a call, the parameter whose gradient the value
    is, or None for another result of the step; ``operand`` says which of the call's operands.
    """

    node: fx.Node | None
    operand: int = 0

    @property
    def is_final(self) -> bool:
        """Whether the step ends with it."""
        return self.node is None or self.node.op == "placeholder"

    @property
    def backward(self) -> bool:
        return self.is_final or (self.node is not None and is_backward(self.node))


@dataclass
class StepValues:
    """``free`` follow from the inputs alone and are whole on every rank, where nothing in the
    plan's ``pins`` cuts the inputs.
    """

    graph: Graph
    pins: Plan
    free: frozenset[fx.Node] = frozenset()
    names: dict[fx.Node, str] = field(default_factory=dict)  # of calls
    readers: dict[fx.Node, list[Reader]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = value_names(self.graph)
        self.free = frozenset(self._free())
        self.readers = {n: [] for n in self.graph.fx.nodes if n.op != "output"}
        for node in self.names:
            for i, operand in enumerate(tensor_args(node)):
                self.readers[operand].append(Reader(node, i))
        for result, reader in self._results():
            self.readers[result].append(reader)

    def num_bytes(self, node: fx.Node) -> int:
        """Bytes of the whole value."""
        fake = fake_of(node)
        return int(fake.numel() * fake.element_size())

    def values(self) -> Iterator[fx.Node]:
        """All single tensors that are not free, in order."""
        for node in self.readers:
            if node not in self.free and is_tensor(node):
                yield node

    def alike(self, node: fx.Node) -> str:
        """A name that values have in common which do the same in equal blocks of a list."""
        name = value(node).name if node.op == "placeholder" else self.names[node]
        return re.sub(r"(?<=\.)\d+(?=[.:])", "*", name, count=1)

    def times(self, node: fx.Node, reader: Reader) -> int:
        """How often a value is brought to this reader, blocks that are left out counted in.

        Blocks left out stand between the one like them and the one after: what crosses there
        crosses once more for each of them, what leaves to others does so once.
        """
        after = reader.node
        if after is None or after.op == "placeholder":
            return self.graph.times(node)
        for fold in self.graph.folds:
            made, read = _place(node, fold), _place(after, fold)
            if made == "after" and read == "like":
                return fold.num + 1
            if made == "like" and read == "" and node.op != "placeholder":
                return 1
        return self.graph.times(node)

    def _free(self) -> Iterator[fx.Node]:
        cut_inputs = {
            node
            for name, node in self.graph.inputs.items()
            if any(fits(pattern, name) and cuts for pattern, cuts in self.pins.inputs.items())
        }
        alone = input_only(self.graph)
        for node in self.graph.fx.nodes:
            if node in cut_inputs or any(o not in alone for o in node.all_input_nodes):
                alone.discard(node)
            if node in alone:
                yield node

    def _results(self) -> Iterator[tuple[fx.Node, Reader]]:
        outputs, params = self.graph.outputs, self.graph.params
        for name, grad in outputs.grads.items():
            yield grad, Reader(params[name])
        for result in (outputs.loss, *outputs.buffers.values(), *outputs.results.values()):
            if result is not None:
                yield result, Reader(None)


def _place(node: fx.Node, fold: RepeatedBlocks) -> str:
    """Where a value stands by a fold: in the block ``like`` those left out, the one ``after``, or
    elsewhere.
    """
    known = value(node)
    path = f"{known.name if node.op == 'placeholder' else known.module}."
    if path.startswith(f"{fold.like}."):
        return "like"
    return "after" if path.startswith(f"{fold.after}.") else ""
