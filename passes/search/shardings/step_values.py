"""Facts about a step's values that hold for any sharding: their readers, their names, how often
each counts for dropped blocks, and which depend on the inputs alone.
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
from partc.plan.batch import BATCH


@dataclass(frozen=True)
class Reader:
    """One read of a value: operand number ``operand`` of the call ``node``, or an end of the step.

    At an end of the step ``node`` is the parameter whose gradient the value is, or None for another
    result.
    """

    node: fx.Node | None
    operand: int = 0

    @property
    def is_final(self) -> bool:
        """Whether the value is a result of the step here."""
        return self.node is None or self.node.op == "placeholder"

    @property
    def backward(self) -> bool:
        """Whether the value is read in the backward or at the end of the step."""
        return self.is_final or (self.node is not None and is_backward(self.node))


@dataclass
class StepValues:
    """The values of a joint graph with their readers.

    ``free`` values depend on the inputs alone and are whole on every rank; values of an input that
    ``pins`` shards are not free.
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
        """The name of a value with ``*`` for its block's index: ``h.0.mlp:gelu -> h.*.mlp:gelu``.

        Equal values of equal blocks have the same such name.
        """
        name = value(node).name if node.op == "placeholder" else self.names[node]
        return re.sub(r"(?<=\.)\d+(?=[.:])", "*", name, count=1)

    def times(self, node: fx.Node, reader: Reader) -> int:
        """How often this transfer from value to reader happens, with dropped blocks counted.

        The dropped blocks are between the block that stands for them and the next. A gradient from
        that next block back crosses each of them: ``fold.num + 1`` times. A value that the block
        hands to readers outside of the stack is transferred once.
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
            if any(
                fits(pattern, name) and {*cuts} - {BATCH}
                for pattern, cuts in self.pins.inputs.items()
            )
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
    """The place of a value by a run of dropped blocks: in the block that stands for them ("like"),
    in the block behind them ("after"), or elsewhere ("").
    """
    known = value(node)
    path = f"{known.name if node.op == 'placeholder' else known.module}."
    if path.startswith(f"{fold.like}."):
        return "like"
    return "after" if path.startswith(f"{fold.after}.") else ""
