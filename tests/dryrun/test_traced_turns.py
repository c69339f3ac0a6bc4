"""The trace of a pipeline's program notes microbatches that repeat earlier ones without running."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partc
from partc.dryrun import program_trace as tracing
from partc.dryrun.program_trace import Done, ProgramTrace, program_trace
from tests.reports.report_programs import Net, loss_of


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "plan", "schedule"),
    [("pp=2,dp=2", "fsdp", "1f1b"), ("pp=2,tp=2", "megatron", "interleaved-1f1b"),
     ("dp=2", "zero1", "1f1b"), ("pp=2,dp=2", "fsdp", "zb-h1")],
)  # fmt: skip
def test_repeated_microbatches_are_noted_as_if_executed(
    mesh: str, plan: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = partc.Traced(Net(), (torch.zeros(12, 16, dtype=torch.long),), loss_of)
    program = partc.compile(step, mesh, plan=plan, microbatches=6, schedule=schedule)
    ran: list[int] = []
    real = tracing._TracedTurns._repeat

    def noted(*given: Any) -> Any:
        ran.append(1)  # what it was given would stay alive
        return real(*given)

    monkeypatch.setattr(tracing._TracedTurns, "_repeat", noted)
    for rank in {program.mesh.first_rank(number) for number in range(len(program.roles))}:
        short = program_trace(program.role(rank), rank)
        whole = tracing._traced(program.role(rank), rank, "gloo", repeats=False)
        assert [*map(told, short.done)] == [*map(told, whole.done)]
        assert peak(short) == peak(whole)
    assert ran


def told(done: Done) -> Done:
    """What a program does without the number of the transfer, which counts the executed ones."""
    return done if done.kind in ("turn", "turned") else done._replace(number=0)


def peak(trace: ProgramTrace) -> tuple[object, ...]:
    return trace.peak_bytes, trace.peak_line, trace.holders
