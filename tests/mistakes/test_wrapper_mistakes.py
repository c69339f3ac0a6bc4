"""Mistakes in what Accelerator, Trainer and Strategy are told, refused before anything is made."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from tempfile import gettempdir
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.mistakes.things import Mistake, batch_of, check


def accelerator(**named: Any) -> Any:
    pytest.importorskip("accelerate")
    from partc.wrappers.accelerate import Accelerator

    return Accelerator(**named)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Neither a process group nor what accelerate keeps of it, nor lightning in the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if dist.is_initialized():
        dist.destroy_process_group()
    if state := sys.modules.get("accelerate.state"):
        for kept in (state.AcceleratorState, state.PartialState, state.GradientState):
            kept._reset_state()


class Labelled(nn.Module):
    """Returns its loss and logits in a dict, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class Pair(Labelled):
    """The same in a tuple."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return tuple(super().forward(x, labels).values())


class Alone(Labelled):
    """Its loss alone, in a dict."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return {"loss": super().forward(x, labels)["loss"]}


def trained(model: nn.Module | None = None, *, labels: bool = True, **named: Any) -> Any:
    """A training step of a prepared model."""
    prepared = accelerator(mesh="dp=1", plan="ddp", **named).prepare(model or Labelled())
    x, y = batch_of()
    return prepared.train()(x, y) if labels else prepared.train()(x)


def stepped(*, models: bool, optimizers: bool) -> None:
    """A loop of accelerate in which something was not prepared."""
    made, model = accelerator(mesh="dp=1", plan="ddp"), Labelled().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batch_of()
    used: Any = made.prepare(model) if models else model
    stepping = made.prepare(optimizer) if optimizers else optimizer
    loss = used.train()(x, y)["loss"]
    made.backward(loss)
    stepping.step()


@pytest.mark.parametrize(("precision", "num_told"), [("fp16", 1), ("bf16", 0), ("no", 0)])
def test_float16_on_cpus_is_told(precision: str, num_told: int) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = accelerator(mesh="dp=1", cpu=True, mixed_precision=precision)
    said = [str(each.message) for each in told if "says nothing on CPUs" in str(each.message)]
    assert len(said) == num_told
    assert all('Take mixed_precision="bf16"' in text for text in said)
    assert made.native_amp == (precision == "bf16")


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_backward_past_the_accelerator(factor: float) -> None:
    made = accelerator(mesh="dp=1", plan="ddp", cpu=True, gradient_accumulation_steps=2)
    model = made.prepare(Labelled()).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.backward(model(*batch_of()).loss)
        divided = model.head.weight.grad.full_tensor().clone()
        model.zero_grad()
        if factor < 1:
            (factor * model(*batch_of()).loss).backward()
    if factor == 1:
        with pytest.warns(UserWarning, match=r"steps=2 .* Call accelerator\.backward\(loss\)"):
            model(*batch_of()).loss.backward()
    assert torch.equal(model.head.weight.grad.full_tensor(), divided / (0.5 / factor))


def penalty() -> Any:
    """A loss of the step, and one of the weights beside it."""
    made = accelerator(mesh="dp=1", plan="ddp")
    model = made.prepare(Labelled()).train()
    made.backward(model(*batch_of()).loss + sum(p.square().sum() for p in model.parameters()))
    return made


def called_behind() -> None:
    """The model of before ``prepare``, once it is trained."""
    made, model = accelerator(mesh="dp=1", plan="ddp"), Labelled()
    made.backward(made.prepare(model).train()(*batch_of()).loss)
    model(x=batch_of()[0])


