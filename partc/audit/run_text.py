"""Run the text of one rank on seeded numbers, in float64 and in this process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any

import torch
from torch import Tensor, nn

from partc.audit.keys import Drawn, check_keys
from partc.audit.record import changed, fail
from partc.plan.mesh import PP
from partc.plan.wires import is_residual
from partc.program import Program
from partc.program.expected import Expected, seeded_weight
from partc.program.helper_file import helpers_of
from partc.program.role import COMPILES, Role, Shard
from partc.verification.narrow_sums import sum_exactly
from partc.verification.precision import convert, converted
from partc.verification.steady_draws import as_on_any_device
from partc.verification.threads import ThreadMesh

SEED, STEPS = 7, 4  # of a third step of programs that draw: the seed, and the steps before it
Piece = tuple[Shard, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What one rank has after its steps: whole tensors by label, and pieces of others.

    ``constant``: the draws that had constants.
    """

    whole: Mapping[str, Tensor]
    pieces: Mapping[str, Piece]
    constant: frozenset[str] = frozenset()

    def tensors(self) -> dict[str, Tensor]:
        return {**self.whole, **{label: piece for label, (_, piece) in self.pieces.items()}}


@dataclass(frozen=True)
class Numbers:
    """On which numbers a step runs: the seeded ones times a factor.

    ``spoiled``: the first parameter is NaN, and the first element of each float input infinite.
    ``trains``: the mode of the module.
    """

    said: str = ""
    factor: float = 1.0
    spoiled: bool = False
    trains: bool = True


