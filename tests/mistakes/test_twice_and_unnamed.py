"""Mistakes whose answer has to name the one thing that is wrong: a name said twice, an input that
is none, rows that make no batch, labels of another dtype."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partc
from partc.file_text import Unreadable, toml_table
from partc.graph import Graph, is_call
from partc.passes import own_passes
from partc.rules.notation import parse
from partc.rules.table import RULES, rule
from tests.mistakes.test_wrapper_mistakes import (
    Labelled,
    accelerator,
    nothing_stays,  # noqa: F401  (for all tests here)
    strategy,
    trainer,
)
from tests.mistakes.things import Mistake, Net, batch_of, check, compiled, loss_of, one_rank

aten = torch.ops.aten
anything: Any = partc


def labelled(loss: Callable[..., Any], dtype: torch.dtype) -> Any:
    """A compile for labels of a dtype, one for each row."""
    return compiled(inputs=(torch.ones(8, 4), torch.zeros(8).to(dtype)), loss=loss)


def padded(**pad: float) -> Any:
    """A step of a model of parallelize, on one rank."""
    with one_rank():
        model = partc.parallelize(Net(), "dp=1", loss=loss_of, plan="ddp", pad=pad)
        return model.step(*batch_of())


def prepared(*, by_name: bool = True, **pad: float) -> Any:
    x, y = batch_of()
    model = accelerator(mesh="dp=1", plan="ddp", pad=pad).prepare(Labelled()).train()
    return model(x=x, labels=y) if by_name else model(x, y)


def of_stage(act: Callable[[Any], Any]) -> Any:
    with one_rank():
        return act(compiled(mesh="dp=1").module())


def saved_twice(folder: Path) -> Any:
    return of_stage(lambda stage: [partc.save_checkpoint(folder, stage) for _ in range(2)])


def loaded(folder: Path, loss: Any = None) -> Any:
    compiled().save(folder)
    return partc.with_model(partc.load(folder), Net(), loss)


def loop(collate: Callable[[list[Any]], Any]) -> Any:
    rows = [(torch.ones(4), torch.ones(4))] * 16
    return of_stage(lambda stage: [stage.step(*x) for x in stage.loader(rows, collate_fn=collate)])


@contextmanager
def own_pass(function: Callable[[Graph], None]) -> Iterator[None]:
    partc.graph_pass(after="insert_collectives")(function)
    try:
        yield
    finally:
        own_passes._OWN.clear()


def bare_call(graph: Graph) -> None:
    for node in list(graph.calls()):
        if is_call(node, aten.relu.default):
            with graph.fx.inserting_before(node):
                new = graph.fx.call_function(aten.clamp_min.default, (node.args[0], 0))
            node.replace_all_uses_with(new)
            graph.fx.erase_node(node)


def with_pass(function: Callable[[Graph], None]) -> Any:
    with own_pass(function):
        return compiled(mesh="dp=1")


def misplaced(after: str) -> Any:
    partc.graph_pass(after=after)(bare_call)
    try:
        return compiled()
    finally:
        own_passes._OWN.clear()


def scheduled() -> Any:
    """A scheduler over an optimizer that is not prepared."""
    other = torch.optim.SGD(Net().parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    return accelerator(mesh="dp=1", plan="ddp").prepare(Labelled(), scheduler)


def distances(model: nn.Module, x: Any, y: Any) -> Any:
    return torch.cdist(model(x), y).mean()


def ruled(notation: Any) -> Any:
    rule("aten._cdist_forward", notation)
    try:
        return compiled(loss=distances)
    finally:
        del RULES._entries["aten._cdist_forward"]


CALLS: dict[str, Mistake] = {
    # rules
    "a rule that is there": (
        lambda: rule("aten.mm", "mk,kn->mn"),
        ("rule('aten.mm', ...)", "partc.rules.families.matmul", "rule('aten.mm.default', ...)"),
    ),
    "no arrow": (lambda: rule("aten.relu", "m,n"), ("of aten.relu", "no '->'", "'mk,kn->mn'")),
    "no arrow, of a function": (lambda: ruled(lambda call: "m,n"), ("_cdist_forward", "no '->'")),
    "a bracket": (lambda: rule("aten.relu", "m->m)"), ("aten.relu", "')' closes nothing")),
    "brackets in brackets": (lambda: parse("((m n))->m"), ("inside of another",)),
    "one letter for two sizes": (
        lambda: ruled("nk,nk->nk"), ("_cdist_forward", "letters of their own"),
    ),
    # plans
    "a preset twice": (
        lambda: compiled(plan='preset = "ddp"\npreset = "fsdp"'), ("preset stands in line 1", "2"),
    ),
    "a word twice": (lambda: compiled(plan="fsdp+fsdp"), ("'fsdp' twice",)),
    # dtypes
    "labels of 32 bits": (
        lambda: labelled(lambda m, x, y: F.cross_entropy(m(x), y), torch.int32),
        ("y, of class numbers", "test_twice_and_unnamed.py:", "int64", "y.long()"),
    ),
    "an index of 16 bits": (
        lambda: labelled(lambda m, x, y: m(x).index_select(0, y).sum(), torch.int16),
        ("index_select reads int64 or int32", "y.long()"),
    ),
    "whole numbers for probabilities": (
        lambda: labelled(
            lambda m, x, y: F.binary_cross_entropy(m(x)[:, 0].sigmoid(), y), torch.int64
        ),
        ("binary_cross_entropy of float32 and int64", "target.to(torch.float32)"),
    ),
    # batches
    "rows": (lambda: loop(lambda rows: rows), ("8 rows, each a tuple", "default_collate")),
    "no batch": (lambda: loop(lambda rows: None), ("collate_fn", "returns None")),
    "pad of no input": (lambda: padded(xx=0), ("pad={'xx'", "target, x")),
    "pad of no input of a model": (
        lambda: prepared(lables=0), ("pad={'lables'", "Did you mean 'labels'"),
    ),
    # passes, parts
    "a call without a Value": (
        lambda: with_pass(bare_call), ("clamp_min.default(", "set_like(new, old)", "call_before"),
    ),
    "a part alone": (lambda: of_stage(lambda stage: stage.up(torch.ones(1, 4))), ("module up",)),
    # wrappers
    "a loss of a Strategy": (
        lambda: strategy("dp=1", loss=loss_of), ("'loss'", "training_step returns the loss"),
    ),
    "devices of a Strategy": (
        lambda: strategy("dp=1", devices=2), ("'devices'", "Trainer(devices=..., strategy=Strat"),
    ),
    "a loss of a Trainer": (
        lambda: trainer(model=None, mesh="dp=1", loss=loss_of), ("'loss'", "compute_loss_func"),
    ),
    "inputs of an Accelerator": (
        lambda: accelerator(mesh="dp=1", inputs=1), ("'inputs'", "the first batch"),
    ),
    "half precision of an Accelerator": (
        lambda: accelerator(mesh="dp=1", fp16=True), ("'fp16'", "mixed_precision="),
    ),
    "arguments of DDP": (
        lambda: anything.parallelize(Net(), "dp=1", find_unused_parameters=True),
        ("'find_unused_parameters'", "a program needs none"),
    ),
    "a criterion for a loss": (
        lambda: anything.parallelize(Net(), "dp=1", loss=nn.MSELoss()),
        ("loss=MSELoss", "criterion(model(x), y)"),
    ),
    "results of a loss": (
        lambda: anything.parallelize(Net(), "dp=1", loss=loss_of, outputs=["logits"]),
        ("outputs", "return loss, {'logits': ...}"),
    ),
    "no names of results": (lambda: accelerator(mesh="dp=1", outputs=None), ("None", "leave it")),
    "a scheduler of another optimizer": (
        lambda: scheduled(), ("StepLR", "class SGD, was not prepared", "accelerator.prepare(")
    ),
    "a model to be clipped": (
        lambda: accelerator(mesh="dp=1", plan="ddp").clip_grad_norm_(Net(), 1.0),
        ("a Net", "model.parameters()"),
    ),
    "a dict for TrainingArguments": (
        lambda: trainer(model=Net(), args={"max_steps": 1}, mesh="dp=1"), ("a dict", "TrainingArg"),
    ),
    "a loss of too few arguments": (
        lambda: trainer(model=Net(), mesh="dp=1", compute_loss_func=lambda outputs, y: outputs),
        ("compute_loss_func", "'num_items_in_batch'", "num_items_in_batch=None"),
    ),
    # words
    "an op without its library": (lambda: rule("relu", "m->m"), ("two parts", "'aten.relu'")),
    "a pass misspelt": (
        lambda: misplaced("insert_colectives"), ("_colectives'", "mean 'insert_collectives'"),
    ),
    "a colon in a mesh": (lambda: partc.Mesh.of("dp:2"), ("'dp:2' is not", "Write 'dp=2'.")),
    "blanks in a mesh": (lambda: partc.Mesh.of("dp = 2 ; tp = 4"), ("Write 'dp=2,tp=4'.",)),
    "a class for a dataset": (
        lambda: of_stage(lambda stage: stage.loader(Net)), ("the class Net", "Make one: Net(...)")
    ),
    "a dim from the end": (
        lambda: compiled(plan='preset = "ddp"\n[params]\n"up.weight" = { dp = -1 }'),
        ("params.up.weight", "-1", "counted from 0"),
    ),
    "a file of another name": (lambda: compiled(plan="plan.tml"), ("ends in .toml",)),
    "weights that are not there": (
        lambda: of_stage(lambda stage: stage.load_full("none.safetensors")),
        ("none.safetensors", "cannot be read", "that is there"),
    ),
    "torch.compile": (
        lambda: accelerator(mesh="dp=1", dynamo_backend="inductor"),
        ("Accelerator(dynamo_backend=...)", '"compile": "inductor"'),
    ),
}  # fmt: skip
FOLDERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "no step": (saved_twice, ("no step= is given", "step-00000000", "step=100")),
    "no loss": (loaded, ("with_model: no loss= is given", "(x, target)", "takes (x)")),
    "another loss": (
        lambda at: loaded(at, lambda model, x: model(x).sum()), ("loss takes (x)", "(x, target"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_gets_a_sentence(name: str) -> None:
    check(CALLS[name])


@pytest.mark.parametrize("name", FOLDERS)
def test_a_mistake_with_a_folder_gets_a_sentence(name: str, tmp_path: Path) -> None:
    make, words = FOLDERS[name]
    check((lambda: make(tmp_path), words))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[params]\n"a.b" = {}\n"a.b" = {}\nc = 1', '[params] "a.b" stands in line 2 and '),
        ("[a]\nx = 1\n[b]\nx = 1\n[a]\ny = 1", "[a] stands in line 1 and again in 5"),
        ("[[d]]\nx = 1\n[[d]]\nx = 1\nx = 2", "[d] x stands in line 4 and again in 5"),
        ('preset = "ddp"\npreset', "end of document): preset"),
    ],
)  # fmt: skip
def test_what_stands_twice_in_a_file_is_named_by_its_lines(text: str, words: str) -> None:
    with pytest.raises(Unreadable, match=re.escape(words)):
        toml_table(text)


def test_labels_that_torch_reads_are_no_mistake() -> None:
    assert labelled(lambda m, x, y: F.cross_entropy(m(x), y), torch.int64)


def test_inputs_by_place_may_be_padded() -> None:
    assert padded(x=0) is not None
