"""Check the keys of random numbers: seed, step, microbatch, site and place decide on each draw."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from partc.errors import CheckError
from partc.graph.draws import seed_of
from partc.plan.mesh import MICROBATCH_AXIS
from partc.plan.sharding import take_piece
from partc.program import Program
from partc.verification.steady_draws import SteadyDraws, whole_chance

Seed = int | None  # of a generator; None: torch's own generator


class Drawn(SteadyDraws):
    """Counts the generators from which calls draw while it is open, by their seeds.

    What a rank draws is its piece of the whole, found by the seed of the generator.
    """

    def __init__(self, program: Program, rank: int, seed: int, step: int) -> None:
        super().__init__()
        seed = program.mesh.seed_of_island(seed, rank)
        self.program, self.rank, self.at = program, rank, (seed, step)
        self.known = dict(_keys(program, rank, seed, step))
        self.seeds: Counter[Seed] = Counter()

    def chance(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, torch.Tensor | None]:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
        seed = given[0].initial_seed() if given else None
        self.seeds[seed] += 1
        if seed not in self.known:  # `check_keys` says so
            return "", None
        site, microbatch = self.known[seed]
        draw = self.program.draws[site]
        index = {**self.program.mesh.coords(self.rank), MICROBATCH_AXIS: microbatch}
        piece = whole_chance(draw)
        for axis, dim, outer, num in draw.cuts:
            piece = take_piece(piece, dim, outer, num, index[axis])
        return draw.name, piece


def check_keys(drawn: Drawn) -> None:
    """CheckError unless a rank drew from keys of its own, in every microbatch alike."""
    program, rank, known, (seed, step) = drawn.program, drawn.rank, drawn.known, drawn.at
    counts: dict[str, Counter[int | None]] = defaultdict(Counter)
    for each, num in drawn.seeds.items():
        if each not in known:
            raise _wrong(
                program, rank, step, "draws random numbers that are none of its own",
                f"with seed {seed} no site of the program has such a key for this step and rank",
            )  # fmt: skip
        site, microbatch = known[each]
        counts[site][microbatch] += num
    for site, by_microbatch in counts.items():
        if len({by_microbatch[at] for name, at in known.values() if name == site}) > 1:
            raise _wrong(
                program, rank, step, f"draws {site} for some microbatches only, or twice",
                f"it drew {sum(by_microbatch.values())} times in all",
            )  # fmt: skip


def _keys(program: Program, rank: int, seed: int, step: int) -> Iterator[tuple[Seed, Any]]:
    """The seed of every generator that a rank may use in a step, its site and microbatch."""
    coords = program.mesh.coords(rank)
    for site, draw in program.draws.items():
        cuts = {axis: num for axis, _, _, num in draw.cuts}
        place = tuple(coords[axis] for axis in program.mesh.names if axis in cuts)
        pieces = cuts.get(MICROBATCH_AXIS)
        for microbatch in [None] if pieces is None else range(pieces):
            yield seed_of(seed, step, microbatch, site, place), (site, microbatch)


def _wrong(program: Program, rank: int, step: int, what: str, why: str) -> CheckError:
    return CheckError(
        where=f"{program.role_of(rank)}, rank {rank}, step {step}",
        what=f"it {what}",
        why=why,
        do="Seed, step, microbatch, site and the rank's place decide on what is drawn: undo the "
        "edit.",
    )
