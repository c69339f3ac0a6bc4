"""The programs of the goldens, and twenty others, each as a function that compiles it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import partc
from partc.plan import Plan
from partc.program import Program
from partc.schedules import NAMES

Make = Callable[[], Program]


def golden_programs() -> dict[str, Make]:
    """By the test that pins its text."""
    from tests.codegen import test_compiled, test_role_file, test_shared_roles
    from tests.overlap import test_messages
    from tests.pipelines import TRAINING

    found: dict[str, Make] = {f"pipeline {name}": partial(_pipeline, name) for name in TRAINING}
    return {
        **found,
        "emit fsdp": partial(_emitted, "dp=2", "fsdp"),
        "emit ddp+megatron": partial(_emitted, "dp=2,tp=2", "ddp+megatron"),
        "emit one rank": partial(_emitted, "dp=1", "ddp"),
        "local batch": _local,
        "compiled": partial(test_compiled.compiled, "fsdp"),
        "role file": test_role_file.pipeline,
        "shared roles": test_shared_roles.program,
        "messages": lambda: test_messages.compiled(plan=Plan(preset="fsdp", messages=True)),
    }


def _pipeline(schedule: str) -> Program:
    from tests.pipelines import compiled, toy

    two = NAMES[schedule].usual_chunks == 2
    points = ("blocks.0", "blocks.1", "head") if two else ("blocks.1",)
    return compiled(toy(), "pp=2", Plan(preset="ddp", stages=points), schedule, 8)


def _emitted(mesh: str, plan: str) -> Program:
    from tests.codegen.mlps import toy

    model, inputs = toy()
    return partc.compile(model, mesh, inputs, plan=plan)


def _local() -> Program:
    from tests.batches import tokens
    from tests.shard.test_local_batch import compiled, piece_of

    return compiled(piece_of(tokens(), 2), "dp=2", "ddp", microbatches=2)


OTHERS = (  # family, mesh, plan, microbatches
    ("llama", "dp=2", "fsdp", 1), ("llama", "dp=2,tp=2", "fsdp+megatron-sp", 1),
    ("gpt2", "dp=2", "zero1", 1), ("gpt2", "tp=2", "megatron", 1),
    ("bert", "dp=2", "ddp", 2), ("roberta", "dp=2,tp=2", "ddp+megatron", 1),
    ("distilbert", "dp=2", "fsdp", 1), ("electra", "tp=2", "megatron", 1),
    ("t5", "dp=2", "zero1", 1), ("t5", "tp=2", "megatron-sp", 1), ("bart", "dp=2", "fsdp", 1),
    ("vit", "dp=2", "ddp", 1), ("swin", "dp=2", "fsdp", 1), ("convnext", "dp=2", "ddp", 1),
    ("resnet", "dp=2", "ddp", 1), ("mixtral", "dp=2", "fsdp", 1), ("qwen2", "pp=2", "ddp", 2),
    ("mistral", "pp=2,dp=2", "ddp", 2), ("gemma2", "pp=2,tp=2", "megatron", 2),
    ("opt", "dp=4", "fsdp", 1),
)  # fmt: skip


def other_programs() -> dict[str, Make]:
    """Small models of Hugging Face families, of one layout each."""
    return {" ".join((name, mesh, plan)): partial(_of_zoo, name, mesh, plan, num)
            for name, mesh, plan, num in OTHERS}  # fmt: skip


def _of_zoo(name: str, mesh: str, plan: str, microbatches: int) -> Program:
    from tests.zoo import MODELS

    case = MODELS[name]()
    return partc.compile(
        case.model, mesh, case.inputs, loss=case.loss, plan=plan, microbatches=microbatches
    )