class Unlabelled(Labelled):
    """Returns no loss, whatever labels it is given."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return {"logits": self.head(x)}


class Plain(Labelled):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return self.head(x)


def fitted_by_trainer(model: nn.Module) -> Any:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        gettempdir(), use_cpu=True, max_steps=1, per_device_train_batch_size=8, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"x": x, "labels": y} for x, y in zip(*batch_of(), strict=True)]
    made = trainer(model=model, args=arguments, train_dataset=rows, mesh="dp=1", plan="ddp")
    made.train()
    return made


def fitted(decide: Callable[[Any], Any]) -> None:
    """A LightningModule whose loss follows from the number of the batch."""

    def step(module: Any, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        return nn.functional.mse_loss(module.head(x), y) * decide(batch_idx)

    fitted_step(step)


def fitted_step(step: Callable[..., Any]) -> None:
    """A LightningModule with this training_step."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

        training_step = step

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lightning, about what torch renames
        rows = DataLoader(TensorDataset(*batch_of()), batch_size=8)
        lightning.Trainer(
            accelerator="cpu", devices=1, max_steps=1, strategy=strategy("dp=1", "ddp"),
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Module(), rows)  # fmt: skip


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
    "no names of results": (
        lambda: accelerator(mesh="dp=1", outputs=object()), ("outputs", "a list"),
    ),
    "FSDP too": (
        lambda: accelerator(mesh="dp=1", fsdp_plugin=True), ("fsdp_plugin", 'plan="fsdp"'),
    ),
    "a preset": (lambda: strategy("dp=1", "dpp"), ("'dpp'", "Did you mean 'ddp'")),
    "accelerate's own": (
        lambda: accelerator(mesh="dp=1", plan="ddp", mixed_precision="bf61"), ("bf61", "bf16"),
    ),
    "ranks that were not started": (
        lambda: accelerator(mesh="dp=2", plan="ddp"), ("1 process was started", "torchrun"),
    ),
    "a folder of states": (
        lambda: accelerator(mesh="dp=1", plan="ddp").load_state("none"), ("none", "save_state"),
    ),
    "a class": (
        lambda: accelerator(mesh="dp=1", plan="ddp").prepare(nn.Linear), ("the class Linear",),
    ),
    "a batch size": (lambda: strategy("dp=1", batch=8), ("batch = 8", "'global'")),
    "a plan misspelt": (
        lambda: accelerator(mesh="dp=1", plann="ddp"), ("'plann'", "Did you mean 'plan'"),
    ),
    "an argument of accelerate": (
        lambda: accelerator(mesh="dp=1", gradient_accumulation_step=2),
        ("'gradient_accumulation_step'", "Did you mean 'gradient_accumulation_steps'"),
    ),
    "outputs misspelt": (lambda: accelerator(mesh="dp=1", output=["x"]), ("mean 'outputs'",)),
    "an option beside": (
        lambda: accelerator(mesh="dp=1", microbatches=2), ("options={'microbatches': ...}",),
    ),
    "an option beside, of a Trainer": (
        lambda: trainer(model=None, mesh="dp=1", microbatches=2), ("options={'microbatches': ...}",)
    ),
    "a dataset misspelt": (
        lambda: trainer(model=None, mesh="dp=1", train_datset=[]), ("Did you mean 'train_dataset'",)
    ),
    "an argument of TrainingArguments": (
        lambda: trainer(model=None, mesh="dp=1", learning_rate=1.0),
        ("'learning_rate'", "TrainingArguments(learning_rate=...)"),
    ),
    "a plan misspelt for a Strategy": (lambda: strategy("dp=1", plann="ddp"), ("mean 'plan'",)),
    "a plan in the options": (
        lambda: trainer(mesh="dp=1", options={"plan": "ddp"}), ("beside the options: plan=...",),
    ),
    "a result": (lambda: trained(outputs=["logit"]), ("loss, logits", "Did you mean 'logits'")),
    "a result that is none": (
        lambda: trained(outputs=["hidden_states"]),
        ("Take outputs=['logits'], or let", "output_hidden"),
    ),
    "a result but the loss": (
        lambda: trained(Alone(), outputs=["logits"]),
        ("it returns loss)", "Let the model return it"),
    ),
    "the loss as a result": (
        lambda: trained(outputs=["loss", "logits"]),
        ("in any case", "Leave it out: outputs=['logits']"),
    ),
    "no labels, and results by name": (
        lambda: trained(labels=False, outputs=["logits"]),
        ("it returns logits, and no loss", "labels"),
    ),
    "a result without a name": (
        lambda: trained(Pair(), outputs=["logits"]), ("a tuple", "no names", "Let it return a dict")
    ),
    "a model not prepared": (
        lambda: stepped(models=False, optimizers=True),
        ("accelerator.backward", "was not prepared", "accelerator.prepare(model, optimizer"),
    ),
    "an optimizer not prepared": (
        lambda: stepped(models=True, optimizers=False), ("SGD.step", "accelerator.prepare with"),
    ),
    "the model of before": (
        called_behind, ("Labelled(...)", "no values any more", "what accelerator.prepare returned"),
    ),
    "a Trainer's model": (
        lambda: fitted_by_trainer(Labelled()).model(x=batch_of()[0]),
        ("Labelled(...)", "trainer.model_wrapped", "trainer.save_model(folder)"),
    ),
    "the states of a Trainer's model": (
        lambda: fitted_by_trainer(Labelled()).model.state_dict(),
        ("Labelled.state_dict()", "trainer.model_wrapped.state_dict()", "trainer.save_model"),
    ),
    "results as a tensor": (
        lambda: trained().detach(), ("outputs.detach", "no tensor", "outputs.loss.detach"),
    ),
    "a Trainer without a loss": (
        lambda: fitted_by_trainer(Unlabelled()),
        ("a training step of Unlabelled", "it returns logits, and no loss", "compute_loss_func"),
    ),
    "a Trainer with a tensor": (
        lambda: fitted_by_trainer(Plain()),
        ("a training step of Plain", "a tensor of shape", "compute_loss_func"),
    ),
    "the number of the batch": (
        lambda: fitted(lambda batch_idx: 2.0 if batch_idx == 0 else 1.0),
        ("training_step", "the value of batch_idx", "torch.where", "on_train_batch_end"),
    ),
    "a dict without a loss": (
        lambda: fitted_step(lambda module, batch: {"logits": module.head(batch[0])}),
        ("training_step", "no loss, but logits", "{'loss': loss, ...}"),
    ),
    "a number of ranks": (lambda: strategy(2), ("2 does not describe", "'dp=2'")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake: str) -> None:
    check(MISTAKES[mistake])


def test_a_loss_with_a_penalty_of_weights_is_no_mistake() -> None:
    assert penalty()


def test_processes_that_accelerate_does_not_count_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    check((lambda: accelerator(mesh="dp=2", plan="ddp"), ("counts one", "2 were", "cpu=True")))
