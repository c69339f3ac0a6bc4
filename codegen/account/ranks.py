"""The memory of each pipeline rank: its stages, what links bring and send, the sums at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from partc.codegen.account.memory import Held, Memory, Piece
from partc.codegen.account.stages import StageShape
from partc.codegen.account.turns import Played, Rehearsal
from partc.codegen.calls.storage import num_bytes
from partc.codegen.files.rank_step import PHASES as PHASE_OF
from partc.codegen.files.rank_step import actions_of
from partc.codegen.files.stage_flow import received
from partc.graph import Graph, Phase
from partc.graph.moves import kind_of
from partc.passes.stages.early_sums import Chain
from partc.schedules.actions import Action, Schedule
from partc.schedules.programs import BACKWARD, FORWARD, Wiring

BEGIN = -1  # in place of a microbatch: for all of them
Way = tuple[int, Phase]  # a link, by the stage that receives and the phase for which it does


@dataclass
class Link:
    """A link that brings tensors of each microbatch: those that have been asked for."""

    sizes: Sequence[int]
    left: int
    posted: list[list[Held]] = field(default_factory=list)


@dataclass
class RankAccount:
    """One pipeline rank's step.

    ``inboxes`` bring what other ranks send, ``shelves`` what stages of this rank hand on, and
    ``sent`` what is under way to other ranks.
    """

    rank: int
    graphs: Sequence[Graph]
    schedule: Schedule
    wiring: Wiring
    stages: Mapping[int, Played]
    memory: Memory
    bucket_bytes: int
    in_pieces: bool
    inboxes: dict[Way, Link] = field(default_factory=dict)
    shelves: dict[Way, list[list[Held]]] = field(default_factory=dict)
    sent: dict[Way, list[list[Held]]] = field(default_factory=dict)

    def run(self) -> Memory:
        """The whole step."""
        for stage in self.stages.values():
            stage.play("S", BEGIN, [])
        for way in self._inward():
            sizes = [num_bytes(node) for node in received(self.graphs[way[0]], way[1])]
            self.inboxes[way] = Link(sizes, self.schedule.microbatches)
            self._post(self.inboxes[way])
        for action in actions_of(self.graphs, self.schedule, self.rank):
            self._act(action)
        self.sent.clear()
        for stage in self.stages.values():
            self._finish(stage)
        return self.memory

    def _inward(self) -> Iterator[Way]:
        """The links that bring tensors from other ranks."""
        for number in self.stages:
            for phase, before in (("F", number - 1), ("B", number + 1)):
                way: Way = (number, "F" if phase == "F" else "B")
                there = 0 <= before < self.schedule.stages and received(self.graphs[number], way[1])
                if there and before not in self.stages:
                    yield way

    def _post(self, link: Link) -> None:
        """Ask for the next microbatch's tensors, if any are left."""
        if link.left:
            link.left -= 1
            link.posted.append([self.memory.piece(size) for size in link.sizes])
            self.memory.meet("receive")

    # actions ---------------------------------------------------------------------------------
    def _act(self, action: Action) -> None:
        """Take what has arrived, run the stage's method, send what it gives."""
        phase, split = PHASE_OF[action.kind], "W" in self.schedule.kinds
        stage = self.stages[action.stage]
        taken = self._taken((action.stage, phase)) if phase != "W" else []
        made = stage.play(phase, action.microbatch, taken)
        self._send(action.stage, phase, made)
        if action.kind == "B" and split and "W" in stage.stage.walks:
            stage.play("W", action.microbatch, [])
        del taken, made

    def _taken(self, way: Way) -> list[Held]:
        if way in self.inboxes:
            here = self.inboxes[way].posted.pop(0)
            self._post(self.inboxes[way])
            return here
        return self.shelves[way].pop(0) if self.shelves.get(way) else []

    def _send(self, number: int, phase: Phase, made: list[Held]) -> None:
        target = number + (1 if phase == "F" else -1)
        if phase == "W" or not 0 <= target < self.schedule.stages or not made:
            return
        way: Way = (target, phase)
        if target in self.stages:
            self.shelves.setdefault(way, []).append(made)
            return
        under_way = self.sent.setdefault(way, [])
        under_way.append(made)
        bound = self._bound(number, phase)
        del under_way[: max(0, len(under_way) - bound)]

    def _bound(self, number: int, phase: Phase) -> int:
        """How many sends of a link may be under way."""
        channel = self.wiring.channels[2 * number + (BACKWARD if phase == "B" else FORWARD)]
        return self.wiring.bounds[channel]

    # the end ---------------------------------------------------------------------------------
    def _finish(self, stage: Played) -> None:
        """Sum over ranks what microbatches have added up, bucket by bucket."""
        stage.kept.clear()
        started: list[Held] = []
        for chain, names in stage.stage.ends.groups():
            for bucket in self._buckets(stage.grads, names) if chain else ():
                started.append(self._reduced(stage.grads, chain, bucket))
        stage.grads[""] = started

    def _buckets(
        self, grads: Mapping[str, Sequence[Held]], names: Sequence[str]
    ) -> Iterator[list[str]]:
        bucket: list[str] = []
        filled = 0
        for name in (n for n in names if n in grads):
            size = _bytes(grads[name])
            if bucket and filled + size > self.bucket_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(name)
            filled += size
        if bucket:
            yield bucket

    def _reduced(self, grads: dict[str, list[Held]], chain: Chain, bucket: Sequence[str]) -> Held:
        """What a bucket's sums hold until all of them have been waited for."""
        size = sum(_bytes(grads[name]) for name in bucket)
        sent: Held = self.memory.piece(size) if len(bucket) > 1 else None
        found: Held = None
        for node in chain:
            num = int(str(node.kwargs["num"]))
            scattered = kind_of(node) == "reduce_scatter"
            size = size // num if scattered and not self.in_pieces else size
            found = self.memory.piece(size) if scattered else sent
            self.memory.meet(node.name)
        for name in bucket:
            if sent is not None:
                grads.pop(name)
        return [sent, found]


def _bytes(held: Sequence[Held]) -> int:
    """The bytes of pieces of memory."""
    return sum(each.num_bytes for each in held if isinstance(each, Piece))


def rank_memories(
    graphs: Sequence[Graph], likes: Sequence[int], schedule: Schedule, wiring: Wiring,
    bucket_bytes: int, *, messages: bool = False, backend: str = "gloo",
) -> list[Memory]:  # fmt: skip
    """The live memory of every pipeline rank, without parameters, buffers and inputs.

    ``likes`` has the same number for stages that do the same.
    """
    in_pieces = backend == "gloo" and not messages
    shapes = {like: StageShape.of(graphs[likes.index(like)]) for like in dict.fromkeys(likes)}
    turns = {
        like: Rehearsal.of(shape, messages=messages, in_pieces=in_pieces).turns
        for like, shape in shapes.items()
    }
    found = []
    for rank in range(schedule.ranks):
        memory = Memory()
        stages = {
            n: Played(turns[likes[n]], shapes[likes[n]], memory) for n in schedule.stages_of(rank)
        }
        account = RankAccount(
            rank, graphs, schedule, wiring, stages, memory, bucket_bytes, in_pieces
        )
        found.append(account.run())
    return found
