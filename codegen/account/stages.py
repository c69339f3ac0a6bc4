"""The memory of a pipeline rank's program, before it is printed: stages, links, the schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from partc.codegen.account.blocks import Shape
from partc.codegen.account.execution import Execution, Saved
from partc.codegen.account.memory import Held, Memory
from partc.codegen.account.transfers import Transfers
from partc.codegen.account.walk import Walk
from partc.codegen.bodies.gathers_ahead import gather_ahead
from partc.codegen.files.stage_flow import StageFlow, has_phase
from partc.codegen.files.stages import Prepared
from partc.codegen.files.take_ends import Ends
from partc.codegen.repeats.runs import Loop
from partc.codegen.repeats.slots import interfaces
from partc.cost.storage import replay
from partc.graph import Graph, Phase, is_tensor

PHASES: tuple[Phase, ...] = ("S", "F", "B", "W")


@dataclass
class StageShape:
    """A stage's graph as it will be printed: one function for each phase."""

    graph: Graph
    ends: Ends
    flow: StageFlow
    shape: Shape
    temporary: Mapping[fx.Node, int]

    @classmethod
    def of(cls, graph: Graph) -> StageShape:
        made = Prepared.of(graph, None, inductor=False)
        items = gather_ahead(made.items)
        sides = interfaces(made.graph, [item for item in items if isinstance(item, Loop)])
        flow, shape = StageFlow(made.graph, items, sides), Shape(made.graph, items, sides)
        return cls(made.graph, made.ends, flow, shape, replay(made.graph).temporary_bytes)

    @cached_property
    def walks(self) -> dict[Phase, Walk]:
        """The function of each phase that the stage has."""
        return {p: self._walk(p) for p in PHASES if has_phase(self.graph, p)}

    def _walk(self, phase: Phase) -> Walk:
        items, kept = self.flow.of(phase), self.flow.kept(phase)
        made = {item for item in items if isinstance(item, fx.Node)}
        others = {n for n in self.graph.fx.nodes if n not in made}
        return Walk(self.shape, items, kept, {n for n in kept if is_tensor(n)} | others)

    def handed(self, phase: Phase) -> list[fx.Node]:
        """The values of a phase that later phases of the same microbatch read."""
        later = PHASES[PHASES.index(phase) + 1 :]
        wanted = {n for each in later for n in self.flow.read(each)}
        return [n for n in self.flow.made(phase) if n in wanted and is_tensor(n)]


@dataclass
class RunningStage:
    """A stage in a step: what it keeps of each microbatch, and for the whole step."""

    stage: StageShape
    memory: Memory
    transfers: Transfers
    kept: dict[fx.Node, Held] = field(default_factory=dict)  # from `begin` on
    steady: list[Held] = field(default_factory=list)
    values: dict[int, dict[fx.Node, Held]] = field(default_factory=dict)  # by microbatch
    saved: dict[int, Saved] = field(default_factory=dict)
    done: set[Phase] = field(default_factory=set)

    def begin(self) -> None:
        """What all microbatches share, and weights that stay whole."""
        execution = self._execution("S")
        execution.run()
        for block in self.stage.shape.blocks.values():
            if block.is_steady and block.side.loop.phase == "F":
                self.steady += self._whole(block.gathers, len(block.side.loop.run.layers))
        for node in self.stage.flow.kept("S"):
            self.kept[node] = execution.frame.held(node)

    def _whole(self, gathers: Sequence[fx.Node], num: int) -> Iterator[Held]:
        started = [[self.transfers.gather(node) for node in gathers] for _ in range(num)]
        for each in started:
            yield [*self.transfers.take(each).values()]

    def turn(self, phase: Phase, microbatch: int, received: Sequence[Held]) -> list[Held]:
        """One method for a microbatch: what it sends."""
        execution = self._execution(phase, self.saved.setdefault(microbatch, defaultdict(list)))
        frame, values = execution.frame, self.values.setdefault(microbatch, {})
        for node, held in zip(self.stage.flow.received(phase), received, strict=False):
            frame.bind(node, held)
        self._unpack(phase, frame.bind, values)
        execution.run()
        for node in self.stage.handed(phase):
            values[node] = frame.held(node)
        self.done.add(phase)
        sent = self.stage.flow.sent(phase) if phase in "FB" else []
        return [frame.held(node) for node in sent]

    def held(self, microbatch: int) -> list[Held]:
        """What is kept of a microbatch."""
        saved = self.saved.get(microbatch, {}).values()
        return [*self.values.get(microbatch, {}).values(), *(x for each in saved for x in each)]

    def lasting(self) -> list[Held]:
        """What is kept for the whole step."""
        return [*self.kept.values(), *self.steady]

    def _execution(self, phase: Phase, saved: Saved | None = None) -> Execution:
        walk = self.stage.walks[phase]
        made = Execution.of(walk, self.memory, self.transfers, self.stage.temporary)
        made.frame.summed = phase in self.done
        for node, held in self.kept.items():
            made.frame.bind(node, held)
        return made if saved is None else replace(made, saved=saved)

    def _unpack(self, phase: Phase, bind: object, values: dict[fx.Node, Held]) -> None:
        """Bind what earlier phases saved; what no later phase reads is kept no more."""
        later = PHASES[PHASES.index(phase) + 1 :]
        wanted = {n for each in later for n in self.stage.flow.read(each)}
        for node in [n for n in values if n in self.stage.flow.read(phase)]:
            bind(node, values[node])  # type: ignore[operator]
            if node not in wanted:
                del values[node]
