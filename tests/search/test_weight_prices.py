"""What programs of several microbatches gather and reduce: their predicted time is the search's."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import partc
from partc.cost.roofline import COMPUTE, Box, Clock
from partc.cost.step_walk import walk_phases
from partc.lowering import table
from partc.machines.topology import Topology
from partc.passes.search.plans.candidate import Candidate
from partc.passes.search.plans.estimate import Estimator
from partc.passes.search.plans.read_scaling_model import scaling_models
from partc.passes.search.plans.scaling_model import ScalingModel
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from tests.search.test_estimate import SEQ, Model, loss_of

NEAR = 0.05
MACHINE = Topology.load("dgx-h100", 8)
CASES = {
    "pp+fsdp": Candidate(pp=2, shard=4, data="fsdp", microbatches=4),
    "pp+fsdp+megatron": Candidate(
        pp=2, shard=2, tp=2, data="fsdp", word="megatron", microbatches=4
    ),
    "fsdp": Candidate(shard=8, data="fsdp", microbatches=4),
    "hsdp": Candidate(replicate=2, shard=4, data="fsdp", microbatches=4),
    "zero1": Candidate(shard=8, data="zero1", microbatches=4),
    "interleaved": Candidate(
        pp=2, shard=4, data="fsdp", microbatches=4, schedule="interleaved-1f1b", chunks=3
    ),
    "zero bubble": Candidate(pp=2, shard=4, data="fsdp", microbatches=4, schedule="zb-h1"),
}


@cache
def step() -> partc.Traced:
    with torch.device("meta"):
        model, ids = Model().to(torch.bfloat16), torch.zeros(64, SEQ, dtype=torch.long)
    return partc.Traced(model, (ids, ids.clone()), loss_of)


@cache
def compiled(name: str) -> Program:
    one = CASES[name]
    plan = Plan(
        preset=one.preset, recompute="cheap", microbatches=one.microbatches, overlap_pieces=1
    )
    plan = plan.changed(schedule=one.schedule, virtual_stages=one.chunks) if one.pp > 1 else plan
    return partc.compile(step(), one.mesh(MACHINE), plan=plan)


@cache
def scaling_model(word: str) -> ScalingModel:
    (found,) = scaling_models(step().graph(), word, ["cheap"], table())
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_the_page_and_the_search_predict_one_time(name: str) -> None:
    one = CASES[name]
    seconds = compiled(name).cost.as_json()["prediction"]["seconds"]
    found = Estimator(scaling_model(one.word), MACHINE).estimate(one)
    assert found.step_s == pytest.approx(seconds, rel=NEAR)


def test_a_stage_gathers_a_block_while_it_computes_the_one_before() -> None:
    """In the forward and in the backward, whose gradients arrive while the next block computes."""
    for phase, kinds in (("F", ["all_gather"]), ("B", ["all_gather", "reduce_scatter"])):
        moved, computed = (boxes(phase, own) for own in (False, True))
        for kind in kinds:
            large = [b for b in moved if b.name == kind and b.num_bytes > 1e6 and is_inner(b)]
            beside = [b for b in large if any(overlap(b, c) > 0.9 * b.seconds for c in computed)]
            assert len(beside) == len(large) > 0


def boxes(phase: str, computes: bool) -> list[Box]:
    """The boxes of a phase of the first stage; neighbouring ones of computing are one."""
    program, clocks = compiled("pp+fsdp"), dict[str, Clock]()
    mesh = Mesh(program.mesh.axes, program.basis.topology())

    def clock_of(name: str) -> Clock:
        return clocks.setdefault(name, Clock(mesh, []))

    walk_phases(program.basis.tapes[0], mesh, clock_of)
    found = [b for b in clocks[phase].boxes or [] if (b.stream == COMPUTE) == computes]
    found = [b for b in found if b.stream in (COMPUTE, "dp") and b.seconds]
    return found if not computes else joined(found)


def joined(found: list[Box]) -> list[Box]:
    one: list[Box] = []
    for each in found:
        if one and each.begin_s - one[-1].begin_s - one[-1].seconds < 1e-9:
            one[-1] = one[-1]._replace(seconds=each.begin_s + each.seconds - one[-1].begin_s)
        else:
            one.append(each)
    return one


def is_inner(box: Box) -> bool:
    """Whether a transfer is of the middle one of the stage's three blocks."""
    return box.site.module.startswith("blocks.1")


def overlap(one: Box, other: Box) -> float:
    end = min(one.begin_s + one.seconds, other.begin_s + other.seconds)
    return end - max(one.begin_s, other.begin_s)
