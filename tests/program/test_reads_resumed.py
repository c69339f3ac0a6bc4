"""Which rows eight real ranks, four data ranks of two, read: counted at the dataset, over resumes.

Every rank counts in memory that its workers share, so that reads of workers count too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from partc.data.order import Last
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.data.readers import BATCH, Counted, program_of, sampler_of
from tests.patience import patience

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]
NUM_ROWS, NUM_STEPS = 56, 8  # in an epoch three steps of 16 rows, and 8 rows that fill none
STOPS = (1, 3, 4, 5, 7)  # within both epochs, before the step that is not full, and between epochs
MESHES = {"dp=4,tp=2": "fsdp+megatron", "dp=2,tp=4": "fsdp+megatron", "dp=8": "fsdp"}
Reads = list[list[int]]  # for each epoch, how often each row was read
Steps = list[list[list[int]]]  # for each epoch, the rows of each step


@pytest.fixture(scope="module")
def eight() -> Iterator[Processes]:
    with Processes(8, timeout=patience()) as processes:
        yield processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs")
    for mesh, plan in MESHES.items():
        program_of(mesh, plan).save(path / mesh)
    return path


def loader_of(path: Path, dataset: Counted, last: Last, workers: int) -> Any:
    return loader_over(partc.load(path).module(), dataset, last, workers)


def loader_over(stage: Stage, dataset: Counted, last: Last, workers: int) -> Any:
    return stage.loader(dataset, seed=3, batch="local", last=last, num_workers=workers)


def rows_of(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


# epochs ------------------------------------------------------------------------------------------
def read_epochs(path: Path, last: Last, workers: int) -> tuple[Reads, Steps]:
    """What this rank reads in two epochs."""
    dataset = Counted(NUM_ROWS)
    loader = loader_of(path, dataset, last, workers)
    reads, steps = [], []
    for epoch in range(2):
        loader.set_epoch(epoch)
        steps.append(rows_of(loader))
        reads.append(dataset.reads.tolist())
        dataset.reads.zero_()
    return reads, steps


@pytest.mark.rows(2)
@pytest.mark.parametrize(("last", "workers"), [("drop", 0), ("partial", 0), ("partial", 1)])
def test_eight_ranks_read_each_row_once(
    eight: Processes, folder: Path, last: Last, workers: int
) -> None:
    found = eight.run(read_epochs, folder / "dp=4,tp=2", last, workers)
    assert found[::2] == found[1::2]  # both ranks of tp read the same, in the same steps
    num_steps, num_rows = (3, 3 * BATCH) if last == "drop" else (4, NUM_ROWS)
    for epoch in range(2):
        reads = torch.tensor([reads[epoch] for reads, _ in found[::2]])
        assert reads.sum(0).max() == 1
        assert reads.sum() == num_rows
        for rows, (_, steps) in zip(reads, found[::2], strict=True):  # it reads what it is given
            assert sorted(chain(*steps[epoch])) == rows.nonzero().flatten().tolist()
        assert [len(steps[epoch]) for _, steps in found] == [num_steps] * 8
    assert found[0][1][0] != found[0][1][1]  # in another order


# resumes -----------------------------------------------------------------------------------------
def steps_of(loader: Any, num_steps: int) -> list[list[int]]:
    """The rows of the next steps, over ends of epochs; the last iteration is left behind them."""
    found: list[list[int]] = []
    while len(found) < num_steps:
        found += rows_of(islice(loader, num_steps - len(found)))
    return found


def through_every_stop(first: Path, then: Path, workers: tuple[int, int]) -> list[Any]:
    """By stop: what was read before it, then behind it, and how often the latter read each row."""
    found = []
    one, other = (partc.load(path).module() for path in (first, then))
    for stop in STOPS:
        loader = loader_over(one, Counted(NUM_ROWS), "partial", workers[0])
        before, dataset = steps_of(loader, stop), Counted(NUM_ROWS)
        later = loader_over(other, dataset, "partial", workers[1])
        later.load_state_dict(loader.state_dict())
        behind = steps_of(later, NUM_STEPS - stop)
        found.append((before, behind, dataset.reads.tolist()))
    return found


def joined(pieces: list[list[list[int]]]) -> list[list[int]]:
    """The rows of each step, of the pieces of all data ranks."""
    return [sorted(chain(*step)) for step in zip(*pieces, strict=True)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "workers"), [("dp=2,tp=4", (1, 0)), ("dp=8", (0, 1)), ("dp=4,tp=2", (1, 2))]
)
def test_eight_ranks_resume_at_any_step(
    eight: Processes, folder: Path, mesh: str, workers: tuple[int, int]
) -> None:
    """Onto other data ranks, with another number of workers, which have read ahead by then."""
    alone = sampler_of(NUM_ROWS, 0, 1, last="partial", seed=3)
    expected = [sorted(step) for _ in range(2) for step in alone]
    assert len(expected) == NUM_STEPS
    found = eight.run(through_every_stop, folder / "dp=4,tp=2", folder / mesh, workers)
    now = partc.load(folder / mesh)
    firsts = [8 // now.data_world * piece for piece in range(now.data_world)]
    for rank in range(8):  # ranks of tp read alike
        twin = firsts[now.data_rank(rank)]
        assert [each[1:] for each in found[rank]] == [each[1:] for each in found[twin]]
    for stop, each in zip(STOPS, zip(*found, strict=True), strict=True):
        before = joined([each[rank][0] for rank in range(0, 8, 2)])
        behind = joined([each[rank][1] for rank in firsts])
        assert before + behind == expected, stop
        for _, steps, reads in each:  # no row was read that was not given, and none twice for it
            assert reads == [[*chain(*steps)].count(row) for row in range(NUM_ROWS)], stop
