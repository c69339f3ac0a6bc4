"""Copy forward calls into the backward, so that their values need not be kept in between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from partc.graph import ANYWHERE, Graph, fake_of, set_fake, set_value, stage_of, tensor_args, value
from partc.passes.recompute.replay_masks import Draw, replayed

Home = Callable[[fx.Node], str]


@dataclass
class Copies:
    """The backward's own copies of the forward values ``again``, one each.

    A copy serves the readers that have the value's ``home`` and, in a pipeline, its stage: what
    others read is kept. ``draws`` are the dropout masks among the values, which are drawn again
    from the generator's state; ``twins`` are backward calls that give what forward ones gave.
    """

    graph: Graph
    again: Collection[fx.Node]
    home: Home
    draws: Mapping[fx.Node, Draw] = field(default_factory=dict)
    twins: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def insert(self) -> None:
        """Let every backward call read copies, each written right before its first reader."""
        self.order = {node: i for i, node in enumerate(self.graph.calls())}
        for reader in list(self.graph.calls()):
            if value(reader).phase == "B":
                for operand in self._again(reader):
                    reader.replace_input_with(operand, self._copy(operand, reader))

    def _again(self, reader: fx.Node) -> list[fx.Node]:
        """The operands of a call that are computed again where it stands."""
        if reader in self.draws:
            return []
        return [o for o in tensor_args(reader) if o in self.again and self.serves(o, reader)]

    def serves(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether both stand in one home and, in a pipeline, on one stage: others are sent
        values.
        """
        stages = (ANYWHERE, stage_of(reader))
        return self.home(node) == self.home(reader) and stage_of(node) in stages

    def _copy(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The copy of a value, those it is made of before it, in the order of the forward."""
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
        """A gather, moved to where it is read if it stands behind that."""
        if self.order[twin] > self.order[reader]:
            reader.prepend(twin)
            self.order[twin] = self.order[reader]
        return twin

    def _copied(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        swap = {o: self.made[o] for o in self._again(node)}
        for operand in tensor_args(node):
            if twin := self.twins.get(operand):
                swap[operand] = self._before(twin, reader)
        with self.graph.fx.inserting_before(reader):
            if node in self.draws:
                copy = replayed(self.graph.fx, node, self.draws[node])
            else:
                copy = self.graph.fx.node_copy(node, lambda n: swap.get(n, n))
        set_value(copy, replace(value(node), phase="B"))
        set_fake(copy, fake_of(node))
        return copy
