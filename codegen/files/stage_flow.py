"""Which calls and loops stand in which method of a pipeline stage, and which values pass between.

A stage has a method for each phase: ``begin`` (S), ``forward`` (F), ``backward`` (B), ``weights``
(W).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from partc.codegen.bodies.block_arguments import passed
from partc.codegen.repeats.runs import Item, Loop
from partc.codegen.repeats.slots import Interface
from partc.graph import Graph, Phase, value

PHASES: tuple[Phase, ...] = ("S", "F", "B", "W")  # in the order in which a microbatch needs them


@dataclass(frozen=True)
class StageFlow:
    """The items (calls and loops) of a stage by phase; ``sides`` say what loops read and return."""

    graph: Graph
    items: Sequence[Item]
    sides: Mapping[Loop, Interface]

    def of(self, phase: Phase) -> list[Item]:
        """The calls and loops of a phase, in order."""
        return [item for item in self.items if phase_of(item) == phase]

    def received(self, phase: Phase) -> list[fx.Node]:
        """The values that the phase receives from another stage."""
        return received(self.graph, phase)

    def sent(self, phase: Phase) -> list[fx.Node]:
        """The values of the phase that are sent to another stage."""
        return [n for n in self.graph.outputs.sent.values() if phase_of(n) == phase]

    def made(self, phase: Phase) -> list[fx.Node]:
        """The values that later phases can read: those received, then those computed."""
        items = [n for item in self.of(phase) for n in self._made(item)]
        return [*self.received(phase), *items]

    def read(self, phase: Phase) -> set[fx.Node]:
        """The values that the phase reads, without the saved values of its blocks."""
        return {n for item in self.of(phase) for n in self._read(item)}

    def kept(self, phase: Phase) -> set[fx.Node]:
        """The values of a phase that a later phase, another stage or the step's end reads."""
        made = {*self.made(phase), *(self.graph.inputs.values() if phase == "S" else ())}
        outputs = self.graph.outputs
        later = PHASES[PHASES.index(phase) + 1 :]
        wanted = {n for each in later for n in self.read(each)} | {*outputs.sent.values()}
        wanted |= {*outputs.results.values(), *outputs.buffers.values()}
        if outputs.loss is not None:
            wanted.add(outputs.loss)
        return made & wanted

    def _made(self, item: Item) -> list[fx.Node]:
        if isinstance(item, fx.Node):
            return [item]
        side, last = self.sides[item], item.groups[-1]
        listed = [group.nodes[p] for group in item.groups for p in side.listed]
        return [*(last.nodes[p] for p in side.carried), *listed]

    def _read(self, item: Item) -> list[fx.Node]:
        if isinstance(item, fx.Node):
            return list(item.all_input_nodes)
        return [n for slot in passed(self.sides[item]) for n in slot.nodes]


def phase_of(item: Item) -> Phase:
    """The phase that a call or loop belongs to."""
    return item.phase if isinstance(item, Loop) else value(item).phase


def received(graph: Graph, phase: Phase) -> list[fx.Node]:
    """The values that a stage receives from another one for a forward or a backward."""
    nodes = graph.placeholders("received").values()
    return [n for n in nodes if value(n).phase == phase]


def has_phase(graph: Graph, phase: Phase) -> bool:
    """Whether a stage has a method for a phase; a received gradient alone is reason enough."""
    at_work = phase in ("S", "F") or bool(received(graph, phase))
    return at_work or any(value(n).phase == phase for n in graph.calls())
