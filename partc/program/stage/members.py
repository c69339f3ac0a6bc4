"""A further program of a stage: its text runs over the tensors of the stage's first program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from partc.errors import RunError
from partc.plan.wires import is_residual
from partc.program import Program
from partc.program.role import Role, Shard
from partc.program.step.arguments import Returned
from partc.program.step.decided import Decided
from partc.program.step.step_checks import Guard, StepChecks
from partc.program.tensors.rank_tensors import RankTensors


class Member:
    """One program on this rank.

    ``run`` is the rank's module as its text has it. ``own`` are the tensors that only this program
    has: constants, such as the mask for one length.
    """

    def __init__(
        self, program: Program, role: Role, run: Any, own: Mapping[str, Shard], guard: Guard
    ) -> None:
        self.program, self.role, self.run, self.own = program, role, run, own
        decided = Decided(program.decided, program.constants, guard.tensors)
        self.checks = StepChecks(role, program.numbers, guard, decided)
        self.returned = Returned(program.returns)
        self.draws = hasattr(run, "seed")
        self.meets = hasattr(run, "meet")  # other islands
        self.pulls = hasattr(run, "pull")  # parameters from the islands that own them
        self.sends = hasattr(run, "drain")  # what islands share is under way between steps
        self.is_late = self.sends and not self.meets  # these are gradients
        self.trained = [name for name, x in role.tensors(run).items() if x.requires_grad]

    @classmethod
    def over(
        cls, program: Program, mesh: DeviceMesh | None, tensors: RankTensors, guard: Guard
    ) -> Member:
        """A program over the tensors that a stage has already; nothing is allocated for weights.

        RunError if a tensor lies otherwise there, or is missing.
        """
        role = program.role(dist.get_rank())
        run = role.build(mesh, "meta")
        known = set(program.fingerprint.tensors)
        known |= {shard.name for shard in role.shards if is_residual(shard.name)}
        own = {s.name: s for s in role.shards if s.name not in known or s.name not in tensors.held}
        member = cls(program, role, run, own, guard)
        member.link(tensors)
        member._fill_own(tensors)
        return member

    def link(self, tensors: RankTensors) -> None:
        """Put the stage's tensors, as they are now, in the places of the program's own."""
        for shard in self.role.shards:
            if shard.name not in self.own:
                _check_alike(shard, tensors.shards[shard.name], self.program)
                _put(self.run, shard.key, tensors.held[shard.name])

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of ``.to()`` to the program's own tensors."""
        held = self.role.tensors(self.run)
        for name, shard in self.own.items():
            _put(self.run, shard.key, fn(held[name]))

    def _fill_own(self, tensors: RankTensors) -> None:
        for name, shard in self.own.items():
            whole = self.program.constants.get(name)
            if whole is None:
                raise _unknown(name, self.program)
            piece = shard.take(whole, tensors.mesh, tensors.coords)
            dtype = _dtype_now(piece.dtype, self.role, tensors)
            _put(self.run, shard.key, piece.to(tensors.device, dtype, copy=True))


def _put(root: nn.Module, key: str, tensor: Tensor) -> None:
    """Register a tensor at a dotted key, in place of the parameter or buffer that is there."""
    path, _, leaf = key.rpartition(".")
    module = root.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    elif isinstance(tensor, nn.Parameter):
        module._parameters[leaf] = tensor
    else:  # the first program does not read it, and keeps it for checkpoints alone
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _dtype_now(dtype: torch.dtype, role: Role, tensors: RankTensors) -> torch.dtype:
    """The dtype to which ``stage.to(dtype)`` has brought tensors of a dtype since the start."""
    held = (s for s in role.params if s.name in tensors.held and s.dtype == dtype)
    return next((tensors.held[s.name].dtype for s in held), dtype)


def _check_alike(shard: Shard, first: Shard, program: Program) -> None:
    if (shard.cuts, shard.shape, shard.dtype) != (first.cuts, first.shape, first.dtype):
        raise RunError(
            where=shard.name,
            what=f"this program shards it {_cuts(shard)}, and the stage's first one {_cuts(first)}",
            why="programs of one stage share the memory of its weights",
            do="Compile it with program.also(...) of the first program, which keeps its layout.",
        )


def _cuts(shard: Shard) -> str:
    return ", ".join(f"on dim {dim} over {axis}" for axis, dim, _ in shard.cuts) or "not at all"


def _unknown(name: str, program: Program) -> RunError:
    return RunError(
        where=name,
        what="this rank does not hold it, and a further program reads it here",
        why="the first program of a stage decides which rank holds what, and it does not read this",
        do="Compile first the program that reads all of the model.",
    )
