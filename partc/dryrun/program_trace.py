"""What one rank's program does, line by line: its calls, its transfers, and the live bytes.

The program runs on tensors without data, as for its peak (``run.py``), but with all layers. Each
step of the trace has the line that the program's reader looks for: not the line of a helper, but
the line of the method that calls it; and the module with the number of the layer that runs.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from partc.cost.sites import NOWHERE, Site
from partc.dryrun.alone import LoneDist, LoneMesh, Transfer, in_place_of_dist
from partc.dryrun.lines import SourceLines
from partc.dryrun.live_memory import LiveMemory
from partc.dryrun.run import Built, run_step
from partc.dryrun.turn import Call, Turn
from partc.dryrun.turns import KnownTurns, NotSteady, Turns
from partc.program.role import Role
from partc.program.user_lines import path_in_model

CALL, START, WAIT = "call", "start", "wait"
TURN, TURNED = "turn", "turned"  # a method of a pipeline stage begins, ends
MESSAGES = "messages"


class Done(NamedTuple):
    """One thing that a program does: a call of an op, a start of a transfer or a wait for one.

    ``line``: of the program's file, the first of the statement. ``site``: the user's call for which
    the line stands. ``live_bytes``: held behind it, without parameters, buffers and inputs.
    ``number``: of the transfer; of a turn the microbatch, and ``axis`` its stage; of a call 0.
    """

    kind: str
    name: str
    axis: str
    line: int
    site: Site
    num_bytes: int
    live_bytes: int
    number: int
    is_backward: bool


@dataclass(frozen=True)
class ProgramTrace:
    """All that a rank's program does in one step, in order, and what it holds at its peak.

    ``holders``: bytes that are live at the peak by the line that made them, largest first.
    """

    done: tuple[Done, ...]
    peak_bytes: int
    peak_line: int
    holders: tuple[tuple[int, int], ...]  # line, bytes
    sizes: Mapping[str, int]  # of the mesh axes

    def starts(self, axis: str) -> list[Done]:
        """The transfers over an axis, in the order in which the program starts them.

        Of the messages that stand for one collective (gloo) the first is given, as ``MESSAGES``.
        """
        started = [each for each in self.done if each.kind == START and each.axis == axis]
        found: list[Done] = []
        several = 2 * (self.sizes.get(axis, 1) - 1)  # of one rank: to each other one, and from it
        while started:
            first = started[0]
            alone = first.name not in ("send", "receive") or not several
            found.append(first if alone else first._replace(name=MESSAGES))
            del started[: 1 if alone else several]
        return found


def program_trace(role: Role, rank: int = 0, library: str = "gloo") -> ProgramTrace:
    """Run a role's step on fakes, with all of its layers, and note what it does.

    Of a pipeline's microbatches those that repeat earlier ones are noted without being executed.
    ``library``: the library of collectives (``topology.LIBRARIES``).
    """
    try:
        return _traced(role, rank, library, repeats=not role.is_inference)
    except NotSteady:
        return _traced(role, rank, library, repeats=False)


def _traced(role: Role, rank: int, library: str, *, repeats: bool) -> ProgramTrace:
    built = Built.of(role, rank)
    live = _TracedMemory(role, built.step)
    dist = in_place_of_dist(role, _TracedDist(LoneMesh(role.mesh, rank), library, live))

    def begin() -> None:
        stages = getattr(built.step, "stages", None)  # the model may have a list so named
        if isinstance(stages, dict):
            turns = _TracedTurns(live, KnownTurns(), SourceLines.of(live.file), repeats=repeats)
            turns.take_over([*stages.values()])

    run_step(role, built, live, dist, begin)
    return live.trace()


@dataclass
class _Lines:
    """The lines of a program's file: where their statements begin, and their calls of the user."""

    first: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, file: str) -> _Lines:
        text = "".join(linecache.getlines(file))
        found = cls()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.stmt) and not hasattr(node, "body"):
                rows = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                found.first |= dict.fromkeys(rows, node.lineno)
        return found

    def at(self, line: int) -> int:
        return self.first.get(line, line)


