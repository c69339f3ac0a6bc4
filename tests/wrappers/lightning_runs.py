"""A Lightning script: trained in one process, or by ``Strategy`` on the ranks of a test's world.

Imported by ranks alone: Lightning takes seconds to import.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from partc.wrappers.lightning import Strategy

ROWS, HELD_OUT, PER_STEP = 22, 10, 4  # the last batch of each has two rows
WIDTH, CLASSES = 8, 4


class Rows(Dataset[dict[str, Tensor]]):
    """``x`` f32[8] and ``y`` i64[] by row."""

    def __init__(self, num: int) -> None:
        draw = torch.Generator().manual_seed(num)
        self.x = torch.randn(num, WIDTH, generator=draw)
        self.y = torch.randint(CLASSES, (num,), generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self.x[row], "y": self.y[row]}


class InPieces(DistributedSampler[Any]):
    """The rows of each step in the order of one process, a piece of the step for each rank."""

    def __iter__(self) -> Iterator[int]:
        for first in range(0, len(self.dataset), PER_STEP):  # type: ignore[arg-type]
            step = list(range(first, min(first + PER_STEP, len(self.dataset))))  # type: ignore[arg-type]
            size = len(step) // self.num_replicas
            yield from step[self.rank * size : (self.rank + 1) * size]


class Data(pl.LightningDataModule):  # type: ignore[misc]
    """Loaders of whole batches; with ``local`` of this rank's pieces."""

    def __init__(self, local: bool) -> None:
        super().__init__()
        self.local = local

    def loader(self, num: int) -> DataLoader[Any]:
        rows = Rows(num)
        if not self.local:
            return DataLoader(rows, batch_size=PER_STEP)
        of = self.trainer.strategy.distributed_sampler_kwargs
        sampler = InPieces(rows, shuffle=False, **of)
        return DataLoader(rows, batch_size=PER_STEP // of["num_replicas"], sampler=sampler)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(ROWS)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(HELD_OUT)

    test_dataloader = predict_dataloader = val_dataloader


class Classifier(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, width: int = 16, in_parts: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, CLASSES)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")
        self.rows = torchmetrics.SumMetric()
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        scores = self(batch["x"])
        loss = F.cross_entropy(scores, batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(scores))
        self.log("seen", self.accuracy(scores, batch["y"]), on_epoch=True, batch_size=1)
        return {"loss": loss, "scores": scores}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        x, in_parts = batch["x"], self.hparams["in_parts"]
        scores = self.head(self.body(x)) if in_parts else self(x)
        self.accuracy(scores, batch["y"])
        self.rows.update(float(len(scores)))
        size = len(scores)
        self.log("held_out", F.cross_entropy(scores, batch["y"]), batch_size=size)
        self.log_dict({"accuracy": self.accuracy, "rows": self.rows}, batch_size=size)

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self(batch["x"])

    def configure_optimizers(self) -> Any:
        groups: Any = [
            {"params": self.body.parameters()},
            {"params": self.head.parameters(), "lr": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.03)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Notes(pl.Callback):  # type: ignore[misc]
    """Every step's loss, and the metrics of every epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def run(
    folder: Path, mesh: str = "", *, in_parts: bool = False, resumes: bool = True, **options: Any
) -> dict[str, Any]:
    """Train two epochs, test and predict; ``resumes``: then go on from the end of the first."""
    local = options.get("batch") == "local"
    with _quietly():
        keep = ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1)
        trainer, notes = _trainer(mesh, options, keep)
        module = _module(0, in_parts)
        trainer.fit(module, Data(local))
        tested = trainer.test(module, Data(local), verbose=False)[0]
        predicted = trainer.predict(module, Data(local))
    found = {
        "losses": notes.losses, "metrics": notes.metrics, "weights": _weights(module),
        "tested": tested, "predicted": torch.cat(predicted),
    }  # fmt: skip
    if resumes:
        found |= resumed(min(folder.glob("epoch=0-*.ckpt")), mesh, **options)
    return found


def resumed(checkpoint: Path, mesh: str = "", **options: Any) -> dict[str, Any]:
    """What a run that goes on from a checkpoint gives, and what the checkpoint has."""
    with _quietly():
        trainer, notes = _trainer(mesh, options)
        module = _module(1)
        trainer.fit(module, Data(options.get("batch") == "local"), ckpt_path=checkpoint)
    saved = Classifier.load_from_checkpoint(checkpoint, weights_only=True)
    return {
        "resumed losses": notes.losses, "resumed weights": _weights(module),
        "saved weights": _weights(saved),
    }  # fmt: skip


def _trainer(mesh: str, options: Any, *callbacks: Any) -> tuple[pl.Trainer, Notes]:
    notes = Notes()
    trainer = pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size() if mesh else 1,
        strategy=Strategy(mesh, **options) if mesh else "auto",
        max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, logger=False,
        callbacks=[notes, *callbacks], enable_checkpointing=bool(callbacks),
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    return trainer, notes


def _module(seed: int, in_parts: bool = False) -> Classifier:
    torch.manual_seed(seed)
    return Classifier(in_parts=in_parts)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def _quietly() -> Any:
    """Without Lightning's advice; it learns from the environment that ranks are there already."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("partc").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rank = {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0"}
    return patch.dict(os.environ, rank if dist.get_world_size() > 1 else {})


# frozen at first -----------------------------------------------------------------------------
class Unfreezes(BaseFinetuning):  # type: ignore[misc]
    """Trains the body from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.body)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.body, optimizer, lr=0.05)


class FreezesLater(Unfreezes):
    """As a program needs it: frozen behind the compile."""

    def freeze_before_training(self, module: Any) -> None:
        """Too early."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.freeze(module.body)


class HeadFirst(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=0.03)


def unfrozen(mesh: str, later: bool) -> dict[str, Any]:
    """The weights of a run that trains a part from its second epoch on; what it says."""
    torch.manual_seed(0)
    module, said = HeadFirst(), ""
    trainer, notes = _trainer(mesh, {"plan": "fsdp", "batch": "global"})
    trainer.callbacks.append((FreezesLater if later else Unfreezes)())
    with _quietly(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, Data(False))
        except Exception as error:
            said = str(error)
    told = [str(each.message) for each in warned if "partc" in str(each.message)]
    return {"losses": notes.losses, "weights": _weights(module), "said": said, "warned": told}


# what is refused -----------------------------------------------------------------------------
class ReadsStep(Classifier):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (1 + self.global_step)


class LogsNumber(Classifier):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.log("rate", 0.1)
        return super().training_step(batch, batch_idx)


class LogsItem(Classifier):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log(f"loss {type(batch_idx)}", loss.item())
        return loss


class KeepsLoss(Classifier):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.last = super().training_step(batch, batch_idx)["loss"].detach()
        return super().training_step(batch, batch_idx)


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ChangesMode(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.body.eval()


def refused() -> dict[str, str]:
    """What fitting each of these says, by the name of its class."""
    found = {}
    for kind in (ReadsStep, LogsNumber, LogsItem, KeepsLoss, Manual, ChangesMode):
        with _quietly():
            trainer, _ = _trainer("dp=1", {"plan": "ddp"})
            trainer.gradient_clip_val, trainer.accumulate_grad_batches = None, 1
            try:
                trainer.fit(kind(), Data(True))
            except Exception as error:
                found[kind.__name__] = f"{type(error).__name__}: {error}"
    return found | {each: _of_precision(each) for each in ("64-true", "bf16-true", "32-true")}


def _of_precision(precision: Any) -> str:
    """What fitting a module in double precision says; "" where it is done."""
    with _quietly():
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=Strategy("dp=1", plan="ddp"), max_steps=1,
            precision=precision, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        try:
            trainer.fit(Classifier().double(), _doubles())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _doubles() -> DataLoader[Any]:
    rows = Rows(ROWS)
    rows.x = rows.x.double()
    return DataLoader(rows, batch_size=PER_STEP)


class Noted(pl.LightningModule):  # type: ignore[misc]
    """Keeps the rows that it is trained on, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), list[int]()

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def on_train_batch_end(self, outputs: object, batch: Tensor, batch_idx: int) -> None:
        self.seen += [int(row) for row in batch[:, 0]]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows_read(mesh: str | None) -> list[int]:
    """The order of twelve rows that a loader shuffles by a generator of its own."""
    draws, module = torch.Generator().manual_seed(0), Noted()
    rows: Any = torch.arange(12.0)[:, None]
    loader: DataLoader[Any] = DataLoader(rows, batch_size=4, shuffle=True, generator=draws)
    strategy = {} if mesh is None else {"strategy": Strategy(mesh, plan="ddp", batch="global")}
    pl.Trainer(
        max_epochs=1, devices=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **strategy,
    ).fit(module, loader)  # fmt: skip
    return module.seen
