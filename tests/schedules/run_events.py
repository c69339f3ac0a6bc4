"""A tiny executor of rank programs on a real process group, event by event, in exact numbers.

Stage ``s`` computes ``y = (s % 3 + 1) * x + s`` with ``x`` a microbatch's own number at stage 0, so
that a message which arrives in another's place changes the result; the loss is the sum of the last
stage's outputs over the microbatches. All values are whole numbers that float64 holds exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partc.schedules.programs import COMPUTE, RECEIVE, RECEIVED, SEND, START, RankProgram

Gradients = dict[int, float]  # of each stage's weight


def expected(stages: int, microbatches: int) -> tuple[float, Gradients]:
    """The loss and all weights' gradients, computed by one process."""
    loss, gradients = 0, dict.fromkeys(range(stages), 0)
    for microbatch in range(microbatches):
        inputs = [microbatch + 1]
        for stage in range(stages):
            inputs.append(weight(stage) * inputs[-1] + stage)
        loss += inputs[-1]
        d_out = 1
        for stage in reversed(range(stages)):
            gradients[stage] += d_out * inputs[stage]
            d_out *= weight(stage)
    return float(loss), {stage: float(total) for stage, total in gradients.items()}


def weight(stage: int) -> int:
    return stage % 3 + 1


def run_all(everything: Sequence[Sequence[RankProgram]]) -> list[dict[str, Any]]:
    """Run several steps one after another in this process group; what this rank found in each."""
    groups = _Groups()
    found = []
    for programs in everything:
        members = [groups.get(c.members, i) for i, c in enumerate(programs[0].wiring.communicators)]
        rank = dist.get_rank()
        found.append(_Executor(programs[rank], members).run() if rank < len(programs) else {})
        dist.barrier()
    return found


class _Groups:
    """Process groups by members and place; every rank has to ask for the same ones."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], int], Any] = {}

    def get(self, members: tuple[int, ...], place: int) -> Any:
        if (members, place) not in self._made:
            self._made[members, place] = dist.new_group(list(members))
        return self._made[members, place]


class _Executor:
    def __init__(self, program: RankProgram, groups: Sequence[Any]) -> None:
        self.program, self.wiring, self.groups = program, program.wiring, groups
        self.there: dict[str, Tensor] = {}  # values for neighbouring stages, own and received
        self.saved: dict[tuple[int, int], Tensor] = {}  # inputs by stage and microbatch
        self.gradients = dict.fromkeys(self.wiring.stages_of(program.rank), 0.0)
        self.loss = torch.zeros((), dtype=torch.float64)
        self.work: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        self.reduced: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        for event in self.program.events:
            self.event(*event)
        return {"gradients": self.gradients, "reduced": self.reduced}

    def event(self, code: int, number: int) -> None:
        if code == COMPUTE:
            action = self.wiring.action(number)
            self.compute(action.stage, action.kind, action.microbatch)
        elif code == START:
            self.work[code, number] = self.all_reduce(number)
        elif code in (SEND, RECEIVE):
            self.work[code, number] = self.transfer(code, number)
        else:
            work, tensor = self.work.pop((code - 1, number))
            work.wait()
            if code == RECEIVED:
                self.there[self.wiring.made(number)] = tensor
            elif code - 1 == START:
                self.reduced[self.wiring.collectives[number].name] = tensor.item()

    def transfer(self, code: int, number: int) -> tuple[Any, Tensor]:
        source, target = self.wiring.route(number)
        group = self.groups[self.wiring.channels[number // self.wiring.microbatches]]
        if code == SEND:
            tensor = self.there.pop(self.wiring.made(number))
            return dist.isend(tensor, target, group=group), tensor
        tensor = torch.full((), float("nan"), dtype=torch.float64)
        return dist.irecv(tensor, source, group=group), tensor

    def all_reduce(self, number: int) -> tuple[Any, Tensor]:
        collective = self.wiring.collectives[number]
        own = [s for s in collective.stages if s in self.gradients]
        value = self.loss if collective.after == "F" else sum(self.gradients[s] for s in own)
        tensor = torch.as_tensor(value, dtype=torch.float64).clone()
        group = self.groups[self.wiring.collective_channels[number]]
        return dist.all_reduce(tensor, group=group, async_op=True), tensor

    def compute(self, stage: int, kind: str, microbatch: int) -> None:
        if kind == "F":
            first = torch.tensor(microbatch + 1.0, dtype=torch.float64)
            x = self.there.pop(f"{stage - 1}F{microbatch}") if stage else first
            self.saved[stage, microbatch] = x
            y = weight(stage) * x + stage
            self.there[f"{stage}F{microbatch}"] = y
            if stage + 1 == self.wiring.stages:
                self.loss += y
        elif kind == "W":
            self.weight_grad(stage, microbatch, self.there.pop(f"{stage}W{microbatch}"))
        else:
            last = stage + 1 == self.wiring.stages
            one = torch.ones((), dtype=torch.float64)
            d_y = one if last else self.there.pop(f"{stage + 1}B{microbatch}")
            self.there[f"{stage}B{microbatch}"] = weight(stage) * d_y
            if kind == "I":
                self.there[f"{stage}W{microbatch}"] = d_y
            else:
                self.weight_grad(stage, microbatch, d_y)

    def weight_grad(self, stage: int, microbatch: int, d_y: Tensor) -> None:
        self.gradients[stage] += (d_y * self.saved.pop((stage, microbatch))).item()
