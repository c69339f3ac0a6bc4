"""A script of accelerate in one process, and the same over ranks: on real gloo processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from partc.errors import RunError, UsageError
from partc.plan.mesh import Mesh
from partc.verification.processes import Processes
from tests.wrappers.single import as_torchrun

ROWS, BATCH = 21, 8  # the last step of an epoch has 5 rows


class Classifier(nn.Module):
    """Returns its loss and logits in a dict, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mid, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(F.gelu(self.mid(self.table(ids).mean(1))))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows() -> Any:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(16, (ROWS, 5), generator=generator)
    labels = torch.randint(4, (ROWS,), generator=generator)
    return [{"ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def accelerator_of(mesh: str, plan: str, **named: Any) -> Any:
    import accelerate

    from partc.wrappers.accelerate import Accelerator

    if not mesh:
        return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    own = {"mesh": mesh, "plan": plan, **named}
    return Accelerator(**own, cpu=True, gradient_accumulation_steps=2)


def train(
    mesh: str, plan: str, folder: Path, begin: int = 0
) -> tuple[list[Any], dict[str, Tensor]]:
    """What a script sees in two epochs, and the weights; it goes on where ``begin`` says."""
    with as_torchrun():
        torch.manual_seed(1)
        model = Classifier().double()
        accelerator = accelerator_of(mesh, plan, outputs=["logits"])
        size = BATCH // accelerator.num_processes
        order = torch.Generator().manual_seed(3)
        shuffled: Any = DataLoader(rows(), size, shuffle=True, generator=order)
        in_order: Any = DataLoader(rows(), size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = accelerator.num_processes * 4
        linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
        model, optimizer, loader, held_out, scheduler = accelerator.prepare(
            model, optimizer, shuffled, in_order, linear
        )
        seen: list[Any] = []
        if begin:
            accelerator.load_state(str(folder))
            assert list(loader)  # the order of the first epoch
        for epoch in range(begin, 2):
            if epoch == 1 and not begin and mesh:
                accelerator.save_state(str(folder))
            model.train()
            for batch in loader:
                with accelerator.accumulate(model):
                    outputs = model(**batch)
                    accelerator.backward(outputs["loss"])
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                        seen.append(float(norm))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                found = accelerator.gather_for_metrics(outputs["logits"].argmax(-1))
                seen += [float(outputs["loss"].detach()), *found.tolist()]
            seen.append(scheduler.get_last_lr()[0])
            model.eval()
            for batch in held_out:
                with torch.no_grad():
                    outputs = model(**batch)
                pair = (outputs["logits"].argmax(-1), batch["labels"])
                guessed, labels = accelerator.gather_for_metrics(pair)
                seen += [float(outputs["loss"]), *guessed.tolist(), *labels.tolist()]
            words = accelerator.gather_for_metrics([f"row {label}" for label in batch["labels"]])
            seen.append(len(words))
        weights = accelerator.get_state_dict(model)
        return seen, {name: tensor.detach().clone() for name, tensor in weights.items()}


@pytest.mark.rows(1)
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "plan"), [("dp=2", "fsdp"), ("tp=2", "megatron"), ("pp=2", "ddp")]
)
def test_a_script_trains_evaluates_and_resumes_as_in_one_process(
    world: Processes, tmp_path: Path, mesh: str, plan: str
) -> None:
    (alone,) = world.run(train, "", "", tmp_path, num=1)
    found = world.run(train, mesh, plan, tmp_path, num=2)
    resumed = world.run(train, mesh, plan, tmp_path, 1, num=2)
    for (seen, weights), (later, same) in zip(found, resumed, strict=True):
        assert seen == pytest.approx(alone[0], rel=1e-9)
        assert later == seen[-len(later) :]
        assert list(weights) == list(alone[1])
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, alone[1][name], rtol=1e-9, atol=1e-12)
            assert torch.equal(same[name], tensor), name


