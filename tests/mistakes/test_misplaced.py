"""Arguments that stand in each other's place, and a loss where something else is meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.lowering import partition
from tests.mistakes.things import (
    Mistake,
    Net,
    batch_of,
    check,
    compiled,
    loss_of,
    one_rank,
    program,
)

anything: Any = partc  # to a type checker these are no mistakes
PART: Any = partition
CLASSES = torch.ones(8, 4), torch.ones(8, dtype=torch.int64)


def graph(mesh: str = "") -> Any:
    found = partc.Traced(Net(), batch_of(), loss_of).graph()
    if mesh:
        found.mesh = partc.Mesh.of(mesh)
    return found


PLACES: dict[str, Mistake] = {
    "a traced step": (lambda: anything.Traced(Net(), loss_of, batch_of()), (
        "inputs=loss_of", "the batch as loss", "Write Traced(model, inputs, loss).")),
    "a batch and its model": (lambda: anything.Traced(batch_of(), Net(), loss_of), (
        "the model as inputs", "Write Traced(model, inputs, loss).")),
    "a loss and its model": (lambda: anything.Traced(loss_of, batch_of(), Net()), (
        "the model as loss",)),
    "a kind": (lambda: anything.Traced(Net(), batch_of(), "step"), ("Write kind='step'.",)),
    "a mesh and a batch": (lambda: compiled(mesh=batch_of(), inputs="dp=2"), (
        "inputs='dp=2'", "the mesh as inputs", "Write compile(model, mesh, inputs, loss=loss")),
    "a mesh and a model": (lambda: compiled(model="dp=2", mesh=Net()), ("the model as mesh",)),
    "a batch and a loss": (lambda: compiled(inputs=loss_of, loss=batch_of()), (
        "the loss as inputs",)),
    "a loss for the batch": (lambda: compiled(inputs=loss_of, loss=None), (
        "the function loss_of stands where a batch is needed", "loss=loss_of")),
    "a program and its model": (
        lambda: anything.verify(Net(), program(), batch_of(), loss_of), (
            "the program as model", "Write verify(program, model, inputs, loss).")),
    "a verified batch and loss": (
        lambda: anything.verify(program(), Net(), loss_of, batch_of()), ("the batch as loss",)),
    "no model to verify": (lambda: anything.verify(program(), batch_of(), loss_of), (
        "This is a batch: pass the module before it.",)),
    "a loss with a program": (lambda: anything.with_model(program(), loss_of, Net()), (
        "the model as loss",)),
    "a mesh to parallelize": (lambda: anything.parallelize("dp=2", Net()), ("the mesh as model",)),
    "a model to load": (lambda: anything.load(Net(), "build"), ("Write load(path, model).",)),
    "a plan's name to partition": (lambda: PART(graph("dp=2"), "ddp"), (
        "the plan is 'ddp'", "Pass partc.Plan(preset='ddp').")),
    "a plan's file": (lambda: PART(graph("dp=2"), "plan.toml"), ("partc.Plan.load('plan.toml')",)),
    "a plan's text": (lambda: PART(graph("dp=2"), program().plan), ("Plan.parse(text)",)),
    "a program to partition": (lambda: PART(graph("dp=2"), program()), (
        "partc.Plan.parse(program.plan)",)),
    "a mesh to partition": (lambda: PART(graph(), "dp=2"), (
        "graph.mesh = partc.Mesh.of('dp=2')",)),
    "a step to partition": (lambda: PART(partc.Traced(Net(), batch_of()), partc.Plan()), (
        "the graph is a Traced", ".graph()")),
    "a graph on no mesh": (lambda: PART(graph(), partc.Plan(preset="ddp")), (
        "on no mesh", 'graph.mesh = partc.Mesh.of("dp=2")')),
    "a plan and a graph": (lambda: PART(partc.Plan(), graph("dp=2")), (
        "the graph as plan", "Write partition(graph, plan).")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PLACES)
def test_what_stands_in_another_place_is_told(mistake: str) -> None:
    check(PLACES[mistake])


def test_a_graph_is_partitioned_as_it_is_told() -> None:
    traced, plan = graph("dp=2"), partc.Plan(preset="ddp")
    assert str(PART(traced, plan)[1]) == str(PART(graph(), plan.changed(mesh=traced.mesh))[1])


def weighted(loss: Any) -> Any:
    return lambda model, x, y: loss(model(x), y)


LOSSES: dict[str, Mistake] = {
    "a criterion": (lambda: anything.ScriptLoss(nn.CrossEntropyLoss()), (
        "ScriptLoss(CrossEntropyLoss)", "a loss stands where the model is needed",
        "loss=partc.ScriptLoss(model)", "loss = criterion(stage(x), y)")),
    "a loss of the script": (lambda: anything.ScriptLoss(loss_of), ("ScriptLoss(loss_of)",)),
    "a class": (lambda: compiled(loss=partc.ScriptLoss, inputs=(torch.ones(8, 4),)), (
        "loss=ScriptLoss: it is a class", "loss=ScriptLoss(model)")),
    "labels too": (lambda: compiled(loss=partc.ScriptLoss(Net())), (
        "Pass what the model takes, (x)",)),
    "a name alone": (lambda: anything.ScriptLoss(Net(), "x"), ("it is 'x'", "['x']")),
    "a name of nothing": (lambda: partc.ScriptLoss(Net(), ["xs"]), (
        "inputs=['xs']", "Did you mean 'x'")),
    "class weights": (lambda: compiled(
        inputs=CLASSES, loss=weighted(nn.CrossEntropyLoss(weight=torch.ones(3)))), (
            "the weight of the loss cross_entropy has 3 numbers", "one number for each class")),
    "weights of positives": (lambda: compiled(
        loss=weighted(nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)))), (
            "the pos_weight of the loss binary_cross_entropy_with_logits has 3 numbers",)),
    "class weights of a margin": (lambda: compiled(
        inputs=CLASSES, loss=weighted(nn.MultiMarginLoss(weight=torch.ones(3)))), (
            "the weight of the loss multi_margin_loss has 3 numbers",)),
    "other targets beside right weights": (lambda: compiled(
        inputs=(CLASSES[0], torch.ones(8, 3)),
        loss=weighted(nn.BCEWithLogitsLoss(pos_weight=torch.ones(4)))), (
            "a target float32[8, 3]", "Give a target of the shape [8, 4]")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", LOSSES)
def test_a_loss_that_is_meant_otherwise_is_told(mistake: str) -> None:
    check(LOSSES[mistake])


def scores(model: nn.Module, x: Tensor, y: list[int]) -> Tensor:
    return F.cross_entropy(model(x), torch.tensor(y))


FIXED = CLASSES[1].clone()


def with_fixed(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), FIXED)


@pytest.mark.exhaustive
def test_labels_that_are_no_input_are_named() -> None:
    x, y = CLASSES
    own = {"batch": "local", "plan": "ddp"}
    words = "input y", "a list of 8 numbers", "torch.as_tensor(y)"
    check((lambda: compiled(inputs=(x, y.tolist()), loss=scores, **own), words))
    words = "FIXED of with_fixed", "test_misplaced.py", "Make it an input"
    check((lambda: compiled(inputs=(x,), loss=with_fixed, **own), words))
    compiled(inputs=(x, torch.as_tensor(y.tolist())), loss=weighted(F.cross_entropy), **own)


def of_entries(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss_of(model, batch["x"], batch["target"])


def test_the_keys_of_a_dict_are_told_from_its_tensors() -> None:
    batch = dict(zip(("x", "target"), batch_of(), strict=True))
    with one_rank():
        stage: Any = compiled(mesh="dp=1", inputs=batch).module()
        one: Any = compiled(mesh="dp=1", inputs=(batch,), loss=of_entries).module()
        stars = "the names 'x', 'target', and no tensors", "Write two stars: step(**batch)."
        check((lambda: stage.step(*batch), stars))
        check((lambda: stage.step(*{"ids": 1, "labels": 2}), ("with the names (x, target)",)))
        check((lambda: one.step(*batch), ("Pass the dict as it was compiled: step(batch).",)))
        check((lambda: stage.eval()(*{"x": 1}), ("the names 'x' stand", "write two stars")))
        one.step(batch)
    check((lambda: compiled(inputs=(*batch,)), ("'x', 'target' stand", "Pass the dict as inputs")))
