"""Mistakes of scripts that load, run and save: each answer names the culprit and the remedy."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import partc
from partc.program.model import habits
from tests.mistakes.things import Net, batch_of, check, compiled, one_rank
from tests.mistakes.things import program as two_ranks

X, Y = batch_of()
ROWS = TensorDataset(*batch_of(16))
api: Any = partc  # whose types forbid most of this
program: Any = two_ranks
Called = tuple[Callable[[Path], Any], tuple[str, ...]]  # with a folder to write into


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield
    stage.cache_clear()
    words_first.cache_clear()


@cache
def one() -> Any:
    return compiled(mesh="dp=1")


@cache
def stage() -> Any:
    return one().module()


@cache
def words_first() -> Any:
    """A stage whose inputs differ in kind."""

    def loss(model: nn.Module, labels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), labels)

    made = compiled(mesh="dp=1", inputs=(torch.zeros(8, dtype=torch.long), X), loss=loss).module()
    made.load_full(Net())
    return made


def index(folder: Path, content: str) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(content)
    stage().load_full(path)


def weight_map(name: Any) -> str:
    return json.dumps({"weight_map": {"up.weight": name}})


def saved(folder: Path, model: Any) -> None:
    program().save(folder / "build")
    api.load(folder / "build", model)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(stage().parameters(), 0.1)


def of_torch(path: Path) -> None:
    torch.save(Net().state_dict(), path)
    stage().load_full(path)


def evaluated(*given: Any, **named: Any) -> Any:
    """What another stage gives in eval mode."""
    return one().module(**named).eval()(*given)


class Rows(nn.Sequential):
    """A model whose parts have no names."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Linear(8, 4))


def of_rows() -> Any:
    return compiled(model=Rows(), mesh="dp=1").module()


