"""Check that every sum over ranks in a program's text is finished once, over the right axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from partc.audit.following import Following, Spreads
from partc.audit.following_dist import LIBRARY, FollowingDist, Message, with_known_helpers
from partc.audit.recording import Record, RecordingDist
from partc.audit.spread import Known, R, cut
from partc.audit.variation import Calls, CallSeen, Varying, varying
from partc.dryrun.alone import alone
from partc.dryrun.live_memory import LiveMemory
from partc.errors import CheckError
from partc.plan.mesh import ISLAND, PP, Mesh
from partc.program import Program
from partc.program.role import Role, Shard
from partc.verification.narrow_sums import sum_exactly

ROUNDS = 4  # in which what ranks of a pipeline send each other becomes known


@dataclass
class Followed:
    """How many gradients were followed to the end, of how many."""

    known: int = 0
    total: int = 0


def check_sums(program: Program) -> Followed:
    """Follow layouts through the text of one rank at each place of the pipeline."""
    mesh = program.mesh
    axes = summing_axes(mesh)
    if not axes:
        return Followed()
    firsts = [mesh.rank({**dict.fromkeys(mesh.names, 0), **at}) for at in _places(mesh)]
    runs = [_Run(program.role(rank), rank, axes, _varying(program, rank, axes)) for rank in firsts]
    messages: dict[Message, Spreads] = {}
    for _ in range(ROUNDS if len(runs) > 1 else 1):
        before = dict(messages)
        found = Followed()
        for run in runs:
            run.follow(messages, found)
        if messages == before:
            break
    return found


def summing_axes(mesh: Mesh) -> dict[str, int]:
    """The axes over which ranks have parts of sums, with their sizes."""
    return {axis: size for axis, size in mesh.axes if axis not in (ISLAND, PP) and size > 1}


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
    return role.run(step, inputs)


@contextmanager
def _ready(role: Role, rank: int, dist: Any) -> Iterator[tuple[Any, list[Tensor]]]:
    """A rank's module and inputs without data, ready to run its step."""
    eager = torch.compiler.set_stance("force_eager") if role.compiles else nullcontext()
    with alone(role, rank, LIBRARY) as here, torch.no_grad(), FakeTensorMode(), eager:
        role.module.__dict__["dist"] = dist
        sum_exactly(role)
        step = role.build(here)
        yield step, [torch.empty(s, dtype=d) for s, d in role.inputs.values()]


@dataclass
class _Run:
    """Follows layouts through one rank's step."""

    role: Role
    rank: int
    axes: Mapping[str, int]
    varying: Varying

    def follow(self, messages: dict[Message, Spreads], found: Followed) -> None:
        """Run the step once; ``messages`` has the layouts of what ranks send each other."""
        role = self.role
        live = LiveMemory(role.module.Step.__init__.__code__.co_filename)
        mode = Following(self.axes, self.varying, live.place)
        dist = FollowingDist(Record(self.rank), role.mesh, live, mode, messages)
        with _ready(role, self.rank, dist) as (step, inputs):
            held = role.tensors(step)
            for shard in role.shards:
                mode.note(held[shard.name], _of_shard(shard, self.axes))
            for x, shard in zip(inputs, role.batch, strict=True):
                mode.note(x, _of_shard(shard, self.axes))
            replaced = with_known_helpers(role, mode)
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
                    raise self._wrong(
                        f"the gradient of {shard.name}", axis, mine[axis], wanted[axis]
                    )
        loss, extras = result
        ends = {} if self.role.is_inference else {"the loss": loss, **_called(extras)}
        for what, tensor in ends.items():
            for axis, each in mode.of(tensor).items():
                if _contradicts(each, R):
                    raise self._wrong(what, axis, each, R)

    def _wrong(self, what: str, axis: str, mine: Known, wanted: Known) -> CheckError:
        return CheckError(
            where=f"{self.role.file}, {what}",
            what=f"at the end of the step it is {mine} on {axis}",
            why=f"it has to be {wanted}",
            do="Sum it over the axis, once, and keep this rank's piece.",
        )


def _called(extras: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"the extra {name}": each for name, each in extras.items()}


def _contradicts(mine: Known, wanted: Known) -> bool:
    """Whether a layout is certainly another one than wanted: a sum, or whole for a piece."""
    if mine is None or wanted is None or mine == wanted:
        return False
    return mine.kind in ("U", "M") or {mine.kind, wanted.kind} == {"R", "cut"}


def _of_shard(shard: Shard, axes: Mapping[str, int]) -> Spreads:
    cuts = {axis: cut(dim, outer) for axis, dim, outer in shard.cuts}
    return {axis: cuts.get(axis, R) for axis in axes}
