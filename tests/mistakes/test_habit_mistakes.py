"""Mistakes out of habit: what other libraries have under this name, or do otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from tests.mistakes.things import Net, batch_of, check, compiled, loss_of, one_rank
from tests.mistakes.things import program as two_ranks

X, Y = batch_of()
api: Any = partc  # whose types forbid most of this
program: Any = two_ranks
Called = tuple[Callable[[Path], Any], tuple[str, ...]]  # with a folder to write into


class Talks(Net):
    """A model with a method that calls it."""

    def generate(self, x: Tensor) -> Tensor:
        result: Tensor = self(x)
        return result


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield
    stage.cache_clear()


@cache
def stage(model: type[nn.Module] = Net) -> Any:
    return compiled(model=model(), mesh="dp=1").module()


def evaluated() -> Any:
    """What a stage in eval mode gives for X."""
    found = compiled(mesh="dp=1").module().eval()
    return found(X)


def saved(folder: Path) -> Path:
    two_ranks().save(folder / "build")
    return folder / "build"


def kept(folder: Path) -> Path:
    api.save_checkpoint(folder / "kept", stage())
    return folder / "kept"


def clipped() -> None:
    params = compiled(mesh="dp=1").module().parameters()
    torch.nn.utils.clip_grad_value_(params, 1.0)


def verified() -> Any:
    return api.verify(two_ranks(), Net(), (X, Y), loss=loss_of)


def two_losses(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    return [model(x).mean(), model(x).square().sum()]


MISTAKES: dict[str, Called] = {
    "backward of a forward": (
        lambda at: evaluated().backward(torch.ones(8, 4)), ("eval mode", "stage.step(...)"),
    ),
    "backward of what it gave": (
        lambda at: (evaluated() - Y).square().sum().backward(), ("eval mode", "stage.train()"),
    ),
    "an input alone": (lambda at: stage()(X), ("'target'", "(x, target)", "stage.eval()")),
    "too many inputs": (
        lambda at: stage().step(X, Y, X, Y), ("4 are given", "behind target", "scale=... goes by"),
    ),
    "generate": (lambda at: stage().generate(X), ("stage.generate", "loop over stage(ids)")),
    "generate of the model": (
        lambda at: stage(Talks).generate(X), ("(generate) calls it", "that over stage(...)"),
    ),
    "generate of a program": (lambda at: program().generate(X), ("one step", "stage(ids)")),
    "clip by value": (lambda at: clipped(), ("none of the stage's", "between stage.step")),
    "clip_grad_value_": (
        lambda at: stage().clip_grad_value_(1.0), ("clip_grad_value_(stage.parameters(), value)",),
    ),
    "verify": (lambda at: program().verify, ("program.verify", "partc.verify(program, model")),
    "a file": (
        lambda at: program().sources["stage1.py"], ("'stage1.py'", "Did you mean 'stage0.py'"),
    ),
    "a number for a file": (lambda at: program().sources[0], ("stage0.py", "source(rank)")),
    "a tolerance": (lambda at: verified().check(tol=1), ("'tol'", "Did you mean 'tolerance'")),
    "a tolerance of verify": (
        lambda at: api.verify(program(), Net(), (X, Y), tol=1), ("check(tolerance=...)",),
    ),
    "a word of clip_grad_norm_": (
        lambda at: stage().clip_grad_norm_(max_nrom=1.0), ("Did you mean 'max_norm'",),
    ),
    "a word of load_full": (lambda at: stage().load_full(Net(), stric=False), ("mean 'strict'",)),
    "a word of seed": (lambda at: stage().seed(sed=1), ("Did you mean 'seed'",)),
    "a word of source": (lambda at: program().source(rnk=0), ("Did you mean 'rank'",)),
    "a word of for_shapes": (lambda at: program().for_shapes((X, Y), mode=()), ("mean 'modes'",)),
    "a word of also": (lambda at: program().also((X, Y), los=loss_of), ("mean 'loss'",)),
    "a size of batches": (
        lambda at: program().sampler(range(16), 0, batch_size=4),
        ("'batch_size'", "rows_per_step=...", "all data ranks together"),
    ),
    "weights of a program": (
        lambda at: stage().load_full(saved(at)), ("no folder of weights", "partc.load(folder)"),
    ),
    "weights of checkpoints": (
        lambda at: stage().load_full(kept(at)), ("no folder of weights", "load_checkpoint"),
    ),
    "weights of a checkpoint": (
        lambda at: stage().load_full(kept(at) / "step-00000000"), ("load_checkpoint",),
    ),
    "a checkpoint of a program": (
        lambda at: api.load_checkpoint(saved(at), stage()), ("a program, without weights",),
    ),
    "a program of checkpoints": (lambda at: api.load(kept(at)), ("partc.load_checkpoint(folder",)),
    "a cost": (lambda at: float(program().cost), ("is no number", '["prediction"]["seconds"]')),
    "two losses": (
        lambda at: compiled(loss=two_losses), ("a list of 2", "sum(losses)", "(loss, extras)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_habit_gets_a_sentence(tmp_path: Path, mistake: str) -> None:
    call, words = MISTAKES[mistake]
    check((lambda: call(tmp_path), words))


def test_a_result_is_a_tensor_as_any() -> None:
    result = evaluated()
    assert repr(result).startswith("tensor(")
    assert f"{result.sum():.3f}" == f"{result.sum().item():.3f}"
    assert type(result.argmax(-1)) is Tensor
    head = nn.Linear(4, 1)
    head(result).sum().backward()
    assert head.weight.grad is not None
    with torch.no_grad():
        assert type(evaluated()) is Tensor


def test_a_list_of_a_loss_and_what_is_looked_at_is_taken() -> None:
    compiled(loss=lambda m, x, y: [loss_of(m, x, y), m(x).detach().sum()])