class Tied(nn.Module):
    """A weight of two names, of which the later one is the first in the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.head(self.words(ids)).flatten(0, 1), ids.flatten())}


def save_tied(mesh: str, plan: str, folder: Path) -> None:
    """Saved and loaded before the first step and behind it, as files of both kinds."""
    with as_torchrun():
        accelerator, raw = accelerator_of(mesh, plan), Tied().double()
        model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters()))
        model.train()
        ids = torch.arange(12).view(4, 3)
        losses = []
        for turn, safe in enumerate((True, False, True)):
            accelerator.save_state(str(folder / f"{turn}"), safe_serialization=safe)
            for _ in range(2):
                loss = model(ids=ids)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if len(losses) % 2:
                    accelerator.load_state(str(folder / f"{turn}"))
        assert losses[0] == losses[1]
        assert losses[2] == losses[3] != losses[1]
        assert losses[4] == losses[5] != losses[3]
        alone, whole = Tied().double(), accelerator.get_state_dict(model)
        accelerator.save_model(model, str(folder / "model"))
        accelerator.wait_for_everyone()
        missing, unexpected = load_model(alone, folder / "model" / "model.safetensors")
        assert not missing
        assert not unexpected
        assert torch.equal(alone.head.weight, whole["head.weight"])


@pytest.mark.rows(1)
@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "plan"), [("dp=2", "fsdp"), ("pp=2", "ddp")])
def test_states_of_a_tied_model_are_saved_and_loaded(
    world: Processes, tmp_path: Path, mesh: str, plan: str
) -> None:
    world.run(save_tied, mesh, plan, tmp_path, num=2)


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)["logits"], labels)


def refused() -> None:
    with as_torchrun(), pytest.raises(UsageError, match=r"torch\.compile would compile"):
        accelerator_of("dp=1", "ddp", dynamo_backend="inductor")
    with as_torchrun():
        batch = {name: torch.stack([row[name] for row in rows()[:4]]) for name in ("ids", "labels")}
        accelerator = accelerator_of("dp=1", "ddp", outputs=["logits"])
        raw = Classifier()
        model = accelerator.prepare(raw)
        with pytest.raises(RunError, match=r"Call model\.train\(\) before"):
            accelerator.backward(model.eval()(**batch)["loss"])
        outputs = model.train()(**batch)
        with pytest.raises(RunError, match="to train on it, give loss=fn"):
            accelerator.backward(outputs.loss + outputs["logits"].sum())
        accelerator.backward(model(**batch).loss)
        assert raw.head.weight.is_meta  # it would have weights that are trained no more
        assert all(p.grad is not None for p in model.parameters())
        raw.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(RunError, match=r"outputs\['hidden'\]"):
            assert outputs.hidden
        with pytest.raises(UsageError, match="have no numbers"):
            accelerator.prepare(DataLoader(Stream()))
        own = accelerator_of("dp=1", "ddp", loss=loss_of).prepare(Classifier())
        loss = own.train()(**batch)
        assert loss.requires_grad
        assert own.eval()(batch["ids"])["logits"].shape == (4, 4)


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(2)


@pytest.mark.gloo
def test_what_a_script_cannot_have_is_refused(world: Processes) -> None:
    world.run(refused, num=1)


def test_an_open_mesh_is_refused() -> None:
    from partc.wrappers.dealing import DataRanks

    with pytest.raises(UsageError, match="its axes are open"):
        DataRanks.of(Mesh.load("dgx-h100", 8))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("num", [1, 8, 11, 12, 24])
def test_no_row_is_read_twice_or_left_out(num: int, split: bool) -> None:
    from torch.utils.data import BatchSampler, SequentialSampler

    from partc.wrappers.dealing import DealtRows

    size, world = 4, 2
    batches = BatchSampler(SequentialSampler(range(num)), size, drop_last=False)
    ranks = [DealtRows(batches, world, piece, split) for piece in range(world)]
    per_step = size if split else size * world
    expected = [[*range(i, min(i + per_step, num))] for i in range(0, num, per_step)]
    steps = zip(*ranks, strict=True)
    assert [[row for piece in pieces for row in piece] for pieces in steps] == expected
    assert {len(rank) for rank in ranks} == {len(expected)}
