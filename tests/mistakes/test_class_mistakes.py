"""Mistakes in calls of partc's classes: each answer names the culprit and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.lowering import partition
from partc.metrics import Meter
from partc.verification.report import Report
from partc.wrong_calls import known_arguments
from tests.mistakes.things import Mistake, Net, batch_of, check, compiled, loss_of, program

anything: Any = partc  # to a type checker these are no mistakes


def any_program() -> Any:
    return program()


def verified(**changed: Any) -> Report:
    given: dict[str, Any] = {"model": Net(), "inputs": batch_of(), "loss": loss_of, **changed}
    return partc.verify(program(), **given)


MISTAKES: dict[str, Mistake] = {
    "axes by name": (lambda: anything.Mesh(dp=2), ("'dp'", 'Mesh.of("dp=2,tp=4")')),
    "no axes": (lambda: anything.Mesh(), ("'axes'", "Mesh.of(")),
    "a field in the plural": (lambda: anything.Plan(presets="ddp"), ("'preset'", "Did you mean")),
    "an old field": (lambda: anything.Plan(chunks=2), ("'chunks'", "'virtual_stages'")),
    "a machine by name": (lambda: anything.Topology("dgx-h100"), ("Topology.load(",)),
    "no machine": (lambda: anything.Topology.load(), ("Topology.load()", "'name'")),
    "no loggers": (lambda: Meter(), ("'loggers'", "JsonLines")),  # type: ignore[call-arg]
    "a folder's picture": (lambda: anything.picture("build"), ("partc.load('build')",)),
    "a model's report": (lambda: anything.report(Net()), ("a Net", "partc.compile or partc.load")),
    "a report's path": (lambda: program().report("x.html"), ('save("report',)),  # type: ignore[call-arg]
    "no rank": (lambda: program().data_rank(), ("dist.get_rank()",)),  # type: ignore[call-arg]
    "a program that runs": (lambda: any_program().run(), ("stage.step", "torchrun")),
    "load without a folder": (lambda: anything.load(), ('partc.load("build")',)),
    "a file of checkpoints": (lambda: partc.Checkpoints(__file__), ("it is a file", "a folder")),
    "checkpoints that load": (
        lambda: anything.Checkpoints("run").load(), ("load_latest(stage, optimizer)",)),
    "a pass after nothing": (lambda: anything.graph_pass(), ("'after'", "insert_collectives")),
    "no batch": (lambda: anything.Traced(Net()), ("'inputs'", "global batch")),
    "no plan": (lambda: partition(1), ("'plan'", "partition()")),  # type: ignore[arg-type, call-arg]
    "a tolerance as text": (lambda: anything.verify(
        program(), Net(), batch_of(), loss_of).check("1e-9"), ("'1e-9'", "Give a number")),
    "a batch without values": (lambda: verified(
        inputs=tuple(x.to("meta") for x in batch_of())), ("input 0", "meta", "random ones")),
    "a default device": (lambda: on_meta(), ("default device is meta", "set_default_device(None)")),
    "weights without values": (
        lambda: verified(model=meta()), ("Net.down.bias", "meta", "random ones")),
}  # fmt: skip


def on_meta() -> Any:
    with torch.device("meta"):
        return compiled()


def meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake: str) -> None:
    check(MISTAKES[mistake])


def test_an_error_inside_of_a_call_stays_what_it_is() -> None:
    @known_arguments
    def call(size: int) -> int:
        return len(size)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        call(3)
