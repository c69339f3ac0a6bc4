"""Runs of a stage's programs: their random numbers, islands, counts of steps and evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from partc.plan import Plan
from partc.program import Program
from partc.program.model.habits import Reseeded
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.ranks.same_gradients import SameGradients
from partc.program.ranks.waiting import waiting
from partc.program.stage.island_turns import IslandTurns
from partc.program.stage.members import Member
from partc.program.stage.run_state import Guard
from partc.program.stage.same_calls import SameCalls
from partc.program.step.given_out import waits
from partc.program.step.script_backward import Evenly, Halfway
from partc.program.step.step_failures import naming_calls
from partc.program.tensors.rank_tensors import RankTensors


class CountedRuns:
    """Runs programs of one loss on this rank. ``first``: its first program."""

    def __init__(
        self, first: Member, islands: IslandTurns, guard: Guard, calls: SameCalls
    ) -> None:  # fmt: skip
        self._first, self._islands, self._guard = first, islands, guard
        self._meet = partial(calls.check, "loss.backward()")
        self._reseeded = Reseeded()

    def run(self, member: Member, inputs: Sequence[Tensor]) -> Any:
        """What a program returns. Steps count as taken; evaluations have numbers of their own."""
        state, trains = self._guard.state, member.program.wanted.kind == "step"
        counts = trains or self._first.role.is_inference
        seed, step = state.seed
        if member.draws:  # programs count by themselves, and others have run meanwhile
            self._reseeded.look(seed, trains=trains)
            member.run.seed(seed, step if counts else -2 - state.num_evaluations)
        self._islands.begin(member, trains=trains)
        try:
            with (
                torch.no_grad(),
                of_other_ranks("step"),
                naming_calls(member.role, member.run, inputs),
                state.watch(member.role, member.program.wanted),
            ):
                result = self._begun(member, inputs) if trains else member.run(*inputs)
        finally:
            waiting().end()
        self._islands.end(member)
        if counts:
            state.seed = seed, step + 1
        else:
            state.num_evaluations += 1
        return result

    def _begun(self, member: Member, inputs: Sequence[Tensor]) -> Any:
        """What a step returns; of one that waits for the script, where it has come to."""
        result = member.run.step(*inputs)
        if not waits(member.run):
            return result
        results = next(result)
        dealt = _dealt_evenly(member.program, self._guard.tensors)
        check = self._same_gradients.check
        given = dict(zip(member.program.inputs, inputs, strict=True))
        return Halfway(result, member.run, results, dealt, check, self._meet, given)

    @cached_property
    def _same_gradients(self) -> SameGradients:
        from partc.data.share import Division  # which needs numpy

        mesh = self._first.program.mesh
        division = Division.of(Plan.parse(self._first.program.plan), mesh)
        pieces = [division.rank(rank) for rank in range(mesh.num_ranks)]
        return SameGradients(pieces, self._guard.tensors.device)


def _dealt_evenly(program: Program, held: RankTensors) -> Evenly:
    """How results and their gradients lie on ranks, each of which has its own rows."""
    data = {axis for cuts in program.dealt.values() for axis, *_ in cuts}
    own = {name: frozenset(axis for axis, *_ in cuts) for name, cuts in program.results.items()}
    return Evenly(own, {axis: group for axis, group in held.groups.items() if axis in data})
