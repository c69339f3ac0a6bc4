"""Keys of a plan that nothing could read, or that its preset contradicts, are refused by name."""

from __future__ import annotations

import pytest

from partc.plan import Plan
from partc.plan.compress import Compress
from tests.mistakes.things import Mistake, check, compiled

COMPRESS = 'preset = "ddp"\nallow = ["compress"]\n[compress]\nwire = "bf16"\n'
ISLANDS = 'preset = "ddp"\nallow = ["local_steps"]\n[local_steps]\nperiod = 4\n'

MISTAKES: dict[str, Mistake] = {
    "a stage of nothing": (
        lambda: compiled(mesh="pp=2", stages=["up"], microbatches=2),
        ("'up'", "stage 0 would have nothing", "Name a module that runs later: down"),
    ),
    "the usual block of another scheme": (
        lambda: Plan.parse(COMPRESS + "block = 256"), ("bf16 reads no block", "Leave block out"),
    ),
    "the usual step of means": (
        lambda: Plan.parse(ISLANDS + "outer_lr = 0.7"), ("reads no outer_lr", "Leave outer_lr out"),
    ),
    "sums per step of a preset that sums more often": (
        lambda: Plan.parse('preset = "fsdp+megatron"\nreduce = "step"'),
        ('reduce = "step" contradicts', '"fsdp"', "Leave reduce out"),
    ),
    "a transfer without its underscore": (
        lambda: Plan.parse("bucket_copy_mb = { dp = { allgather = 1 } }"),
        ("'allgather' is none", "Did you mean 'all_gather'?"),
    ),
    "a transfer before its axis": (
        lambda: Plan.parse("bucket_copy_mb = { all_gather = { dp = 1 } }"),
        ("Axes come first",),
    ),
    "a dim that some values of a pattern have not": (
        lambda: compiled(plan='preset = "ddp"\n[values]\n"u*" = { dp = 1 }'),
        ("'u*', which fits 'up",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_key_without_a_reader_is_refused(mistake: str) -> None:
    check(MISTAKES[mistake])


def test_a_table_made_in_python_has_its_defaults() -> None:
    """Compress("bf16") has a block too, which nobody wrote."""
    plan = Plan(preset="ddp", allow=("compress",), compress=Compress("bf16", least_mb=0))
    assert Plan.parse(compiled(plan=plan).plan).compress == plan.compress


def test_a_pipeline_without_microbatches_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    made = compiled(mesh="pp=2")
    assert "pp=2 has one microbatch" in caplog.text
    assert "Give it several, as microbatches=8" in caplog.text
    caplog.clear()
    compiled(mesh="pp=2", microbatches=1)  # which says that it is meant
    compiled(mesh="pp=2", microbatches=2)
    compiled(mesh="pp=2", plan=made.plan)
    assert "microbatch" not in caplog.text
