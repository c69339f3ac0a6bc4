"""Copy forward calls into the backward, so that their results are no saved activations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from partc.graph import (
    ANYWHERE,
    Graph,
    fake_of,
    is_tensor,
    set_fake,
    set_value,
    stage_of,
    tensor_args,
    typed,
    value,
)
from partc.graph.draws import draws_numbers, reads_shape_alone

Home = Callable[[fx.Node], str]


def reads_no_values(node: fx.Node) -> bool:
    """Whether a call is a draw that reads at most a tensor's shape: a dropout's mask."""
    return draws_numbers(node) and len(tensor_args(node)) <= reads_shape_alone(node)


def may_repeat(node: fx.Node) -> bool:
    """Whether a call gives the same result when run again.

    A draw does if it reads no values: with a probability that is off by rounding, another number
    might come out.
    """
    return reads_no_values(node) or not draws_numbers(node)


@dataclass
class Copies:
    """Writes one backward copy of each forward value in ``again``.

    Backward calls in the value's region (``home``: the block that a call is in) and stage read the
    copy; calls elsewhere read the saved value. A random draw is repeated: the numbers of its site
    are the same again. ``twins`` maps an all-gather of the forward to the all-gather of the same
    weight in the backward, which copies read.
    """

    graph: Graph
    again: Collection[fx.Node]
    home: Home
    twins: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def insert(self) -> None:
        """Let every backward call read copies; each copy stands right before its first reader."""
        self.order = {node: i for i, node in enumerate(self.graph.calls())}
        for reader in list(self.graph.calls()):
            if value(reader).phase == "B":
                for operand in self._again(reader):
                    reader.replace_input_with(operand, self._copy(operand, reader))

    def _again(self, reader: fx.Node) -> list[fx.Node]:
        """The operands of a call that the call reads as copies; none of which it reads a shape."""
        if reads_no_values(reader):
            return []
        return [o for o in tensor_args(reader) if o in self.again and self.serves(o, reader)]

    def serves(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether both calls are in one region and stage: other stages are sent the value."""
        stages = (ANYWHERE, stage_of(reader))
        return self.home(node) == self.home(reader) and stage_of(node) in stages

    def _copy(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The copy of a value; the copies that it reads are written first, in forward order."""
        needed: dict[fx.Node, None] = {}
        todo = [node]
        while todo:
            each = todo.pop()
            if each not in self.made and each not in needed:
                needed[each] = None
                todo += self._again(each)
        for each in sorted(needed, key=self.order.__getitem__):
            self.made[each] = self._copied(each, reader)
        return self.made[node]

    def _before(self, twin: fx.Node, reader: fx.Node) -> fx.Node:
        """The all-gather ``twin``, moved in front of ``reader`` if the graph has it later."""
        if self.order[twin] > self.order[reader]:
            reader.prepend(twin)
            self.order[twin] = self.order[reader]
        return twin

    def _copied(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """Write the copy of one call before ``reader``; it reads copies and gathers again."""
        swap = {o: self.made[o] for o in self._again(node)}
        for operand in tensor_args(node):
            if twin := self.twins.get(operand):
                swap[operand] = self._before(twin, reader)
        with self.graph.fx.inserting_before(reader):
            if reads_no_values(node):
                swap = {shown: self._shape_of(node, reader) for shown in tensor_args(node)}
            copy = self.graph.fx.node_copy(node, lambda n: swap.get(n, n))
        set_value(copy, replace(value(node), phase="B"))
        set_fake(copy, fake_of(node))
        return copy

    def _shape_of(self, draw: fx.Node, reader: fx.Node) -> fx.Node:
        """A tensor for a repeated draw to take its shape from, so that no value is kept for that:
        a gradient that the reader has at hand, or else an empty one.

        A draw that every stage can repeat, as one on a weight, must read no gradient of one stage.
        """
        for operand in tensor_args(reader):
            is_near = value(operand).phase == "B" and stage_of(operand) == stage_of(draw)
            if is_near and is_tensor(operand) and typed(operand) == typed(draw):
                return operand
        fake = fake_of(draw)
        empty = self.graph.fx.call_function(
            torch.ops.aten.empty.memory_format, (list(fake.shape),), {"dtype": fake.dtype}
        )
        set_value(empty, replace(value(draw), phase="B", name="", site=""))
        set_fake(empty, fake)
        return empty
