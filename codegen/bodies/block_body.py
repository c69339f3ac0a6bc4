"""The statements of a block's method, among which are calls of methods of inner blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from partc.codegen.bodies.block_arguments import passed, reads_microbatch
from partc.codegen.bodies.inner_blocks import leaves
from partc.codegen.bodies.step import CALLS, StepBody
from partc.codegen.calls.hidden import hidden_by
from partc.codegen.calls.statements import InnerCall, Statement
from partc.codegen.repeats.runs import Loop
from partc.codegen.text import Line, Text
from partc.graph import value


@dataclass
class BlockBody(StepBody):
    """A Body of a block in which are other blocks: single ones, that the block alone calls."""

    def statements(self) -> list[Statement]:
        """The statements of all calls, and one for each inner block."""
        found: list[Statement] = []
        for item in self.items:
            found += [self._inner(item)] if isinstance(item, Loop) else self.one(item)
        return found

    def _inner(self, loop: Loop) -> Statement:
        """The call of an inner block's method: ``y, layer_1_saved = self.layer_1(x)``."""
        side, cls, nodes = self._side(loop), self.classes[loop.run], loop.group.nodes
        taken = {f"{cls.attribute}_{word}": word for word in cls.taken_by(side)}
        arguments = [str(self.text(slot.nodes[0])) for slot in passed(side)]
        arguments += [*taken, *(["i"] if reads_microbatch(side) else [])]
        arguments += ["reduced"] if cls.reduces(side) else []
        read = [p for p in (*side.carried, *side.listed) if p not in side.unread]
        names = {p: self.scope.value(nodes[p], self.wishes) for p in read}
        targets = [names.get(p, "_") for p in (*side.carried, *side.listed)]
        left = leaves(cls, side)
        targets += [name if nodes else "_" for name, nodes in left.items()]
        self.scope.taken |= {*left}
        result = f"{', '.join(targets)} = " if targets else ""
        call = f"self.{cls.attribute}{CALLS[loop.phase]}({', '.join(arguments)})"
        self.seen |= {nodes[p]: Text(name) for p, name in names.items()}
        lines = [Line(result + call, self._remark(side), both=True)]
        lines += [line for p in read for line in self._stores(nodes[p])]
        reads = [side.own(slot) for slot in (*side.of("saved"), *passed(side))]
        lists = {name: saved for name, saved in left.items() if saved}
        return InnerCall(
            lines, reads, [nodes[p] for p in read], [*nodes], "", lists,
            cls.held(side),
        )  # fmt: skip

    def _hidden_by(self, start: fx.Node, wait: fx.Node) -> str:
        """As in ``Transfers``; calls of inner blocks hide a transfer too."""
        if value(start).remark or start not in self.place:
            return super()._hidden_by(start, wait)
        at = {item: i for i, item in enumerate(self.items)}
        between = self.items[at[start] + 1 : at[wait]]
        if not any(isinstance(item, Loop) for item in between):
            return super()._hidden_by(start, wait)
        each = [item.group.nodes if isinstance(item, Loop) else (item,) for item in between]
        return hidden_by(start, [node for nodes in each for node in nodes], self.spoken)
