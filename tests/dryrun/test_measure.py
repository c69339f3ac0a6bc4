"""The predicted peak of a rank is what the allocator sees on that rank, among others over gloo."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from partc.dryrun.run import dry_run
from partc.program import load
from partc.verification.processes import Processes
from tests.allocations import allocations, peak_bytes
from tests.patience import patience

pytestmark = pytest.mark.gloo
TOLERANCE = 0.05
NUM_STEPS = 6
REST_S = 0.005  # for gloo's threads to drop their handles first; of the program nothing changes


@pytest.fixture(scope="module")
def world() -> Iterator[Processes]:
    with Processes(2, timeout=patience(), quiet=True) as processes:
        yield processes


def peaks_here(folder: Path, inputs: tuple[Tensor, ...], rest_s: float) -> list[int]:
    """The peak of each step of which all was seen: what it allocated, it freed."""
    stage = load(folder).module()
    with torch.no_grad():
        for tensor in (*stage.parameters(), *stage.buffers()):
            tensor.fill_(1)
    wait = dist.Work.wait

    def wait_and_rest(work: dist.Work) -> bool:
        done = wait(work)
        time.sleep(rest_s)
        return done

    def step() -> None:
        stage.step(*inputs)
        stage.zero_grad()

    with patch.object(dist.Work, "wait", wait_and_rest):
        step()  # kernels set themselves up on first use
        seen = [allocations(step) for _ in range(NUM_STEPS)]
    return [peak_bytes(changes) for changes in seen if sum(changes) == 0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "mesh", "plan"),
    [
        ("gpt2", "tp=2", "megatron"),
        pytest.param("t5", "dp=2", "fsdp", marks=pytest.mark.exhaustive),
    ],
)
def test_peak_of_ranks(world: Processes, name: str, mesh: str, plan: str, tmp_path: Path) -> None:
    from partc.api import compile as compile_program
    from tests.zoo import MODELS  # not by the ranks, which would wait for transformers

    case = MODELS[name]()
    program = compile_program(case.model, mesh, case.inputs, loss=case.loss, plan=plan)
    program.save(tmp_path / "program")
    predicted = dry_run(program.role(0)).peak_bytes
    for peaks in world.run(peaks_here, tmp_path / "program", case.inputs, patience(REST_S)):
        assert peaks, "a gloo thread freed a tensor in every step"
        assert predicted == pytest.approx(min(peaks), rel=TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_peak_of_pipeline_ranks(world: Processes, schedule: str, tmp_path: Path) -> None:
    from partc.api import compile as compile_program
    from tests.zoo import MODELS

    case = MODELS["llama"]()
    program = compile_program(
        case.model, "pp=2", case.inputs, loss=case.loss, plan="ddp", microbatches=4,
        schedule=schedule,
    )  # fmt: skip
    program.save(tmp_path / "program")
    predicted = [rank["live"] for rank in program.cost.as_json()["ranks"]]
    measured = world.run(peaks_here, tmp_path / "program", case.inputs, patience(REST_S))
    assert all(measured), "a gloo thread freed a tensor in every step"
    assert predicted == [pytest.approx(min(peaks), rel=TOLERANCE) for peaks in measured]
