"""A transformers Trainer in one process, and the same over ranks: on real gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partc.errors import UsageError
from partc.verification.processes import Processes
from tests.wrappers.single import as_torchrun

BATCH = 4  # 13 rows are 3 steps of 4 and one of 1, which one of two data ranks has
Seen = list[dict[str, float]]
SHOWN = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "eval_rows", "total_flos")


def model_of() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    plain: dict[str, Any] = {f"{each}_pdrop": 0.0 for each in ("resid", "embd", "attn")}
    plain |= {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, **plain)
    return GPT2LMHeadModel(config).double()


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(13):
        ids = torch.randint(16, (6,), generator=generator)
        labels = ids.clone()
        labels[: number % 4] = -100  # other numbers of items in every batch
        found.append({"input_ids": ids, "labels": labels})
    return found


def metrics(told: Any) -> dict[str, float]:
    right = told.predictions.argmax(-1) == told.label_ids
    return {"right": float(right.mean()), "rows": float(len(right))}


def trainer_of(mesh: str, plan: str, folder: Path, own_loss: bool, **arguments: Any) -> Any:
    import transformers

    from partc.wrappers.trainer import Trainer

    base = Trainer if mesh else transformers.Trainer

    class OwnLoss(base):  # type: ignore[misc, valid-type]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any
        ) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            logits = outputs["logits"][:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, inputs["labels"][:, 1:].flatten(), label_smoothing=0.1)
            return (loss, outputs) if return_outputs else loss

    layout: dict[str, Any] = {"mesh": mesh, "plan": plan} if mesh else {}
    size = BATCH // 2 if mesh.startswith("dp=2") else BATCH
    args = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=1 if own_loss else 2, seed=7,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=size, per_device_eval_batch_size=size, learning_rate=1e-2,
        weight_decay=0.1, max_grad_norm=0.3, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, **arguments,
    )  # fmt: skip
    made = OwnLoss if own_loss else base
    return made(
        model_of(), args, train_dataset=rows(), eval_dataset=rows()[:7], compute_metrics=metrics,
        **layout,
    )  # fmt: skip


def train(mesh: str, plan: str, folder: Path, own_loss: bool = False, resume: str = "") -> Any:
    """What a Trainer logs and predicts, and the weights in the file that it writes."""
    from safetensors.torch import load_file

    often = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 1}
    if own_loss:
        often = {"eval_strategy": "epoch"}
    with as_torchrun():
        trainer = trainer_of(mesh, plan, folder, own_loss, **({} if resume else often))
        trainer.train(resume_from_checkpoint=resume or None)
        logged = [
            {k: v for k, v in each.items() if k in SHOWN} for each in trainer.state.log_history
        ]
        trainer.save_model(str(folder / "last"))
        predicted = trainer.predict(rows()[:7])
        seeded = trainer.model_wrapped._stage.seeded if mesh else None
        torch.distributed.barrier()
        weights = load_file(folder / "last" / "model.safetensors")
        return logged, weights, (predicted.predictions, predicted.label_ids), seeded


def compare(found: Any, alone: Any) -> None:
    (logged, weights, predicted, _), (expected, same, told, _) = found, alone
    assert [list(each) for each in logged] == [list(each) for each in expected]
    for mine, theirs in zip(logged, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)  # a Trainer sums losses in float32
    assert list(weights) == list(same)
    for name, tensor in weights.items():
        # Adam divides gradients by their own size, also those that are next to rounding
        torch.testing.assert_close(tensor, same[name], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(predicted[0], told[0], rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(predicted[1], told[1])


def losses(found: Any) -> list[float]:
    """Of every step; a Trainer that resumes has those of the steps before in its checkpoint."""
    return [each["loss"] for each in found[0] if "loss" in each]


@pytest.fixture(scope="module")
def alone(world: Processes, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a Trainer of one process does."""
    return world.run(train, "", "", tmp_path_factory.mktemp("alone"), num=1)[0]


@pytest.mark.rows(1)
@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "plan"), [("dp=2", "fsdp"), ("pp=2", "ddp")])
def test_a_trainer_trains_evaluates_saves_and_resumes_as_in_one_process(
    world: Processes, tmp_path: Path, alone: Any, mesh: str, plan: str
) -> None:
    found = world.run(train, mesh, plan, tmp_path / "ranks", num=2)
    begun = tmp_path / "ranks" / "checkpoint-1"  # in the middle of an epoch
    resumed = world.run(train, mesh, plan, tmp_path / "later", False, str(begun), num=2)
    for mine, later in zip(found, resumed, strict=True):
        compare(mine, alone)
        assert losses(later) == losses(mine)
        np.testing.assert_array_equal(later[2][0], mine[2][0])
        for name, tensor in later[1].items():
            assert torch.equal(tensor, mine[1][name]), name
        assert later[3] == mine[3]


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_a_loss_of_a_subclass_is_compiled(world: Processes, tmp_path: Path) -> None:
    (alone,) = world.run(train, "", "", tmp_path / "alone", True, num=1)
    found = world.run(train, "tp=2", "megatron", tmp_path / "ranks", True, num=2)
    compare(found[0], alone)


def rebalanced(folder: Path) -> None:
    with as_torchrun(), pytest.raises(UsageError, match="batch_rebalance"):
        trainer_of("dp=1", "ddp", folder, False, train_sampling_strategy="batch_rebalance")


@pytest.mark.gloo
def test_another_dealing_out_is_refused(world: Processes, tmp_path: Path) -> None:
    world.run(rebalanced, tmp_path, num=1)


def generates(folder: Path) -> None:
    from transformers import Seq2SeqTrainingArguments

    from partc.wrappers.trainer import Trainer

    args = Seq2SeqTrainingArguments(
        str(folder), predict_with_generate=True, use_cpu=True, report_to=[]
    )
    with as_torchrun(), pytest.raises(UsageError, match=r"predict_with_generate.*full_state_dict"):
        Trainer(model_of(), args, mesh="dp=1", plan="ddp")


@pytest.mark.gloo
def test_an_evaluation_that_would_generate_is_refused(world: Processes, tmp_path: Path) -> None:
    world.run(generates, tmp_path, num=1)
