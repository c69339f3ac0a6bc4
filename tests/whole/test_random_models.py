"""Drawn models in drawn layouts, and those of which one once was wrong, compute the same."""

from __future__ import annotations

import pytest

from tests.whole.random_models import Drawn, with_penalties

ONCE_WRONG = {
    "a sum that is gathered on another axis": Drawn(
        ("unit_rows", "triangle"), "dp=2,tp=2", "ddp+megatron-sp"
    ),
    "ones that a stage without weights makes": Drawn(
        ("product", "image", "mlp"), "pp=2,dp=2", "fsdp", with_penalties, 3, "zb-v"
    ),
    "what the backward makes of weights alone": Drawn(
        ("unit_rows", "running_most", "unit_rows", "running_most"), "pp=2,dp=3", "zero2",
        microbatches=2, schedule="interleaved-1f1b",
    ),
    "a penalty of what two stages of a rank hold": Drawn(
        ("batched", "half_as_long", "batched", "half_as_long"), "pp=2,dp=2", "ddp",
        with_penalties, 2, "zb-v", tied=True,
    ),
    "equal blocks of a pipeline of one microbatch": Drawn(("mlp",) * 4, "pp=2", "ddp"),
    "a V that the search was told to take": Drawn(
        ("mlp", "attention", "mlp"), "pp=2,dp=2", "auto", microbatches=3, schedule="v-half"
    ),
    "samples for microbatches that another axis would cut": Drawn(
        ("rolled", "windows"), "dp=2,tp=2", "ddp+megatron-sp", microbatches=2
    ),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ONCE_WRONG)
def test_what_once_was_wrong(name: str) -> None:
    ONCE_WRONG[name].check()


@pytest.mark.rows(1)
@pytest.mark.parametrize("seed", range(4))
def test_drawn_models(seed: int) -> None:
    Drawn.of(seed).check()
