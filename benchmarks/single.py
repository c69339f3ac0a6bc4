"""partc's program for one device beside the model as it is: time of a step, memory of activations.

Run ``python -m benchmarks.single``. Both sides live in one process, with the same weights and one
thread, and take turns; their first losses and the first gradient's norm are compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers import AutoModelForImageClassification as AutoImageModel

import partc
from benchmarks.machine import machine
from benchmarks.measure import Side, first_steps, peak_bytes, sample
from benchmarks.peer_table import ratio
from benchmarks.workload import norm_of
from partc.measure.resident import free_at_once
from partc.verification.processes import Processes

NUM_CHECKED, WARM_UP = 2, 2
TOLERANCE = 1e-4  # f32, sums in another order
STATES = 2  # of AdamW, for each parameter
TIMEOUT_S = 1800.0
VOCAB, SEQ, IMAGE, CLASSES = 4096, 128, 64, 10

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Model:
    """A model of a family's own configuration, and how many samples a step has."""

    auto: Any
    batch: int
    config: dict[str, Any]


_LLAMA = {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 688, "use_cache": False,
          "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": VOCAB}  # fmt: skip
_GPT = {"n_embd": 256, "n_layer": 8, "n_head": 8, "vocab_size": VOCAB, "use_cache": False,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
_T5 = {"d_model": 256, "d_ff": 1024, "num_layers": 4, "num_heads": 8, "d_kv": 32,
       "vocab_size": VOCAB, "use_cache": False, "dropout_rate": 0.0,
       "decoder_start_token_id": 0}  # fmt: skip
_VIT = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "image_size": IMAGE,
        "intermediate_size": 1024, "patch_size": 8, "num_labels": CLASSES,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
_RESNET = {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2],
           "layer_type": "basic", "num_labels": CLASSES}  # fmt: skip
_SMALL_RESNET = {"embedding_size": 16, "hidden_sizes": [32, 64, 128], "depths": [2, 2, 2],
                 "layer_type": "bottleneck", "num_labels": CLASSES}  # fmt: skip
MODELS = {
    "llama": Model(AutoModelForCausalLM, 8, _LLAMA),
    "gpt2": Model(AutoModelForCausalLM, 8, _GPT),
    "t5": Model(AutoModelForSeq2SeqLM, 8, _T5),
    "vit": Model(AutoImageModel, 16, _VIT),
    "resnet": Model(AutoImageModel, 8, _RESNET),
    "resnet-small": Model(AutoImageModel, 8, _SMALL_RESNET),
    "llama-12": Model(AutoModelForCausalLM, 8, _LLAMA | {"num_hidden_layers": 12}),
    "llama-32": Model(AutoModelForCausalLM, 8, _LLAMA | {"num_hidden_layers": 32}),
}
USUAL = [name for name in MODELS if "-" not in name]  # the first of each family


def build_model(name: str) -> nn.Module:
    """The model with the same weights every time."""
    found, family = MODELS[name], name.partition("-")[0]
    torch.manual_seed(0)
    model: nn.Module = found.auto.from_config(AutoConfig.for_model(family, **found.config))
    return model.train()


def build_batch(name: str) -> Batch:
    """Tokens, or images, and what is to be said of them."""
    num, generator = MODELS[name].batch, torch.Generator().manual_seed(1)
    if MODELS[name].auto is AutoImageModel:
        images = torch.randn(num, 3, IMAGE, IMAGE, generator=generator)
        return images, torch.randint(CLASSES, (num,), generator=generator)
    tokens = torch.randint(VOCAB, (num, SEQ), generator=generator)
    return tokens, tokens


def loss_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The model's own loss."""
    loss: Tensor = model(x, labels=labels).loss
    return loss


def eager(name: str, *, compiles: bool = False) -> Side:
    """The model as it is, or under torch.compile."""
    model, batch = build_model(name), build_batch(name)
    if compiles:
        model.compile()

    def forward_backward() -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        return loss

    return _side("eager", list(model.parameters()), forward_backward)


