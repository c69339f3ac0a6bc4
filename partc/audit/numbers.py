"""Run the text of all ranks on seeded numbers, and compare with those of the single-device step.

All ranks run in this process, in float64 (``verification/threads.py``), so that a collective that
some member lacks, a result that is read before its wait and a shape that does not fit are found
too. A step runs twice: its gradients must then be twice as large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from partc.audit.keys import Drawn, check_keys
from partc.audit.record import changed, failed
from partc.errors import CheckError, PartcError
from partc.plan.mesh import PP, Mesh
from partc.program import Program
from partc.program.expected import Expected, Summary, seeded_weight
from partc.program.role import COMPILES, Role, Shard
from partc.verification.precision import convert, converted
from partc.verification.steady_draws import as_on_any_device
from partc.verification.threads import ThreadMesh, run_ranks

TOLERANCE = 1e-8  # in float64; the numbers of a program.json have 12 digits
NOISE = 1e-10  # a gradient below this part of the largest is zero but for rounding
SEED, STEPS = 7, 4  # of a third step of programs that draw: the seed, and the steps before it
TIMEOUT_S = 300.0
Piece = tuple[Shard, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What one rank has after its steps: whole tensors by label, and pieces of others."""

    whole: Mapping[str, Tensor]
    pieces: Mapping[str, Piece]


def check_numbers(program: Program, expected: Expected) -> None:
    """CheckError if a rank of the program computes other numbers than the single-device step.

    RunError if ranks wait for each other for ever, or start different collectives.
    """
    run = _Run(program, expected)
    outcomes = run_ranks(program.mesh.num_ranks, run.rank, timeout=TIMEOUT_S)
    differing = [*_disagreements(outcomes, program, expected)]
    if differing:
        raise CheckError(
            where=", ".join(sorted(program.sources)),
            what="the text computes other numbers than the step on one device",
            why="; ".join(differing[:4]) + f"; {len(differing) - 4} more" * (len(differing) > 4),
            do="Look for a sum over ranks or microbatches that is missing, doubled or too early.",
        )


@dataclass(frozen=True)
class _Run:
    """Runs the text on seeded numbers, on each rank."""

    program: Program
    expected: Expected

    def rank(self, rank: int, dist: Any) -> Outcome:
        """Two steps of one rank, or one forward of an inference program."""
        role = self._role(rank)
        role.module.__dict__["dist"] = dist
        try:
            return self._outcome(role, rank)
        except PartcError:
            raise
        except Exception as error:
            raise failed(role, rank, error) from error

    def _role(self, rank: int) -> Role:
        """The rank's role; what it hands to torch.compile runs eagerly, as other modes act then."""
        role = self.program.role(rank)
        if not role.compiles:
            return role
        name, text = self.program.role_of(rank), self.program.source(rank)
        place = self.program.mesh.coords(rank).get(PP, 0)
        return Role.load(text.replace(f"\n{COMPILES}\n", "\n\n"), name, place)

    def _outcome(self, role: Role, rank: int) -> Outcome:
        step: Any = role.build(ThreadMesh(self.program.mesh, rank))
        convert(step, torch.float64)
        loss, results = self._ran(role, step, rank, (0, 1))
        whole, rows = self._results(results)
        if loss is None:
            return Outcome(whole, {**rows, **_buffers(role, step)})
        pieces = rows | _cloned({**_grads(role, step), **_buffers(role, step)})
        self._ran(role, step, rank, (0, 2))
        grads = _cloned(_grads(role, step))
        twice = {f"accumulated {label}": piece for label, piece in grads.items()}
        if self.program.draws:  # a third step, of all ranks: stages without draws take part
            if hasattr(step, "seed"):
                step.seed(SEED, STEPS)
            self._ran(role, step, rank, (SEED, STEPS + 1))
        return Outcome({"loss": loss, **whole}, {**pieces, **twice})

    def _results(self, results: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Piece]]:
        """Results that every rank has whole, and those of which it has its rows, by label."""
        whole, rows = {}, {}
        for name, x in results.items():
            cuts, mine = self.program.results.get(name), x.detach().clone()
            if cuts is None:
                whole[f"result {name}"] = mine
                continue
            shape = list(x.shape)
            for axis, dim, _ in cuts:
                shape[dim] *= self.program.mesh.size(axis)
            rows[f"result {name}"] = Shard("", name, tuple(shape), x.dtype, cuts), mine
        return whole, rows

    def _ran(self, role: Role, step: Any, rank: int, at: tuple[int, int]) -> Any:
        """What a step on the seeded numbers returns; ``at``: the seed and the step's number."""
        batch = self.expected.seeds.batch({x.name: (x.shape, x.dtype) for x in role.batch})
        inputs = role.pieces([*batch.values()], role.mesh.coords(rank))
        self._fill(role, step, rank)
        before = {name: p.detach().clone() for name, p in step.named_parameters()}
        with as_on_any_device(), Drawn() as drawn:
            result = role.run(step, inputs)
        check_keys(drawn, self.program, rank, *at)
        for name, param in step.named_parameters():
            if not torch.equal(param, before[name]):
                raise changed(role, rank, name)
        return result

    @torch.no_grad()
    def _fill(self, role: Role, step: nn.Module, rank: int) -> None:
        """Set this rank's shards to the seeded weights, or to constants."""
        mesh, constants = self.program.mesh, self.program.constants
        held = role.tensors(step)
        for shard in role.shards:
            whole = constants.get(shard.name)
            if whole is None or shard in role.params:
                whole = seeded_weight(shard.name, shard.shape, shard.dtype)
            piece = shard.take(converted(whole, torch.float64), mesh, mesh.coords(rank))
            held[shard.name].copy_(piece)