MISTAKES: dict[str, Called] = {
    "no part": (lambda at: stage().encoder, ("stage.encoder", "no Net has it", "has up, down")),
    "a part of a list": (
        lambda at: of_rows().encoder,
        ("no Rows has it", "by number, stage[0]: it has 0, 1"),
    ),
    "a part misspelt": (lambda at: stage().dwn, ("Did you mean 'down'",)),
    "a stage that saves": (lambda at: stage().save(at), ("partc.save_checkpoint(folder, stage",)),
    "a stage that loads": (lambda at: stage().load(at), ("load_full", "partc.load_checkpoint(")),
    "a checkpoint": (lambda at: stage().load_checkpoint(at), ("partc.load_checkpoint(folder",)),
    "a loss of a stage": (lambda at: stage().loss(X, Y), ("loss = stage.step(*batch)",)),
    "an optimizer": (lambda at: stage().optimizer, ("AdamW(stage.parameters())",)),
    "a model for a stage": (lambda at: one().module(Net()), ("partc.load(folder, model)",)),
    "the order of a batch": (
        lambda at: words_first().step(X, torch.zeros(8, dtype=torch.long)),
        ("another order: pass step(labels, x)",),
    ),
    "the keys of a batch": (
        lambda at: stage().step(*{"x": X, "target": Y}),
        ("names 'x', 'target'", "step(**batch)"),
    ),
    "a step in eval mode": (
        lambda at: evaluated(X, Y),
        ("it is given (x, target)", "stage.eval_step(x, target)"),
    ),
    "one program": (
        lambda at: one().module(most_programs=1).step(X[:4], Y[:4]),
        ("float32[4, 4]", "module(most_programs=1)", "Without most_programs=1"),
    ),
    "one program in eval mode": (
        lambda at: evaluated(X, most_programs=1),
        ("eval", "module(most_programs=2)"),
    ),
    "a dataset without rows": (lambda at: stage().loader([]), ("0 rows", "no rows", "filters")),
    "sparse": (lambda at: stage().step(X.to_sparse(), Y), ("a sparse tensor", "to_dense")),
    "numpy": (lambda at: stage().step(X.numpy(), Y), ("step, x", "ndarray")),
    "a tuple": (lambda at: stage().step((X, Y)), ("'target'", "(x, target)")),
    "scale": (lambda at: stage().step(X, Y, scale="2"), ("scale", "'2'", "1 / 4")),
    "scale vector": (lambda at: stage().step(X, Y, scale=X), ("scale", "a Tensor", "f32[]")),
    "no step kept": (
        lambda at: partc.Checkpoints(at, keep_latest_k=0),
        ("keep_latest_k", "None, to keep all"),
    ),
    "a negative number": (
        lambda at: partc.Checkpoints(at, keep_latest_k=-1),
        ("-1", "the least is 1"),
    ),
    "seed": (lambda at: stage().seed("a"), ("seed", "'a'", "whole number")),
    "seed half": (lambda at: stage().seed(1.5), ("seed", "1.5")),
    "seed step": (lambda at: stage().seed(0, -1), ("seed(step=...)", "-1", "0 or more")),
    "clip": (lambda at: stage().clip_grad_norm_("1"), ("max_norm is '1'", "max_norm=1.0")),
    "clip norm": (lambda at: stage().clip_grad_norm_(1.0, "two"), ("norm_type is 'two'",)),
    "loader seed": (lambda at: stage().loader([X] * 16, seed="a"), ("loader(seed=...)", "'a'")),
    "weights number": (lambda at: stage().load_full(3), ("the source is 3", "state dict")),
    "weights class": (lambda at: stage().load_full(Net), ("the class Net", "state dict")),
    "weights list": (lambda at: stage().load_full([X]), ("a list", "state dict")),
    "weights text": (lambda at: stage().load_full({"up.weight": "x"}), ("up.weight", "'x'")),
    "weights numpy": (lambda at: stage().load_full({"up.bias": X.numpy()}), ("torch.as_tensor",)),
    "weights nested": (
        lambda at: stage().load_full({"model": Net().state_dict()}),
        ("checkpoint['model']",),
    ),
    "weights wrapped": (
        lambda at: stage().load_full(nn.DataParallel(Net())),
        ("state dict of model.module",),
    ),
    "weights compiled": (
        lambda at: stage().load_full(torch.compile(Net())),
        ("state dict of model._orig_mod",),
    ),
    "weights optimizer": (lambda at: stage().load_full(sgd().state_dict()), ("an optimizer",)),
    "weights complex": (
        lambda at: stage().load_full({k: v + 1j for k, v in Net().state_dict().items()}),
        ("up.weight: float32 compiled, a complex tensor given",),
    ),
    "index list": (lambda at: index(at, "[]"), ("index.json", "malformed", "weight_map")),
    "index brackets": (lambda at: index(at, "[" * 100_000), ("malformed", "weight_map")),
    "index empty": (lambda at: index(at, '{"weight_map": {}}'), ("no file", "weight_map")),
    "index number": (lambda at: index(at, weight_map(5)), ("5 is not the name", "weight_map")),
    "index outside": (
        lambda at: index(at, weight_map("../x")),
        ("'../x'", "not the name of a"),
    ),
    "index null": (lambda at: index(at, weight_map("a\0b")), ("not the name",)),
    "index device": (
        lambda at: index(at, weight_map("/dev/zero")),
        ("'/dev/zero'", "not the name of a"),
    ),
    "weights of a quantized model": (
        lambda at: stage().load_full({k: v.int() for k, v in Net().state_dict().items()}),
        ("up.weight: float32 compiled, int32 given",),
    ),
    "agreement": (lambda at: setattr(stage().agreement, "every", "10"), ("'10'", "Write 10")),
    "an array for a mesh": (lambda at: one().module(mesh=np.ones(2)), ("it is no DeviceMesh",)),
    "an array for a word": (
        lambda at: one().module(partial=np.ones(2)),
        ("no such way to treat a partial batch",),
    ),
    "a pad of nothing": (lambda at: one().module(partial="pad"), ("pad= is missing", '"x": 0')),
    "collate": (
        lambda at: next(iter(stage().loader(ROWS, collate_fn=lambda rows: rows["x"]))),
        ("TensorDataset", "TypeError", "test_stage_mistakes.py"),
    ),
    "pickle": (
        lambda at: next(
            iter(
                stage().loader(
                    ROWS,
                    collate_fn=lambda rows: rows,
                    num_workers=1,
                    multiprocessing_context="spawn",
                )
            )
        ),
        ("sent to a worker", "num_workers=0"),
    ),
    "step text": (lambda at: api.save_checkpoint(at, stage(), step="x"), ("step", "'x'")),
    "step -1": (lambda at: api.save_checkpoint(at, stage(), step=-1), ("-1", "from 0 on")),
    "step None": (lambda at: api.save_checkpoint(at, stage(), step=None), ("None", "step")),
    "steps": (lambda at: api.save_checkpoint(at, stage(), steps=3), ("Did you mean 'step'",)),
    "a model saved": (lambda at: api.save_checkpoint(at, Net()), ("a Net", "program.module()")),
    "swapped": (lambda at: api.save_checkpoint(stage(), at), ("the stage is", "module()")),
    "number saved": (lambda at: api.save_checkpoint(3, stage()), ("3 is no path",)),
    "a scheduler": (
        lambda at: api.save_checkpoint(at, stage(), torch.optim.lr_scheduler.StepLR(sgd(), 1)),
        ("a StepLR", "the optimizer itself"),
    ),
    "optimiser": (
        lambda at: api.load_checkpoint(at, stage(), optimiser=None),
        ("Did you mean 'optimizer'",),
    ),
    "rank text": (lambda at: program().source("0"), ("rank", "'0'", "whole number")),
    "rank half": (lambda at: program().source(0.5), ("rank", "0.5")),
    "rank 9": (lambda at: program().source(9), ("rank 9", "from 0 to 1")),
    "saved to 3": (lambda at: program().save(3), ("save", "3 is no path")),
    "saved to nothing": (lambda at: program().save("a\0b"), ("save", "is no path")),
    "load nowhere": (lambda at: api.load(at / "no"), ("program.json", "program.save()")),
    "load 3": (lambda at: api.load(3), ("load", "3 is no path")),
    "load a program": (lambda at: api.load(program()), ("a Program is no path",)),
    "load for a class": (lambda at: saved(at, Net), ("the class Net", "Net(...)")),
    "load for weights": (lambda at: saved(at, Net().state_dict()), ("OrderedDict", "load_full")),
    "a gpu": (lambda at: one().module(device="gpu"), ("'gpu'", "no such device", '"cpu"')),
    "mesh text": (lambda at: one().module(mesh="dp=1"), ("'dp=1'", "init_device_mesh")),
    "pad": (lambda at: one().module(partial="pad", pad=0), ("pad", "{'x': 0}")),
    "pad name": (lambda at: one().module(pad={"targt": 0}), ("Did you mean 'target'",)),
    "programs": (lambda at: one().module(most_programs=0), ("most_programs", "1 or more")),
    "devise": (lambda at: one().module(devise="cpu"), ("Did you mean 'device'",)),
    "backward": (lambda at: stage().step(X, Y).backward(), ("gradients are there", "scale=1 / 4")),
    "backward of a part": (lambda at: (stage().step(X, Y) / 4).backward(), ("are there",)),
    "scale nan": (lambda at: stage().step(X, Y, scale=math.nan), ("nan", "scaler.get_scale()")),
    "doubles": (lambda at: stage().step(X.double(), Y), ("float64", "x.to(torch.float32)")),
    "meta": (lambda at: stage().step(X.to("meta"), Y), ("on meta", "x.to('cpu')")),
    "train eval": (lambda at: stage().train("eval"), ("'eval'", "stage.eval()")),
    "an optimizer's class": (
        lambda at: stage().step_on_pieces(torch.optim.AdamW),
        ("the class AdamW", "Make one"),
    ),
    "a scheduler steps": (
        lambda at: stage().step_on_pieces(torch.optim.lr_scheduler.StepLR(sgd(), 1)),
        ("a StepLR",),
    ),
    "ddp": (
        lambda at: nn.parallel.DistributedDataParallel(stage()),
        ("DistributedDataParallel", "a stage", "Leave DistributedDataParallel"),
    ),
    "shared loss": (lambda at: stage().share(max), ("stage.share", "program.also")),
    "a checkpoint of torch": (lambda at: of_torch(at / "w.pt"), ("w.pt", "torch.load(path")),
    "a checkpoint and its epoch": (
        lambda at: stage().load_full({"model": Net().state_dict(), "epoch": 3}),
        ("model, epoch", "checkpoint['model']"),
    ),
    "a loader saved": (
        lambda at: api.save_checkpoint(at, stage(), loader=DataLoader(ROWS)),
        ("a DataLoader", "stage.loader"),
    ),
    "a step to load": (lambda at: api.load_checkpoint(at, stage(), step=5), ("'step'", "folder")),
    "a loader of a loader": (lambda at: stage().loader(DataLoader(ROWS)), ("loader.dataset",)),
    "a batch as dataset": (lambda at: stage().loader((X, Y)), ("one batch", "TensorDataset")),
    "rows read once": (lambda at: stage().loader(iter(ROWS)), ("read once", "IterableDataset")),
    "no rows": (lambda at: stage().loader(ROWS, rows_per_step=0), ("rows_per_step", "1 or more")),
    "workers": (lambda at: stage().loader(ROWS, num_workers="2"), ("num_workers", "'2'")),
    "an option": (lambda at: stage().loader(ROWS, workers=2), ("'workers'", "DataLoader")),
    "a split of rows": (
        lambda at: stage().loader(ROWS, split="own"),
        ("split='own'", "TensorDataset", "iterable datasets", "Leave it out"),
    ),
    "a part by number": (
        lambda at: stage().__setitem__(0, nn.Linear(4, 4)),
        ("stage[0]", "a Linear was registered, assigned", "compile again"),
    ),
    "a split": (lambda at: stage().loader(ROWS, split="col"), ("'col'", "rows, own")),
    "an epoch": (lambda at: stage().loader(ROWS).set_epoch("1"), ("set_epoch", "'1'")),
    "collated": (lambda at: stage().loader(ROWS, collate_fn="pad"), ("collate_fn", "'pad'")),
    "modes": (lambda at: program().for_shapes((X, Y), modes="eval"), ("modes=('eval',)",)),
    "no tuple": (lambda at: program().for_shapes(X, Y), ("a tensor", "for_shapes((x, target)")),
    "given the model": (lambda at: api.with_model(Net(), program()), ("a Net", "with_model(pro")),
    "saved to no path": (lambda at: program().save(), ("'path'", "the folder to write")),
    "saved to no name": (lambda at: program().save(""), ("save", "is no path")),
    "a program called": (lambda at: program()(X, Y), ("program(...)", "program.module()")),
    "a program's step": (lambda at: program().step(X, Y), ("program.step", "stage.step")),
    "plan of 5": (lambda at: api.Plan.parse(5), ("5 is no text", "Plan.load")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(tmp_path: Path, mistake: str) -> None:
    call, words = MISTAKES[mistake]
    check((lambda: call(tmp_path), words))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said() -> None:
    check((lambda: one().module(device="cuda"), ("'cuda'", "sees no GPU", '"cpu"')))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (ROWS[i] for i in range(len(ROWS)))


def test_a_stream_is_not_shuffled_by_its_loader() -> None:
    check((lambda: stage().loader(Stream(), shuffle=True), ("a Stream", "shuffle in the dataset")))
    assert len(next(iter(stage().loader(Stream())))) == 2


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ()


def test_a_stream_without_a_step_is_told() -> None:
    for loader in (stage().loader(Nothing()), stage().loader(Nothing(), split="own")):
        with pytest.warns(UserWarning, match="the Nothing gave no step .* a step takes 8 rows"):
            assert list(loader) == []
    assert len(list(stage().loader(Stream()))) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_stage_moves_only_where_it_can() -> None:
    check((lambda: one().module().to("cuda"), ("stage.to", 'module(device="cuda")')))


def test_a_step_that_trains_nothing_or_whose_gradients_nobody_wants_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(habits, "TOLD", set())
    mine = one().module()
    mine.load_full(Net())
    with torch.no_grad():
        mine.step(X, Y)
        mine.step(X, Y)
    assert caplog.text.count("stage.eval_step") == 1
    mine.requires_grad_(False)
    with pytest.warns(UserWarning, match="no parameter has requires_grad"):
        mine.step(X, Y)


def test_a_program_has_no_attributes_of_a_stage() -> None:
    assert not hasattr(program(), "parameters")
    with pytest.raises(AttributeError, match="Did you mean 'save'"):
        _ = program().sav


def test_a_loss_of_a_step_is_a_tensor() -> None:
    loss = stage().step(X, Y)
    assert f"{loss:.3f}" == f"{loss.item():.3f}"
    assert repr(loss).startswith("tensor(")
    assert type(pickle.loads(pickle.dumps(loss))) is torch.Tensor
    assert type(copy.deepcopy(loss)) is torch.Tensor
    assert type(torch.stack([loss, loss])) is torch.Tensor
    assert type(loss.detach()) is torch.Tensor
    assert float(sum([loss, loss])) == pytest.approx(2 * float(loss))