@dataclass(frozen=True)
class Run:
    """Runs the text on seeded numbers, on each rank."""

    program: Program
    expected: Expected
    numbers: Numbers = Numbers()

    def rank(self, rank: int, dist: Any) -> Outcome:
        """Two steps of one rank, or one forward of an inference program; a third if it draws."""
        return self._named(rank, dist, self._steps)

    def once(
        self, rank: int, dist: Any, mode: AbstractContextManager[Any] | None = None
    ) -> Outcome:
        """One step of one rank, inside of ``mode``."""
        return self._named(rank, dist, lambda role, at: self._one(role, at, mode))

    def _named(self, rank: int, dist: Any, run: Any) -> Outcome:
        """Run with the stand-in ``dist``; an error names the line of the text."""
        role = self._role(rank)
        role.module.__dict__["dist"] = dist
        sum_exactly(role)  # the classes of narrow sums stand as printed (`fixed.py`)
        try:
            outcome: Outcome = run(role, rank)
        except Exception as error:
            fail(role, rank, error)
        return outcome

    def _role(self, rank: int) -> Role:
        """The rank's role; what it hands to torch.compile runs eagerly, as other modes act then."""
        role = self.program.role(rank)
        if not role.compiles:
            return role
        name, text = self.program.role_of(rank), self.program.source(rank)
        place = self.program.mesh.coords(rank).get(PP, 0)
        eager = text.replace(f"\n{COMPILES}\n", "\n\n")
        return Role.load(eager, name, place, helpers=helpers_of(self.program.sources))

    def _one(self, role: Role, rank: int, mode: AbstractContextManager[Any] | None) -> Outcome:
        step = self._built(role, rank)
        result, drawn = self._ran(role, step, rank, (0, 1), mode)
        return self._outcome(role, step, result, drawn)

    def _steps(self, role: Role, rank: int) -> Outcome:
        step = self._built(role, rank)
        result, drawn = self._ran(role, step, rank, (0, 1))
        first = self._outcome(role, step, result, drawn)
        if role.is_inference:
            return first
        self._ran(role, step, rank, (0, 2))
        grads = _cloned(_grads(role, step))
        twice = {f"accumulated {label}": piece for label, piece in grads.items()}
        if self.program.draws:  # a third step, of all ranks: stages without draws take part
            if hasattr(step, "seed"):
                step.seed(SEED, STEPS)
            self._ran(role, step, rank, (SEED, STEPS + 1))
        return replace(first, pieces={**first.pieces, **twice})

    def _built(self, role: Role, rank: int) -> Any:
        step = role.build(ThreadMesh(self.program.mesh, rank))
        convert(step, torch.float64)
        return step.train(self.numbers.trains)

    def _ran(
        self, role: Role, step: Any, rank: int, at: tuple[int, int],
        mode: AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, Drawn]:  # fmt: skip
        """What a step on the seeded numbers returns; ``at``: the seed and the step's number."""
        batch = self.expected.seeds.batch({x.name: (x.shape, x.dtype) for x in role.batch})
        inputs = role.pieces(list(map(self._changed, batch.values())), role.mesh.coords(rank))
        self._fill(role, step, rank)
        kept = {n: b for n, b in role.tensors(step).items() if is_residual(n)}
        kept |= dict(step.named_parameters())
        before = {name: p.detach().clone() for name, p in kept.items()}
        drawn = Drawn(self.program, rank, *at)
        with as_on_any_device(drawn), mode or nullcontext():
            result = role.run(step, inputs)
        check_keys(drawn)
        for name, param in kept.items():
            if not torch.allclose(param, before[name], rtol=0.0, atol=0.0, equal_nan=True):
                raise changed(role, rank, name)
        return result, drawn

    def _outcome(self, role: Role, step: nn.Module, result: Any, drawn: Drawn) -> Outcome:
        loss, results = result
        whole, rows = self._results(results)
        whole |= {} if loss is None else {"loss": loss}
        grads = {} if loss is None else _grads(role, step)
        pieces = {**rows, **grads, **_buffers(role, step)}
        return Outcome(_copied(whole), _cloned(pieces), frozenset(drawn.constant))

    def _results(self, results: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Piece]]:
        """Results that every rank has whole, and those of which it has its rows, by label."""
        whole: dict[str, Tensor] = {}
        rows: dict[str, Piece] = {}
        for name, x in results.items():
            cuts = self.program.results.get(name)
            if cuts is None:
                whole[f"result {name}"] = x
                continue
            shape = list(x.shape)
            for axis, dim, _ in cuts:
                shape[dim] *= self.program.mesh.size(axis)
            rows[f"result {name}"] = Shard("", name, tuple(shape), x.dtype, cuts), x
        return whole, rows

    def _changed(self, x: Tensor) -> Tensor:
        """A float input times the factor, and spoiled."""
        if not x.is_floating_point():
            return x
        x = x * self.numbers.factor
        if self.numbers.spoiled:
            x.view(-1)[:1] = inf
        return x

    @torch.no_grad()
    def _fill(self, role: Role, step: nn.Module, rank: int) -> None:
        """Set this rank's shards to the seeded weights, or to constants."""
        mesh, constants = self.program.mesh, self.program.constants
        held = role.tensors(step)
        for shard in role.shards:
            whole = constants.get(shard.name)
            if is_residual(shard.name):
                whole = torch.zeros(shard.shape, dtype=shard.dtype)
            if whole is None or shard in role.params:
                whole = self._weight(shard)
            piece = shard.take(converted(whole, torch.float64), mesh, mesh.coords(rank))
            held[shard.name].copy_(piece)

    def _weight(self, shard: Shard) -> Tensor:
        weight = seeded_weight(shard.name, shard.shape, shard.dtype)
        if weight.is_floating_point():
            weight = weight * self.numbers.factor
            first = min(self.expected.grads, default="")
            if self.numbers.spoiled and f"gradient {shard.name}" == first:
                weight = torch.full_like(weight, nan)
        return weight


def _grads(role: Role, step: nn.Module) -> dict[str, Piece]:
    held = role.tensors(step)
    found = {shard: held[shard.name].grad for shard in role.params}
    return {f"gradient {s.name}": (s, grad) for s, grad in found.items() if grad is not None}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {label: x.detach().clone() for label, x in tensors.items()}


def _cloned(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    return {label: (shard, x.detach().clone()) for label, (shard, x) in pieces.items()}


def _buffers(role: Role, step: nn.Module) -> dict[str, Piece]:
    held = role.tensors(step)
    return {f"buffer {shard.name}": (shard, held[shard.name]) for shard in role.buffers}
