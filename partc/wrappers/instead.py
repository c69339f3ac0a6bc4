"""Arguments that a wrapper has not: where a script says what they mean."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from partc.api import compile as compile_program
from partc.other_words import told_elsewhere
from partc.wrong_calls import did_you_mean

OF_COMPILE = tuple(inspect.signature(compile_program).parameters)
DECIDED = ("model", "mesh", "inputs", "loss", "plan")  # of these, by a wrapper's own arguments
_OPTIONS = ("Accelerator", "Trainer")  # wrappers that take the others in options={}
_LEAVE = "Leave it out: "
_DDP = dict.fromkeys(
    inspect.signature(DistributedDataParallel.__init__).parameters,
    "DistributedDataParallel has it, and a program needs none",
)
_TELLS: Mapping[str, Mapping[str, str]] = {
    "Strategy": {
        "loss": "training_step returns the loss",
        "model": "trainer.fit(module, loader) is given the module",
        "pad": "collate_fn of the loader fills up inputs",
        "outputs": "training_step returns what is wanted beside the loss, "
        "{'loss': loss, 'logits': logits}",
        "options": "they are arguments of Strategy itself, Strategy(mesh, microbatches=4)",
    },
    "Trainer": {
        "loss": "the model returns its loss, or Trainer(compute_loss_func=...) computes it",
        "outputs": "a Trainer's steps return the loss alone; what evaluations return is "
        "compute_metrics'",
        "tokenizer": "it is called processing_class",
    },
    "Accelerator": {
        "model": "accelerator.prepare(model, optimizer, loader) is given the model",
        **dict.fromkeys(
            ("precision", "bf16", "fp16", "amp"), 'Accelerator(mixed_precision="bf16") says it'
        ),
    },
    "parallelize": {
        **_DDP,
        "device_ids": 'parallelize(..., device="cuda") says where ranks compute',
        "output_device": 'parallelize(..., device="cuda") says where ranks compute',
        **dict.fromkeys(
            ("mp_policy", "mixed_precision", "precision"),
            'torch.autocast("cuda", torch.bfloat16) around the step says what is computed in half '
            "precision; parameters stay as they are",
        ),
        "optimizer": "make it over model.parameters(); it follows the model's first step",
        "options": "they are arguments of parallelize itself, parallelize(..., microbatches=4)",
    },
}


def instead(wrapper: str, name: str, known: Iterable[str], others: Mapping[str, str]) -> str:
    """What to do about an argument that a wrapper has not.

    ``known``: those that it has. ``others``: what to do about names of the library's.
    """
    if name in (tells := _TELLS.get(wrapper, {})):
        return f"{_LEAVE}{tells[name]}."
    if name == "inputs":
        return f"{_LEAVE}the first batch says the shapes of the inputs."
    if name in DECIDED:
        return f"Pass it beside the options: {name}=..."
    if name in OF_COMPILE and wrapper in _OPTIONS:
        return f"It is one of partc.compile: options={{{name!r}: ...}}."
    if name in others:
        return others[name]
    if wrapper == "Strategy" and name in _of_lightning():
        return f"It is one of lightning's Trainer: Trainer({name}=..., strategy=Strategy(...))."
    if near := did_you_mean(name, known):
        return near
    told = told_elsewhere("compile", name)
    return f"{_LEAVE}{told}." if told else "Leave it out."


def _of_lightning() -> Iterable[str]:
    """The arguments of the Trainer of the lightning that the script has imported."""
    made: Any = sys.modules.get("lightning.pytorch") or sys.modules.get("pytorch_lightning")
    return inspect.signature(made.Trainer.__init__).parameters if made else ()
