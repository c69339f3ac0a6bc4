"""A dry run that leaves microbatches out finds what one of all of them finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.codegen.files.rank_links import RankLinks
from partc.codegen.text import Line
from partc.dryrun import turns as dry_turns
from partc.dryrun.run import Known, dry_run
from partc.dryrun.turns import Key, Turns
from partc.errors import CheckError
from partc.plan import Plan
from tests.dry_runs import dry_run_all
from tests.pipelines import toy


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("schedule", "mesh", "preset", "chunks"),
    [
        ("1f1b", "pp=4", "ddp", 1),
        ("gpipe", "pp=2,dp=2", "fsdp", 1),
        ("interleaved-1f1b", "pp=2,tp=2", "megatron-sp", 2),
        ("zb-v", "pp=2", "ddp", 2),
        ("zb-h1", "pp=4,dp=2", "zero1", 1),
        ("dualpipe-v", "pp=2", "ddp", 2),
        ("1f1b", "dp=2,tp=2", "fsdp+megatron-sp", 1),
    ],
)
def test_the_same_peak_line_and_holders(
    schedule: str, mesh: str, preset: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = partc.compile(
        toy(4).step, mesh, plan=Plan(preset=preset, virtual_stages=chunks), schedule=schedule,
        microbatches=12,
    )  # fmt: skip
    executed = count_calls(monkeypatch)
    known: Known = {}
    for number in range(program.mesh.pipeline_ranks):
        rank = program.mesh.first_rank(number)
        role = program.role(rank)
        executed.clear()
        found = dry_run(role, rank, known)
        assert len(executed) < 12 * chunks  # of as many forwards, and backwards
        assert found == dry_run_all(role, rank)


def test_ranks_know_what_the_stages_of_other_files_do(monkeypatch: pytest.MonkeyPatch) -> None:
    program = partc.compile(
        toy(8).step, "pp=4", plan=Plan(preset="ddp", virtual_stages=2), schedule="interleaved-1f1b",
        microbatches=8,
    )  # fmt: skip
    executed, known, counts = count_calls(monkeypatch), Known(), list[int]()
    for number in range(4):
        executed.clear()
        role = program.role(program.mesh.first_rank(number))
        assert dry_run(role, known=known, rank=number) == dry_run_all(role, number)
        counts.append(len(executed))
    assert program.role_of(1) != program.role_of(2)  # each with stages of its own layers
    assert counts[1] > counts[2] == 0


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What stages' methods are executed from here on."""
    executed: list[str] = []
    real: Callable[..., Any] = Turns._execute

    def counted(self: Turns, key: Key, *rest: Any) -> Any:
        executed.append(key[1])
        return real(self, key, *rest)

    monkeypatch.setattr(dry_turns.Turns, "_execute", counted)
    return executed


@pytest.mark.exhaustive
def test_a_long_schedule_is_run_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends that nobody waits for are found however many microbatches there are."""
    each = RankLinks.each

    def without_outboxes(links: RankLinks, kind: str, call: str) -> Iterator[Line]:
        return iter(()) if kind == "Outbox" else each(links, kind, call)

    monkeypatch.setattr(RankLinks, "each", without_outboxes)
    model, num = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2100  # 4,200 actions of a rank
    with pytest.raises(CheckError, match=r"nobody waits for send"):
        partc.compile(
            model, "pp=2", (torch.zeros(num, 2),), loss=lambda m, x: m(x).sum(), plan="ddp",
            microbatches=num,
        )  # fmt: skip
