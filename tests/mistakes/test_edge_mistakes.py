"""What scripts do at the edges of a step: with what it gives back, its inputs and its noise."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import partc
from partc.program.model import habits
from partc.rules.table import rule
from tests.forked_scripts import run_ranks
from tests.mistakes.things import Net, batch_of, check, compiled, loss_of, one_rank

X, Y = batch_of()


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield
    of_extras.cache_clear()


def with_extras(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> Any:
    result = model(x)
    far = (result - target).abs().mean()
    return nn.functional.mse_loss(result, target), {"far": far, "result": result}


@cache
def of_extras() -> Any:
    return compiled(mesh="dp=1", loss=with_extras).module()


def on_extras(train: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    return lambda: train(*of_extras()(X, Y))


@pytest.mark.parametrize(
    "train",
    [
        lambda loss, extras: extras["far"].backward(),
        lambda loss, extras: extras["far"].mean().mul(2).backward(),
        lambda loss, extras: nn.functional.mse_loss(extras["result"], Y).backward(),
        lambda loss, extras: (loss + 0.1 * extras["far"]).backward(),
        lambda loss, extras: (extras["result"].square().mean() - loss).backward(),
        lambda loss, extras: (extras["far"] + loss).backward(),
        lambda loss, extras: torch.stack([loss, extras["far"]]).sum().backward(),
        lambda loss, extras: torch.autograd.grad(extras["far"], list(of_extras().parameters())),
    ],
)
def test_what_stands_beside_the_loss_is_not_trained_on(train: Callable[[Any, Any], Any]) -> None:
    check((on_extras(train), ("gives beside its loss", "return loss + aux", "program.also")))


def test_what_stands_beside_the_loss_is_as_any_tensor_without_a_gradient() -> None:
    loss, extras = of_extras()(X, Y)
    head = nn.Linear(4, 1)
    (loss / extras["far"] + head(extras["result"]).mean() + extras["far"].detach()).backward()
    assert head.weight.grad is not None
    assert extras["result"].numpy().shape == (8, 4)
    assert type(pickle.loads(pickle.dumps(extras["far"]))) is torch.Tensor
    assert f"{extras['far']:.2f}" == f"{float(extras['far']):.2f}"


def test_an_input_that_waits_for_a_gradient_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = compiled(mesh="dp=1").module()
    for x, words in (
        (X.clone().requires_grad_(), "x has requires_grad, and x.grad stays"),
        (X.clone().requires_grad_() * 2, "x was computed by what has requires_grad"),
    ):
        monkeypatch.setattr(habits, "TOLD", set())
        with pytest.warns(UserWarning, match=words):
            mine.step(x, Y)
        mine.step(x, Y)
        mine.eval_step(x, Y)


def slope(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    u = model(x)
    du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    return (du - target).square().mean()


def test_an_input_by_which_the_step_itself_takes_derivatives_is_not_told(tmp_path: Path) -> None:
    x = X.clone().requires_grad_()
    found = compiled(mesh="dp=1", loss=slope, inputs=(x, Y))
    found.module().step(x, Y)
    found.save(tmp_path)
    loaded = partc.load(tmp_path).module()
    loaded.load_full(Net())
    loaded.step(x, Y)


class Drops(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x))


def test_a_generator_of_torch_that_is_seeded_between_steps_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(habits, "TOLD", set())
    mine = compiled(mesh="dp=1", model=Drops()).module()
    for _ in range(2):
        torch.randn(3)
        mine.step(X, Y)
        with torch.random.fork_rng():
            torch.manual_seed(3)
    torch.manual_seed(7)
    mine.seed(7)
    mine.step(X, Y)
    torch.randn(3)
    mine.step(X, Y)
    assert "stage.seed" not in caplog.text
    for _ in range(2):
        torch.manual_seed(7)
        mine.step(X, Y)
    assert caplog.text.count("stage.seed(seed)") == 1


# exports, samplers, streams ------------------------------------------------------------------
def parallel(**named: Any) -> Any:
    return partc.parallelize(Net(), "dp=1", loss=loss_of, plan="ddp", **named)


EXPORTS: dict[str, Callable[[Any], Any]] = {
    "torch.jit.trace": lambda of: torch.jit.trace(of, (X, Y)),
    "torch.jit.script": torch.jit.script,
    "torch.export": lambda of: torch.export.export(of, (X, Y)),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("made", [lambda: compiled(mesh="dp=1").module(), parallel])
@pytest.mark.parametrize("call", EXPORTS)
def test_an_export_of_a_stage_says_what_to_export(call: str, made: Callable[[], Any]) -> None:
    check((lambda: EXPORTS[call](made()), (call, "no whole model", "stage.full_state_dict()")))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


@pytest.mark.parametrize("split", ["rows", "own"])
def test_a_stream_without_a_length_says_so(split: Any) -> None:
    loader = compiled(mesh="dp=1", batch="local").module().loader(Stream(), split=split)
    check((lambda: len(loader), ("the Stream has no length", "Give it __len__")))
    assert len(list(loader)) == 1


def test_a_sampler_of_steps_is_no_sampler_of_rows() -> None:
    rows, program = TensorDataset(*batch_of(16)), compiled(mesh="dp=1")
    loader = DataLoader(rows, sampler=program.sampler(rows), batch_size=8)
    words = ("each batch would be 8 batches", "batch_sampler=program.sampler(dataset)")
    check((lambda: next(iter(loader)), words))
    assert len(list(DataLoader(rows, batch_sampler=program.sampler(rows)))) == 2
    assert len(list(DataLoader(rows, sampler=program.sampler(rows), batch_size=None))) == 2


# wrappers and words --------------------------------------------------------------------------
def test_torchs_wrappers_around_a_parallel_model_are_named() -> None:
    ddp = nn.parallel.DistributedDataParallel
    words = ("parallelize has made", "Leave DistributedDataParallel out")
    check((lambda: ddp(parallel()), words))
    check((parallel()._replicate_for_data_parallel, ("Leave DataParallel out",)))


def test_a_pad_of_no_input_is_told() -> None:
    with pytest.warns(UserWarning, match=r"pad=.'input_ids': .* the inputs are target, x"):
        parallel(pad={"input_ids": 0}).step(X, Y)
    parallel(pad={"x": 0, "later": 0}).step(X, Y)


class ByName(Net):
    def forward(self, *, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


class Prints(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        print(f"{y.sum():.3f}")
        return y


class Counts(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / dist.get_world_size()


def by_name(*args: Any) -> Any:
    with torch.no_grad():
        program = compiled(model=ByName(), mesh="dp=1", inputs={"x": X}, loss=None)
    return program.module()(*args)


def hooked(entry: str) -> Any:
    plan = partc.Plan(preset="ddp", hooks=(entry,))
    return compiled(model=nn.Sequential(Net(), Net()), plan=plan)


def generated() -> None:
    mine = compiled(mesh="dp=1").module(most_programs=3).eval()
    for rows in (8, 7, 6, 5):
        mine(X[:rows])


MISTAKES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "inputs by place": (
        lambda: compiled(model=ByName(), inputs=(X,), loss=None),
        ("go by name", "inputs as a dict, {'x': ...}"),
    ),
    "a call by place": (lambda: by_name(X), ("Pass by name: x=...",)),
    "a print": (lambda: compiled(model=Prints()), ("print(f", "to print or log it", "extras")),
    "an op with colons": (lambda: rule("um::twice", "m->m"), ("um::twice", "'um.twice'")),
    "a hook of one block": (lambda: hooked("1.dwn"), ("Did you mean '*.down'",)),
    "many lengths": (generated, ("has 3 programs", "pad ids on the right", "most_programs=4")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake: str) -> None:
    check(MISTAKES[mistake])


# gradients that nobody keeps, transforms, parts that are replaced -----------------------------
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_has_no_backward_and_spoils_no_later_step(mode: Any) -> None:
    mine = compiled(mesh="dp=1").module()
    with mode():
        loss = mine(X, Y)
        mine.step(X, Y)
    check((loss.backward, ("stage was called under torch.no_grad()", "outside of it")))
    check(((loss * 2).backward, ("", "without gradients")))
    mine.step(X, Y)
    mine(X, Y).backward()
    assert not mine.up.weight.grad.is_inference()
    assert f"{loss:.4f}" == f"{mine.step(X, Y):.4f}"


@pytest.mark.parametrize(
    "transform",
    [
        lambda of: torch.vmap(of)(X[None], Y[None]),
        lambda of: torch.func.grad(lambda p: torch.func.functional_call(of, p, (X, Y)))(
            dict(of.named_parameters())
        ),
    ],
)
def test_a_transform_of_a_stage_is_named(transform: Any) -> None:
    mine = compiled(mesh="dp=1").module()
    check((lambda: transform(mine), ("torch.func", "inside of the loss that is compiled")))


def test_a_model_that_asks_for_ranks_is_told_to_leave_that_out(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from tests.mistakes.test_edge_mistakes import *\n"
        "check((lambda: compiled(model=Counts()), ('no', 'Leave torch.distributed out')))"
    )
    (done,) = run_ranks(script, num=1)
    assert done.code == 0, done.text


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "change",
    [
        lambda part: prune.l1_unstructured(part, "weight", 0.3),
        lambda part: nn.utils.spectral_norm(part),
        lambda part: nn.utils.weight_norm(part),
        lambda part: parametrizations.weight_norm(part),
        lambda part: delattr(part, "bias"),
    ],
)
def test_a_tensor_that_is_to_be_taken_away_stays(change: Callable[[nn.Module], Any]) -> None:
    mine = compiled(mesh="dp=1").module()
    names = [name for name, _ in mine.named_parameters()]
    part = next(each for each in mine.modules() if isinstance(each, nn.Linear))
    check((lambda: change(part), ("of a stage's module", "compile")))
    assert [name for name, _ in mine.named_parameters()] == names
    mine.step(X, Y)


def test_an_average_of_the_model_is_refused_where_the_stage_is_trained() -> None:
    model = Net()
    mine = compiled(model=model, mesh="dp=1").module()
    of_model, of_stage = AveragedModel(model), AveragedModel(mine)
    mine.step(X, Y)
    of_stage.update_parameters(mine)
    check(
        (lambda: of_model.update_parameters(model), ("which no step trains", "Average the stage"))
    )
