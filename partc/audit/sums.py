"""Check that every sum over ranks in a program's text is finished once, over the right axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from partc.audit.flow import MOVED, PIECES, ROWS, Known, moved_to, moving, special
from partc.audit.layouts import Following, Layouts
from partc.audit.record import Record, RecordingDist, Started
from partc.audit.variation import Calls, CallSeen, Varying, varying
from partc.dryrun.live_memory import LiveMemory
from partc.dryrun.run import alone
from partc.errors import CheckError
from partc.plan.mesh import PP, Mesh
from partc.plan.sharding import R, U, cut
from partc.program import Program
from partc.program.role import Role, Shard

ROUNDS = 4  # in which what ranks of a pipeline send each other becomes known
LIBRARY = "nccl"  # for it sums are scattered by one collective; gloo's way is compared by numbers
Message = tuple[Any, ...]  # source, target, tag, and the number of the message


@dataclass
class Followed:
    """How many gradients were followed to the end, of how many."""

    known: int = 0
    total: int = 0


def check_sums(program: Program) -> Followed:
    """Follow layouts through the text of one rank at each place of the pipeline."""
    mesh = program.mesh
    axes = {axis: size for axis, size in mesh.axes if axis != PP and size > 1}
    if not axes:
        return Followed()
    firsts = [mesh.rank({**dict.fromkeys(mesh.names, 0), **at}) for at in _places(mesh)]
    runs = [_Run(program.role(rank), rank, axes, _varying(program, rank, axes)) for rank in firsts]
    messages: dict[Message, Layouts] = {}
    for _ in range(ROUNDS if len(runs) > 1 else 1):
        before = dict(messages)
        found = Followed()
        for run in runs:
            run.follow(messages, found)
        if messages == before:
            break
    return found


def _places(mesh: Mesh) -> list[dict[str, int]]:
    return [{PP: i} for i in range(mesh.pipeline_ranks)] if PP in mesh.names else [{}]


def _varying(program: Program, rank: int, axes: Mapping[str, int]) -> Varying:
    """What differs between a rank's calls and those of its neighbour on each axis."""
    coords = program.mesh.coords(rank)
    others = {axis: program.mesh.rank({**coords, axis: 1}) for axis in axes}
    return varying(
        _calls(program.role(rank), rank),
        {axis: _calls(program.role(other), other) for axis, other in others.items()},
    )


def _calls(role: Role, rank: int) -> list[CallSeen]:
    calls = Calls()
    live = LiveMemory(role.module.Step.__init__.__code__.co_filename)
    with _ready(role, rank, RecordingDist(Record(rank), role.mesh, live, LIBRARY)) as (step, xs):
        for i, tensor in enumerate([*step.parameters(), *step.buffers(), *xs]):
            tensor.origin_of_audit = ("given", i)
        with calls:
            _once(role, step, xs)
    return calls.seen


def _once(role: Role, step: Any, inputs: Sequence[Tensor]) -> Any:
    return step(*inputs) if role.is_inference else step.step(*inputs)


class _ready:
    """A rank's module and inputs without data, ready to run its step."""

    def __init__(self, role: Role, rank: int, dist: Any) -> None:
        self.role, self.rank, self.dist = role, rank, dist

    def __enter__(self) -> tuple[Any, list[Tensor]]:
        from contextlib import ExitStack

        self.stack = ExitStack()
        here = self.stack.enter_context(alone(self.role, self.rank, LIBRARY))
        self.role.module.__dict__["dist"] = self.dist
        self.stack.enter_context(torch.no_grad())
        self.stack.enter_context(FakeTensorMode())
        if self.role.compiles:
            self.stack.enter_context(torch.compiler.set_stance("force_eager"))
        step = self.role.build(here)
        return step, [torch.empty(s, dtype=d) for s, d in self.role.inputs.values()]

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)


@dataclass
class _Run:
    """Follows layouts through one rank's step."""

    role: Role
    rank: int
    axes: Mapping[str, int]
    varying: Varying

    def follow(self, messages: dict[Message, Layouts], found: Followed) -> None:
        """Run the step once; ``messages`` has the layouts of what ranks send each other."""
        role = self.role
        live = LiveMemory(role.module.Step.__init__.__code__.co_filename)
        mode = Following(self.axes, self.varying, live.place)
        dist = _FollowingDist(Record(self.rank), role.mesh, live, mode, messages)
        with _ready(role, self.rank, dist) as (step, inputs):
            held = role.tensors(step)
            for shard in role.shards:
                mode.note(held[shard.name], _of_shard(shard, self.axes))
            for x in inputs:
                mode.note(x, dict.fromkeys(self.axes, R))
            replaced = _with_known_helpers(role, mode)
            with mode:
                result = _once(role, step, inputs)
            role.module.__dict__.update(replaced)
            self._check_ends(mode, held, result, found)

    def _check_ends(
        self, mode: Following, held: Mapping[str, Tensor], result: Any, found: Followed
    ) -> None:
        """CheckError if a gradient does not lie as its parameter, or the loss is unfinished."""
        for shard in self.role.params:
            grad = held[shard.name].grad
            if grad is None:
                continue
            wanted, mine = _of_shard(shard, self.axes), mode.of(grad)
            found.total += 1
            found.known += all(each is not None for each in mine.values())
            for axis in self.axes:
                if _contradicts(mine[axis], wanted[axis]):
                    raise self._wrong(f"the gradient of {shard.name}", axis, mine[axis], wanted[axis])
        if isinstance(result, Tensor):
            for axis, each in mode.of(result).items():
                if _contradicts(each, R):
                    raise self._wrong("the loss", axis, each, R)

    def _wrong(self, what: str, axis: str, mine: Known, wanted: Known) -> CheckError:
        from partc.audit.layouts import in_words

        file = str(self.role.module.Step.__init__.__code__.co_filename)
        return CheckError(
            where=f"{file.removeprefix('<partc ').removesuffix('>')}, {what}",
            what=f"at the end of the step it is {in_words(mine)} on {axis}",
            why=f"it has to be {in_words(wanted)}",
            do="Sum it over the axis, once, and keep this rank's piece.",
        )