class _TracedMemory(LiveMemory):
    """Counts live bytes, and notes every call with the line of the method that asked for it."""

    def __init__(self, role: Role, step: nn.Module) -> None:
        self.role, self.step = role, step
        file = str(role.module.Step.__init__.__code__.co_filename)
        self.lines_of = _Lines.of(file)
        self.paths: dict[tuple[int, str], str] = {}
        self.done: list[Done] = []
        super().__init__(file)

    def trace(self) -> ProgramTrace:
        peak = self.peak()
        held = self.lines_at(peak)
        holders = sorted(held.items(), key=lambda each: (-each[1], each[0]))
        sizes = dict(self.role.mesh.axes)
        return ProgramTrace(tuple(self.done), peak.num_bytes, peak.line, tuple(holders), sizes)

    def note(self, kind: str, name: str, axis: str = "", num_bytes: int = 0, number: int = 0,
             live_bytes: int | None = None) -> None:  # fmt: skip
        """Add what the program does now."""
        line, block, method = self._asked()
        site = self._site(line, block)
        live = self.total if live_bytes is None else live_bytes
        back = "backward" in method
        self.done.append(Done(kind, name, axis, line, site, num_bytes, live, number, back))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.op = str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _called(self, num_bytes: int) -> None:
        super()._called(num_bytes)
        self.note(CALL, self.op, live_bytes=num_bytes)

    def _line(self) -> int:
        return self._asked()[0] if not self.made_line else self.made_line

    def _asked(self) -> tuple[int, Any, str]:
        """The line, module and method that ask for what runs.

        Of the frames in the program's file the innermost whose line stands for a call of the user,
        otherwise the innermost of a method; in it the statement's first line.
        """
        frames = [*self._frames()]
        known = (each for each in frames if each[0] in self.role.lines.of)
        methods = (each for each in frames if isinstance(each[1], nn.Module))
        line = next(known, None) or next(methods, None) or (frames or [(0, None, "")])[0]
        block, method = next(((b, m) for _, b, m in frames if isinstance(b, nn.Module)), (None, ""))
        return line[0], block, method

    def _frames(self) -> Iterator[tuple[int, Any, str]]:
        """The frames in the program's file, innermost first: line, ``self`` and the method."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_filename == self.file:
                own = frame.f_locals.get("self")
                yield self.lines_of.at(frame.f_lineno), own, code.co_name
            frame = frame.f_back

    def _site(self, line: int, block: Any) -> Site:
        """The user's call for which a line stands, in the layer that runs."""
        if (origin := self.role.lines.of.get(line)) is None:
            return NOWHERE
        key = id(block), origin[0]
        if key not in self.paths:
            self.paths[key] = path_in_model(origin[0], block, self.role, self.step)
        return Site(self.paths[key], origin[1])


@dataclass
class _TracedTurns(Turns):
    """Executes the turns of a rank's stages, or notes again what an equal one of the stage did."""

    live: _TracedMemory
    repeats: bool = True
    did: dict[tuple[int, str], tuple[list[Done], int]] = field(default_factory=dict)

    def _may_leave_out(self, number: int, stage: Any) -> bool:
        return self.repeats and super()._may_leave_out(number, stage)

    def _execute(
        self, key: Any, number: int, stage: Any, real: Callable[..., Any], i: int,
        operands: Sequence[Any],
    ) -> Any:  # fmt: skip
        _, name, _ = key
        self.live.note(TURN, name, str(number), number=i)
        first, total = len(self.live.done), self.live.total
        result = super()._execute(key, number, stage, real, i, operands)
        self.did[number, name] = self.live.done[first:], total
        self.live.note(TURNED, name, str(number), number=i)
        return result

    def _repeat(self, known: Turn, call: Call, stage: Any, operands: Sequence[Any]) -> Any:
        """Note what the stage's last such turn did, above what is live now."""
        number, name, i = call
        if (number, name) not in self.did:
            raise NotSteady(f"{name} of stage {number}")
        did, total = self.did[number, name]
        more = self.live.total - total
        self.live.note(TURN, name, str(number), number=i)
        self.live.done += [each._replace(live_bytes=each.live_bytes + more) for each in did]
        behind = len(self.live.done)
        result = super()._repeat(known, call, stage, operands)
        del self.live.done[behind:]  # the calls that stand for what the turn keeps
        self.live.note(TURNED, name, str(number), number=i)
        return result


class _TracedDist(LoneDist):
    """``torch.distributed`` for one rank, which moves nothing and notes what is asked."""

    live: _TracedMemory

    def begin(self, transfer: Transfer) -> int:
        number = super().begin(transfer)
        put_in = sum(x.nbytes for x in transfer.sent or transfer.arriving)
        self.live.note(START, transfer.name, str(transfer.group), put_in, number)
        return number

    def wait(self, number: int) -> None:
        super().wait(number)
        self.live.note(WAIT, "", number=number)
