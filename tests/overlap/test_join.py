"""What is faster copied than started shares a transfer; what is not goes alone."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from partc.api import compile
from partc.machines.topology import Topology
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.verification.verification import verify
from tests.overlap.words import IDS, LAYERS, WIDTH, model, step

WEIGHT_BYTES = 2 * WIDTH * WIDTH * 4  # of either product of a block, whole; a bias has 1 / WIDTH
COPIED = {  # how often a joined weight's bytes are read or written, over dp=2
    "all_gather": 2 * (0.5 + 1),  # its piece into what is sent, the whole out of what arrives
    "reduce_scatter": 2,  # its gradient into what is sent
}


def compiled(weights_alone: float, **plan: object) -> Program:
    """fsdp on a machine where to start takes as long as to copy a block's weight so often."""
    machine = Topology.load("cpu")
    (level,) = machine.levels
    latency_s = 1e-4
    memory = weights_alone * WEIGHT_BYTES / latency_s
    devices = tuple((replace(d, memory_bytes_per_s=memory), num) for d, num in machine.groups)
    links = replace(level, latency_s=latency_s)
    hardware = replace(machine, groups=devices, levels=(links,), start_s=0.0)
    mesh = Mesh((("dp", 2),), hardware)
    return compile(step(), mesh, plan=Plan(preset="fsdp").changed(**plan))


def transfers(program: Program, kind: str) -> int:
    """How many a block has, in its forward and backward."""
    traffic = {each["kind"]: each["count"] for each in program.cost.as_json()["traffic"]}
    return int(traffic[kind] // LAYERS)


# a forward reads two weights and two biases, whose copies take next to no time, a backward no bias
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "together", "apart"), [("all_gather", 2, 3 + 2), ("reduce_scatter", 1, 3)]
)
def test_a_weight_is_joined_where_copying_takes_less_than_a_start(
    kind: str, together: int, apart: int
) -> None:
    joined, alone = (compiled(share * COPIED[kind]) for share in (1.1, 0.9))
    assert (transfers(joined, kind), transfers(alone, kind)) == (together, apart)


@pytest.mark.exhaustive
def test_weights_alone_go_in_a_loop() -> None:
    weights = "[self.up_weight, self.down_weight]"
    loop = f"for weight in {weights}: self.whole += gather_weights([weight], 2, self.dp)"
    assert loop not in re.sub(r"\s+", " ", compiled(10.0).source(0))
    assert loop in re.sub(r"\s+", " ", compiled(1.0).source(0))


@pytest.mark.exhaustive
def test_both_ways_compute_the_same() -> None:
    for share in (0.01, 100.0):
        verify(compiled(share), model(), (IDS,), lambda m, x: m(x)).check()


def test_what_is_faster_copied_is_joined_up_to_the_limit() -> None:
    assert transfers(compiled(1e5), "all_gather") == 2
    limit = 1.5 * WEIGHT_BYTES / 1e6
    assert transfers(compiled(1e5, bucket_mb=limit), "all_gather") == 4
