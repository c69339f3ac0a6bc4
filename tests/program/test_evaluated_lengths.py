"""Evaluations of six lengths through one stage are those of one process, and compile once.

On real gloo processes, in float64.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import partc
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.program.families import (
    LAYOUTS,
    ROWS,
    begun,
    close,
    compare_step,
    compiled,
    language,
    language_loss,
    tokens,
)

pytestmark = pytest.mark.gloo
LENGTHS = tuple(range(3, 9))  # six


def evaluate(stage: Stage) -> list[int]:
    """How many programs there are behind each round of results and losses of all lengths."""
    reference, counts = language(), []
    for number in range(2):
        stage.eval()
        for length in LENGTHS:
            ids, labels = tokens(ROWS, length, seed=10 * length + number)
            close(stage(ids), reference(ids), f"results of {length} words")
            expected = language_loss(reference, ids, labels)
            close(stage.eval_step(ids, labels), expected, f"loss of {length} words")
        assert all(p.grad is None for p in stage.parameters())
        counts.append(len(stage._own.programs))
        step(stage, reference)  # what is evaluated then are other weights
    return counts


def step(stage: Stage, reference: torch.nn.Module) -> None:
    """One step of SGD on both."""
    batch = tokens(ROWS, LENGTHS[0])
    stage.train()
    compare_step(stage, reference, stage.step(*batch), language_loss(reference, *batch))
    for each in (stage, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        (stage.step(*batch) if each is stage else language_loss(reference, *batch).backward())
        optimizer.step()
        each.zero_grad()


def loaded(folder: Path) -> list[int]:
    return evaluate(begun(partc.load(folder), language()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "fsdp"])
def test_all_lengths_are_evaluated(world: Processes, tmp_path: Path, layout: str) -> None:
    """Loaded programs cannot compile."""
    batches = [tokens(ROWS, length) for length in LENGTHS]
    program = compiled(layout, batches[0]).for_shapes(*batches, modes=("eval",))
    program.for_shapes(*(batch[:1] for batch in batches), modes=("forward",)).save(tmp_path)
    for counts in world.run(loaded, tmp_path, num=2):
        assert counts == [1 + 2 * len(LENGTHS)] * 2


def on_demand() -> list[int]:
    model = language()
    stage = begun(compiled("fsdp", tokens(ROWS, LENGTHS[0]), model), model)
    return [len(stage._own.programs), *evaluate(stage)]


@pytest.mark.exhaustive
def test_lengths_that_come_again_compile_nothing(world: Processes) -> None:
    for counts in world.run(on_demand, num=2):
        assert counts == [1, 1 + 2 * len(LENGTHS), 1 + 2 * len(LENGTHS)]