def _grads(role: Role, step: nn.Module) -> dict[str, Piece]:
    held = role.tensors(step)
    found = {shard: held[shard.name].grad for shard in role.params}
    return {f"gradient {s.name}": (s, grad) for s, grad in found.items() if grad is not None}


def _cloned(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    return {label: (shard, x.clone()) for label, (shard, x) in pieces.items()}


def _buffers(role: Role, step: nn.Module) -> dict[str, Piece]:
    held = role.tensors(step)
    return {f"buffer {shard.name}": (shard, held[shard.name]) for shard in role.buffers}


# comparison ---------------------------------------------------------------------------------------
def _disagreements(
    outcomes: Sequence[Outcome], program: Program, expected: Expected
) -> Iterator[str]:
    """What differs between copies on several ranks, and between the program and the step."""
    norms = [x.norm for label, x in expected.tensors.items() if label.startswith("gradient ")]
    most = max(norms, default=0.0)
    found: dict[str, Tensor | None] = {}
    for label in dict.fromkeys(label for each in outcomes for label in each.whole):
        found[label] = outcomes[0].whole.get(label)
        for rank, each in enumerate(outcomes):
            if not _same(each.whole.get(label), found[label], 0.0):
                yield f"{label} of rank {rank} is not that of rank 0"
                break
    for label in dict.fromkeys(label for each in outcomes for label in each.pieces):
        pieces = {r: each.pieces[label] for r, each in enumerate(outcomes) if label in each.pieces}
        found[label], differing = _joined(pieces, program.mesh, NOISE * most)
        if differing:
            yield f"copies of {label} differ between ranks {' and '.join(map(str, differing))}"
    yield from _differences(found, expected, most)


def _differences(
    found: Mapping[str, Tensor | None], expected: Expected, most: float
) -> Iterator[str]:
    """The tensors of the step that the ranks lack or have with other numbers.

    A gradient that is only rounding noise is measured against ``most``, the largest norm of all.
    """
    known = dict(expected.tensors)
    grads = {label: each for label, each in known.items() if label.startswith("gradient ")}
    known |= {f"accumulated {label}": each.times(2) for label, each in grads.items()}
    for label, wanted in known.items():
        tensor = found.get(label)
        if tensor is None:
            yield f"there is no {label}"
            continue
        mine = Summary.of(label.removeprefix("accumulated "), tensor)
        noise = "gradient " in label and wanted.norm <= NOISE * most
        scale = (most if noise else wanted.norm) or 1.0
        off = max(abs(mine.norm - wanted.norm), abs(mine.product - wanted.product)) / scale
        if not off <= TOLERANCE:
            yield f"{label} is off by {off:.1e}"
    for label in sorted(found.keys() - known.keys()):
        if "gradient " in label:
            yield f"{label} is none on one device"


def _joined(
    pieces: Mapping[int, Piece], mesh: Mesh, noise: float
) -> tuple[Tensor | None, tuple[int, int] | None]:
    """The whole of a tensor from the ranks' pieces, and two ranks whose copies differ, if any.

    The whole is None where some part of it is on no rank.
    """
    shard, piece = next(iter(pieces.values()))
    places = torch.arange(prod(shard.shape)).view(shard.shape)
    whole = torch.full((places.numel(),), torch.nan, dtype=_wide(piece))
    owner = torch.full((places.numel(),), -1)
    for rank, (of, mine) in pieces.items():
        at, flat = of.take(places, mesh, mesh.coords(rank)).flatten(), mine.flatten().to(whole)
        if at.shape != flat.shape:
            return None, None
        again = owner[at] >= 0
        if again.any() and not _same(whole[at[again]], flat[again], noise):
            return None, (int(owner[at[again]][0]), rank)
        whole[at], owner[at] = flat, rank
    return (whole.view(shard.shape) if bool((owner >= 0).all()) else None), None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _same(one: Tensor | None, other: Tensor | None, noise: float) -> bool:
    """Whether copies of one tensor agree but for rounding, and for entries below ``noise``."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or not one.numel():
        return one.shape == other.shape
    a, b = (x.to(_wide(x)) for x in (one, other))
    off = float((a - b).abs().max())
    return off <= TOLERANCE * float(b.abs().max()) + noise or bool(torch.equal(a, b))