def _contradicts(mine: Known, wanted: Known) -> bool:
    """Whether a layout is certainly another one than wanted: a sum, or whole for a piece."""
    if mine is None or wanted is None or mine == wanted:
        return False
    return mine.kind in ("U", "M") or {mine.kind, wanted.kind} == {"R", "cut"}


def _of_shard(shard: Shard, axes: Mapping[str, int]) -> Layouts:
    cuts = {axis: cut(dim, outer) for axis, dim, outer in shard.cuts}
    return {axis: cuts.get(axis, R) for axis in axes}


# helper functions -------------------------------------------------------------------------------
def _with_known_helpers(role: Role, mode: Following) -> dict[str, Any]:
    """Put layouts behind the functions that reorder pieces; returns what was there before."""
    replaced = {}
    for name, after in HELPERS.items():
        real = role.module.__dict__.get(name)
        if callable(real):
            replaced[name] = real
            role.module.__dict__[name] = _followed(real, after, mode)
    return replaced


def _followed(real: Callable[..., Any], after: Callable[..., None], mode: Following) -> Any:
    def call(x: Tensor, num: int, *args: Any, **named: Any) -> Any:
        before = dict(mode.of(x))
        result = real(x, num, *args, **named)
        after(mode, before, result, num, args, named)
        return result

    return call


def _joined(
    mode: Following, before: Layouts, result: Tensor, num: int, args: Any, named: Any
) -> None:
    """``join(pieces, num, dim, outer)``: whole, or cut elsewhere, if they were cut there."""
    dim, outer = (*args, named.get("outer", 1))[:2]
    found: Layouts = {}
    for axis, each in before.items():
        if each is not None and each.kind in (ROWS, MOVED):
            after = R if each.kind == ROWS else cut(*moved_to(each))
            found[axis] = after if (each.dim, each.outer) == (dim, outer) else None
        else:
            found[axis] = each if each is not None and each.kind != "cut" else None
    mode.note(result, found)


def _in_pieces(
    mode: Following, before: Layouts, result: Tensor, num: int, args: Any, named: Any
) -> None:
    """``in_pieces(x, num, dim, outer)``: pieces of a sum, or of a piece, one after the other."""
    dim, outer = (*args, named.get("outer", 1))[:2]
    found: Layouts = {}
    for axis, each in before.items():
        found[axis] = None if each is not None and each.kind == "cut" else each
        if each is not None and mode.axes[axis] == num:
            if each == U:
                found[axis] = special(PIECES, cut(dim, outer))
            elif each.kind == "cut":
                found[axis] = moving(each, dim, outer)
    mode.note(result, found)


HELPERS: dict[str, Callable[..., None]] = {"join": _joined, "in_pieces": _in_pieces}


class _FollowingDist(RecordingDist):
    """Collectives that change layouts."""

    def __init__(
        self, found: Record, mesh: Mesh, live: LiveMemory, mode: Following,
        messages: dict[Message, Layouts],
    ) -> None:  # fmt: skip
        super().__init__(found, mesh, live, LIBRARY)
        self.mode, self.messages = mode, messages
        self.numbers: dict[Any, int] = {}

    def _axis(self, group: Any) -> str | None:
        return group if isinstance(group, str) and group in self.mode.axes else None

    def all_reduce(
        self, tensor: Tensor, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        axis = self._axis(group)
        if axis is not None:
            self.mode.all_reduce(tensor, op, axis)
        elif len(self._ranks(group)) > 1:
            self.mode.forget(tensor)
        return super().all_reduce(tensor, op, group, async_op)

    def all_gather_single(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        axis = self._axis(group)
        if axis is None:
            self.mode.forget(output)
        else:
            self.mode.gather(output, input, axis)
        return super().all_gather_single(output, input, group, async_op)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, op: Any = c10d.ReduceOp.SUM, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        axis = self._axis(group)
        if axis is None:
            self.mode.forget(output)
        else:
            self.mode.scatter(output, input, axis)
        return super().reduce_scatter_single(output, input, op, group, async_op)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        axis, before = self._axis(group), self.mode.of(input)
        self.mode.forget(output)
        if axis is not None:
            others = {a: None if each and each.kind == "cut" else each for a, each in before.items()}
            mine = before[axis]
            moves = mine is not None and mine.kind == MOVED
            self.mode.note(output, {**others, axis: mine if moves else None})
        return super().all_to_all_single(output, input, group, async_op)

    def broadcast(self, tensor: Tensor, *args: Any, **named: Any) -> Any:
        self.mode.forget(tensor)
        return super().broadcast(tensor, *args, **named)

    def _message(
        self, kind: str, tensor: Tensor, ends: tuple[int, int], group: Any, tag: int
    ) -> Started:
        at = (kind, ends, tag)
        number = self.numbers[at] = self.numbers.get(at, -1) + 1
        message = (*ends, tag, number)
        if kind == "isend":
            self.messages[message] = dict(self.mode.of(tensor))
        else:
            self.mode.forget(tensor)
            self.mode.note(tensor, self.messages.get(message, dict.fromkeys(self.mode.axes)))
        return super()._message(kind, tensor, ends, group, tag)