def generated(folder: str, name: str) -> Side:
    """partc's program."""
    stage, batch = partc.load(folder).module(), build_batch(name)
    stage.load_full(build_model(name))
    return _side("partc", list(stage.rank_step.parameters()), partial(stage.step, *batch))


def _side(name: str, parameters: list[nn.Parameter], step: Callable[[], Tensor]) -> Side:
    return Side(
        name, parameters, step, lambda: norm_of(p.grad for p in parameters if p.grad is not None)
    )


@dataclass(frozen=True)
class Row:
    """One model; figures of each side, partc first."""

    name: str
    seconds: list[list[float]]
    live_bytes: list[float]
    error: float

    def __str__(self) -> str:
        ours, theirs = self.seconds
        mine, eagers = (size / 1e6 for size in self.live_bytes)
        cells = (
            self.name, f"{1e3 * median(ours):.0f}", f"{1e3 * median(theirs):.0f}",
            ratio(ours, theirs), f"{mine:.0f}", f"{eagers:.0f}", f"{mine / eagers:.2f}",
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


def measure(name: str, num_rounds: int, recompute: str) -> Row:
    """Compile a model for one device, and measure it beside itself."""
    plan = partc.Plan(preset="ddp", recompute=recompute)
    with tempfile.TemporaryDirectory() as folder:
        program = partc.compile(build_model(name), {}, build_batch(name), loss=loss_of, plan=plan)
        program.save(folder)
        with Processes(1, timeout=TIMEOUT_S, quiet=True) as world:
            ((seconds, error),) = world.run(_time, folder, name, num_rounds)
        with Processes(1, timeout=TIMEOUT_S, quiet=True) as world:
            (live,) = world.run(_memory, folder, name)
    return Row(name, seconds, live, error)


def _time(folder: str, name: str, num_rounds: int) -> tuple[list[list[float]], float]:
    """Seconds of every step of both sides, and how far their first steps are apart."""
    sides = [generated(folder, name), eager(name)]
    (mine, norm), (theirs, their_norm) = (first_steps(side, NUM_CHECKED) for side in sides)
    pairs = [*zip(mine, theirs, strict=True), (norm, their_norm)]
    error = max(abs(a - b) / abs(b) for a, b in pairs)
    for side in sides:
        for _ in range(WARM_UP):
            side.step()
    samples: list[list[float]] = [[] for _ in sides]
    for turn in range(num_rounds):
        for number in (turn % 2, 1 - turn % 2):
            samples[number].append(sample(sides[number]).step_s)
    return samples, error


def _memory(folder: str, name: str) -> list[float]:
    """What each side holds at most beside parameters and the optimizer's states, in bytes."""
    free_at_once()
    builds = (partial(generated, folder, name), partial(eager, name))
    for build in builds:
        build().step()  # loads the libraries that it uses
    state = (1 + STATES) * sum(p.nbytes for p in build_model(name).parameters())
    return [(peak_bytes(build, WARM_UP + 1) or 0) - state for build in builds]


def table(rows: Sequence[Row]) -> str:
    """All rows as markdown."""
    heads = ("model", "partc ms", "eager ms", "partc/eager", "partc live MB", "eager live MB",
             "partc/eager")  # fmt: skip
    return "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *map(str, rows)])


def main() -> int:
    """Measure what the command line asks for; 1 if the sides disagree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=USUAL)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--recompute", choices=["cheap", "attention", "block"], default="cheap")
    parser.add_argument("--compile", choices=["inductor"], help="beside torch.compile of the model")
    parser.add_argument("--compiles", type=int, default=1, help="how often first steps are timed")
    options = parser.parse_args()
    from benchmarks import single_compiled  # which measures this module's sides

    torch.set_num_threads(1)
    print(machine(), end="\n\n")
    rows: list[Any] = []
    for name in options.models:
        if options.compile:
            rows.append(single_compiled.measure(name, options.rounds, options.compiles))
        else:
            rows.append(measure(name, options.rounds, options.recompute))
        print(rows[-1], file=sys.stderr, flush=True)
    worst = max(row.error for row in rows)
    shown = single_compiled.table(rows) if options.compile else table(rows)
    print(f"{shown}\n\nlosses and gradient norms agree within {worst:.1e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
