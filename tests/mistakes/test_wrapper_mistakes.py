"""Mistakes in what Accelerator, Trainer and Strategy are told, refused before anything is made."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.mistakes.things import Mistake, check


def accelerator(**named: Any) -> Any:
    pytest.importorskip("accelerate")
    from partc.wrappers.accelerate import Accelerator

    return Accelerator(**named)


def trainer(**named: Any) -> Any:
    pytest.importorskip("accelerate")
    from partc.wrappers.trainer import Trainer

    return Trainer(**named)


def strategy(*args: Any, **named: Any) -> Any:
    pytest.importorskip("lightning")
    from partc.wrappers.lightning import Strategy

    return Strategy(*args, **named)


MISTAKES: dict[str, Mistake] = {
    "no mesh": (lambda: accelerator(plan="ddp"), ("'mesh'", 'mesh="dp=4"')),
    "no mesh for a Trainer": (lambda: trainer(model=None), ("Trainer()", "'mesh'")),
    "no mesh for a Strategy": (lambda: strategy(plan="ddp"), ("Strategy()", "'mesh'")),
    "a list of options": (lambda: accelerator(mesh="dp=1", options=["x"]), ("options", "a dict")),
    "an option": (
        lambda: trainer(mesh="dp=1", options={"microbatchs": 2}),
        ("'microbatchs'", "Did you mean 'microbatches'"),
    ),
    "an option of a Strategy": (
        lambda: strategy("dp=1", microbatch=2), ("'microbatch'", "Did you mean 'microbatches'"),
    ),
    "a name of results": (
        lambda: accelerator(mesh="dp=1", outputs="logits"), ("'logits'", "['logits']"),
    ),
    "FSDP too": (
        lambda: accelerator(mesh="dp=1", fsdp_plugin=True), ("fsdp_plugin", 'plan="fsdp"'),
    ),
    "a preset": (lambda: strategy("dp=1", "dpp"), ("'dpp'", "Did you mean 'ddp'")),
    "accelerate's own": (
        lambda: accelerator(mesh="dp=1", plan="ddp", mixed_precision="bf61"), ("bf61", "bf16"),
    ),
    "ranks that were not started": (
        lambda: accelerator(mesh="dp=2", plan="ddp"), ("1 processes", "torchrun"),
    ),
    "a folder of states": (
        lambda: accelerator(mesh="dp=1", plan="ddp").load_state("none"), ("none", "save_state"),
    ),
    "a class": (
        lambda: accelerator(mesh="dp=1", plan="ddp").prepare(nn.Linear), ("the class Linear",),
    ),
    "a batch size": (lambda: strategy("dp=1", batch=8), ("batch = 8", "'global'")),
    "a number of ranks": (lambda: strategy(2), ("2 does not describe", "'dp=2'")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake: str) -> None:
    check(MISTAKES[mistake])
