"""What one turn of a stage does to memory: a method for one microbatch, and `begin`.

A stage is run once, with two microbatches, on a memory of its own. Every other microbatch does to
memory what the second one did, whatever stands between its turns, so a schedule of thousands of
actions is a sum of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from partc.codegen.account.memory import Held, Memory, Piece
from partc.codegen.account.stages import PHASES, RunningStage, StageShape
from partc.codegen.account.transfers import Transfers
from partc.codegen.calls.storage import num_bytes
from partc.graph import Phase

# A piece by where it comes from: of what the microbatch kept before, received, or new ones.
Origin = tuple[str, int]
KEPT, RECEIVED, NEW = "kept", "received", "new"


@dataclass(frozen=True)
class Turn:
    """``extra_bytes``: the peak above what is live before the turn, during the call ``at``.

    ``new`` has the bytes of pieces that outlive the turn; ``kept``, ``sent`` and ``grads`` say what
    the microbatch keeps, what leaves for other stages, and which gradients are there to stay.
    """

    extra_bytes: int
    at: str
    new: tuple[int, ...]
    kept: tuple[Origin, ...]
    sent: tuple[Origin, ...]
    grads: tuple[tuple[str, Origin], ...]


@dataclass
class Played:
    """The state of a stage in a schedule: what microbatches keep, and gradients by parameter."""

    turns: Mapping[tuple[Phase, bool], Turn]
    stage: StageShape
    memory: Memory
    kept: dict[int, list[Held]] = field(default_factory=dict)
    grads: dict[str, list[Held]] = field(default_factory=dict)
    done: set[Phase] = field(default_factory=set)

    def play(self, phase: Phase, microbatch: int, received: Sequence[Held]) -> list[Held]:
        """Do to memory what a turn does; what it sends."""
        turn = self.turns[phase, phase in self.done]
        self.done.add(phase)
        self.memory.meet(turn.at, turn.extra_bytes)
        sources = {KEPT: self.kept.pop(microbatch, []), RECEIVED: received}
        sources[NEW] = [self.memory.piece(size) for size in turn.new]
        self.kept[microbatch] = [sources[where][index] for where, index in turn.kept]
        for name, (where, index) in turn.grads:
            self.grads.setdefault(name, []).append(sources[where][index])
        return [sources[where][index] for where, index in turn.sent]


@dataclass
class Rehearsal:
    """Runs a stage with two microbatches, and notes what each turn does."""

    running: RunningStage
    turns: dict[tuple[Phase, bool], Turn] = field(default_factory=dict)

    @classmethod
    def of(cls, stage: StageShape, *, messages: bool, in_pieces: bool) -> Rehearsal:
        memory = Memory()
        made = cls(RunningStage(stage, memory, Transfers(memory, in_pieces, messages)))
        made._note(("S", False), 0, [], made._begin)
        for microbatch in (0, 1):
            for phase in PHASES[1:]:
                if phase in stage.walks:
                    made._turn(phase, microbatch)
        return made

    def _begin(self) -> list[Held]:
        self.running.begin()
        return []

    def _turn(self, phase: Phase, microbatch: int) -> None:
        memory, nodes = self.running.memory, self.running.stage.flow.received(phase)
        received: list[Held] = [memory.piece(num_bytes(node)) for node in nodes]
        self._note(
            (phase, microbatch > 0), microbatch, received,
            lambda: self.running.turn(phase, microbatch, received),
        )  # fmt: skip

    def _note(
        self, key: tuple[Phase, bool], microbatch: int, received: Sequence[Held],
        turn: Callable[[], list[Held]],
    ) -> None:  # fmt: skip
        """Run a turn, and note it."""
        running, memory = self.running, self.running.memory
        known = {
            piece.number: (where, index)
            for where, held in ((KEPT, running.held(microbatch)), (RECEIVED, received))
            for index, piece in enumerate(pieces_of(held))
        }
        before, memory.peak, first = memory.total, 0, memory.number
        stored = {name: len(held) for name, held in running.transfers.grads.items()}
        sent = turn()
        lasting = running.lasting() if key[0] == "S" else running.held(microbatch)
        grads = [
            (name, piece)
            for name, held in running.transfers.grads.items()
            for piece in pieces_of(held[stored.get(name, 0) :])
        ]
        left = [*pieces_of(lasting), *pieces_of(sent), *(piece for _, piece in grads)]
        new = list({piece.number: piece for piece in left if piece.number >= first}.values())
        known |= {piece.number: (NEW, index) for index, piece in enumerate(new)}
        self.turns[key] = Turn(
            max(0, memory.peak - before), memory.at, tuple(piece.num_bytes for piece in new),
            tuple(_origins(lasting, known)), tuple(_origins(sent, known)),
            tuple((name, known[piece.number]) for name, piece in grads),
        )  # fmt: skip


def _origins(held: Iterable[Held], known: Mapping[int, Origin]) -> Iterator[Origin]:
    """Where pieces come from; of those of the whole step nothing is said."""
    return (known[piece.number] for piece in pieces_of(held) if piece.number in known)


def pieces_of(held: Iterable[Held]) -> list[Piece]:
    """All pieces that are held, each once, in order."""
    found: dict[int, Piece] = {}
    for each in held:
        if isinstance(each, Piece):
            found.setdefault(each.number, each)
        elif each is not None:
            found |= {piece.number: piece for piece in pieces_of(each)}
    return list(found.values())
