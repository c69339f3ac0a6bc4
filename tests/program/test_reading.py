"""Loaders of stages: what the ranks of real processes read, train on, save and resume."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import partc
from partc.errors import LoadError, PartcError, RunError, UsageError
from partc.verification.processes import Processes
from tests.data.readers import BATCH, Counted, loss_of, model_of, program_of

pytestmark = pytest.mark.gloo
NUM_ROWS = 70
MESHES = {"dp=2,tp=2": "fsdp+megatron", "dp=4": "fsdp", "tp=4": "megatron", "pp=2,dp=2": "ddp"}


def save(folder: Path, mesh: str) -> Path:
    """The saved program of a mesh."""
    path = folder / mesh
    program_of(mesh, MESHES[mesh], 2 if "pp" in mesh else 1).save(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs")
    for mesh in MESHES:
        save(path, mesh)
    return path


# reads ---------------------------------------------------------------------------------------
def count_reads(path: Path) -> tuple[list[int], list[list[int]]]:
    """How often this rank read each row of its dataset in an epoch, and its rows by step."""
    stage, dataset = partc.load(path).module(), Counted(NUM_ROWS)
    loader = stage.loader(dataset, seed=3, batch="local")
    steps = [batch[0].tolist() for batch in loader]
    return dataset.reads.tolist(), steps


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "data_world"), [("dp=2,tp=2", 2), ("dp=4", 4), ("pp=2,dp=2", 2)])
def test_each_data_rank_reads_its_rows_once(
    mesh: str, data_world: int, folder: Path, world: Processes
) -> None:
    program = partc.load(folder / mesh)
    found = world.run(count_reads, folder / mesh)
    by_piece: dict[int, list[Any]] = {}
    for rank, each in enumerate(found):
        by_piece.setdefault(program.data_rank(rank), []).append(each)
    assert len(by_piece) == program.data_world == data_world
    assert all(each == same[0] for same in by_piece.values() for each in same)
    reads = torch.tensor([same[0][0] for same in by_piece.values()])
    num_steps = NUM_ROWS // BATCH
    assert reads.sum(1).tolist() == [num_steps * BATCH // data_world] * data_world
    assert reads.sum(0).max() == 1
    assert reads.sum() == num_steps * BATCH
    assert {len(steps) for same in by_piece.values() for _, steps in same} == {num_steps}


# training ------------------------------------------------------------------------------------
def rows_of() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_ROWS, 6, generator=generator)
    y = torch.randn(NUM_ROWS, 4, generator=generator)
    return TensorDataset(x, y)


def begin(path: Path, seed: int) -> tuple[Any, Any, Any]:
    """A stage, its optimizer, and a loader of the batch that its step takes."""
    stage = partc.load(path).module()
    stage.load_full(model_of())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    return stage, optimizer, stage.loader(rows_of(), seed=seed, last="next")


def train(stage: Any, optimizer: Any, loader: Any, num_steps: int) -> list[float]:
    losses: list[float] = []
    while len(losses) < num_steps:
        for batch in loader:
            optimizer.zero_grad()
            losses.append(stage.step(*batch).item())
            optimizer.step()
            if len(losses) == num_steps:
                break
    return losses


def train_and_save(path: Path, folder: Path, num_steps: int) -> list[float]:
    stage, optimizer, loader = begin(path, seed=3)
    losses = train(stage, optimizer, loader, num_steps)
    partc.save_checkpoint(folder, stage, optimizer, step=num_steps, loader=loader)
    return losses


def resume(path: Path, folder: Path, num_steps: int) -> list[float]:
    stage, optimizer, loader = begin(path, seed=0)
    partc.load_checkpoint(folder, stage, optimizer, loader=loader)
    return train(stage, optimizer, loader, num_steps)


def train_alone(num_steps: int) -> list[float]:
    """The same in one process, over rows in the order that the sampler of one rank gives."""
    model, data = model_of(), rows_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = program_of("dp=1").sampler(data, 0, seed=3, last="next")
    losses: list[float] = []
    while len(losses) < num_steps:
        for rows in islice(sampler, num_steps - len(losses)):
            optimizer.zero_grad()
            loss = loss_of(model, *data[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.exhaustive
def test_a_training_resumes_in_its_data_on_another_mesh(
    folder: Path, world: Processes, tmp_path: Path
) -> None:
    expected = train_alone(11)
    for stop in (2, 4, 6):  # 4 is the end of the first epoch
        saved = tmp_path / str(stop)
        first = world.run(train_and_save, folder / "dp=2,tp=2", saved, stop)
        for mesh in ("dp=4", "tp=4"):
            rest = world.run(resume, folder / mesh, saved, 11 - stop)
            for losses in (a + b for a, b in zip(first, rest, strict=True)):
                assert losses == pytest.approx(expected, rel=1e-5)


def resume_other_data(path: Path, folder: Path) -> str:
    stage, optimizer, _ = begin(path, seed=0)
    loader = stage.loader(TensorDataset(*rows_of()[:60]), shuffle=False)
    with pytest.raises(LoadError) as refused:
        partc.load_checkpoint(folder, stage, optimizer, loader=loader)
    partc.load_checkpoint(folder, stage, optimizer)  # without the position, as the error says
    loader.set_epoch(1)
    assert list(loader)
    partc.save_checkpoint(folder, stage, step=9)
    with pytest.raises(LoadError) as empty:
        partc.load_checkpoint(folder, stage, loader=loader)
    return f"{refused.value} {empty.value}"


@pytest.mark.exhaustive
def test_a_checkpoint_of_other_data_is_refused(
    folder: Path, world: Processes, tmp_path: Path
) -> None:
    world.run(train_and_save, folder / "dp=4", tmp_path, 1)
    for text in world.run(resume_other_data, folder / "dp=4", tmp_path):
        assert "num_rows=70, here it is 60" in text
        assert "saved without a loader" in text


def ask_for_different_rows(path: Path) -> list[str]:
    stage, rank = partc.load(path).module(), dist.get_rank()
    return [
        message(lambda: stage.loader(Counted(NUM_ROWS), seed=rank // 2)),  # a habit under DDP
        message(lambda: stage.loader(Counted(NUM_ROWS - rank % 2 * 60))),
        message(lambda: stage.loader(Counted(NUM_ROWS))),
    ]


def test_ranks_that_ask_for_different_rows_are_refused(folder: Path, world: Processes) -> None:
    for seed, rows, right in world.run(ask_for_different_rows, folder / "dp=2,tp=2"):
        assert "RunError loader(seed=...): it is 0 on rank 0 and 1 on rank 2" in seed
        assert "RunError loader(rows=...): it is 70 on rank 0 and 10 on rank 1" in rows
        assert right == ""


# a script's own loader -----------------------------------------------------------------------
def read_by_distributed_sampler(path: Path) -> list[list[float]]:
    """The loader of a script for DDP, given the data rank for the rank."""
    program = partc.load(path)
    stage, rank = program.module(), dist.get_rank()
    data = TensorDataset(torch.arange(64.0))
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=program.data_world, rank=program.data_rank(rank)
    )
    loader = DataLoader(data, batch_size=BATCH // program.data_world, sampler=sampler)
    assert stage.mesh == program.mesh
    return [batch[0].tolist() for batch in loader]


def test_a_distributed_sampler_takes_the_data_rank(folder: Path, world: Processes) -> None:
    found = world.run(read_by_distributed_sampler, folder / "dp=2,tp=2")
    assert found[0] == found[1] != found[2] == found[3]
    for step in zip(found[0], found[2], strict=True):
        assert len({row for piece in step for row in piece}) == BATCH
    assert sorted(row for rank in (0, 2) for step in found[rank] for row in step) == [*range(64)]


# iterable datasets ---------------------------------------------------------------------------
class Stream(IterableDataset[Any]):
    def __init__(self, piece: int = 0, pieces: int = 1, num_rows: int = NUM_ROWS) -> None:
        self.piece, self.pieces, self.num_rows = piece, pieces, num_rows

    def __iter__(self) -> Any:
        return iter(range(self.piece, self.num_rows, self.pieces))


def read_streams(path: Path) -> tuple[Any, ...]:
    """Rows of a shared stream; of own streams of different lengths; what is refused."""
    program = partc.load(path)
    stage, piece = program.module(), program.data_rank(dist.get_rank())
    shared = [b.tolist() for b in stage.loader(Stream(), batch="local")]
    mine = Stream(piece, program.data_world, NUM_ROWS - 30 * piece)
    own = [b.tolist() for b in stage.loader(mine, batch="local", split="own")]
    word: Any = "mine"
    refused = [
        message(lambda: list(stage.loader(mine, batch="local"))),
        message(lambda: stage.loader(mine, split="own")),
        message(lambda: stage.loader(mine, split=word)),
        message(lambda: program.sampler(mine)),
    ]
    return shared, own, refused


def message(run: Any) -> str:
    try:
        run()
    except PartcError as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_iterable_datasets_of_a_stage(folder: Path, world: Processes) -> None:
    found = world.run(read_streams, folder / "dp=2,tp=2")
    shared, own = ([each[i] for each in found] for i in (0, 1))
    assert shared[0] == shared[1] != shared[2] == shared[3]
    assert sorted(row for rank in (0, 2) for step in shared[rank] for row in step) == [*range(64)]
    assert [len(steps) for steps in own] == [2] * 4  # the second piece ends with 20 rows
    assert own[0] == own[1] == [[*range(0, 16, 2)], [*range(16, 32, 2)]]
    assert own[2] == own[3] == [[*range(1, 17, 2)], [*range(17, 33, 2)]]
    for _, _, (other, whole, word, numbers) in found:
        assert other.startswith(RunError.__name__)
        assert "its first row on rank 0 is another one than on rank 2, 3" in other
        assert 'split="own"' in other
        assert whole.startswith(UsageError.__name__)
        assert "one of 2 pieces, the step takes the whole batch" in whole
        assert "rows, own" in word
        assert "it has no rows by number" in numbers
