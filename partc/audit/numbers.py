"""Run the text of all ranks on seeded numbers, and compare with those of the single-device step.

All ranks run in this process, in float64 (``verification/threads.py``), so that a collective that
some member lacks, a result that is read before its wait and a shape that does not fit are found
too. A step runs twice: its gradients must then be twice as large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from partc.audit.run_text import Outcome, Piece, Run
from partc.errors import CheckError
from partc.passes.suspects import suspects
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.program.expected import Expected, Summary
from partc.verification.expected_step import NOISE, TOLERANCE
from partc.verification.threads import run_ranks

TIMEOUT_S = 300.0


def check_numbers(program: Program, expected: Expected, edits: str = "") -> set[str]:
    """CheckError if a rank of the program computes other numbers than the single-device step.

    RunError if ranks wait for each other for ever, or start different collectives. Returns the
    names of draws that had constants in place of numbers of their own. ``edits``: where the text
    was edited.
    """
    run = Run(program, expected)
    outcomes = run_ranks(program.mesh.num_ranks, run.rank, timeout=TIMEOUT_S)
    differing = [*_disagreements(outcomes, program, expected)]
    if differing:
        raise CheckError(
            where=edits or ", ".join(sorted(program.sources)),
            what="the text computes other numbers than the step on one device",
            why="; ".join(differing[:4]) + f"; {len(differing) - 4} more" * (len(differing) > 4),
            do="Undo the edit." if edits else _nobodys(program),
        )
    return {name for each in outcomes for name in each.constant}


def _nobodys(program: Program) -> str:
    """What to do about a text that nobody has edited."""
    theirs = suspects(Plan.parse(program.plan).other_passes)
    return (
        f"Look at what is yours. {theirs}" if theirs else "Report it: nobody has edited the text."
    )


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


def differences(found: Sequence[Outcome], wanted: Sequence[Outcome]) -> Iterator[str]:
    """What differs between the outcomes of two texts, rank by rank."""
    for rank, (mine, other) in enumerate(zip(found, wanted, strict=True)):
        ours, theirs = mine.tensors(), other.tensors()
        most = max((_most(x) for label, x in theirs.items() if "gradient " in label), default=0.0)
        for label in sorted(ours.keys() | theirs.keys()):
            noise = NOISE * most if "gradient " in label else 0.0
            if not _same_numbers(ours.get(label), theirs.get(label), noise):
                yield f"{label} differs on rank {rank}"


def _same_numbers(one: Tensor | None, other: Tensor | None, noise: float) -> bool:
    """Whether two tensors agree but for rounding, and are NaN or infinite at the same places."""
    if one is None or other is None or one.shape != other.shape:
        return one is other
    a, b = (x.to(_wide(x)) for x in (one, other))
    finite = a.isfinite() & b.isfinite()
    if not torch.allclose(a[~finite], b[~finite], equal_nan=True):
        return False
    return _same(a[finite], b[finite], noise)


def _most(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


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
