"""Modes, losses and generation over one stage's weights, on real gloo processes, in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import RunError
from partc.program import Program
from partc.program.step.results import Results
from partc.verification.processes import Processes
from tests.program.families import (
    ROWS,
    begun,
    bytes_of_model,
    close,
    compare_step,
    compiled,
    critic_loss,
    gan,
    images,
    language,
    language_loss,
    maker_loss,
    picture_loss,
    pictures,
    tokens,
)

pytestmark = pytest.mark.gloo


# modes ---------------------------------------------------------------------------------------
def modes_of_pictures(mesh: str, plan: str) -> None:
    """Batch norm trains its statistics and evaluates with them; dropout is off in eval mode."""
    compiled_from, model = pictures(), pictures()
    compiled_from.drop.p = model.drop.p = 0.0
    program = partc.compile(compiled_from, mesh, images(8), loss=picture_loss, plan=plan)
    stage = begun(program, compiled_from)
    for seed, rows in enumerate((8, 6, 8)):
        batch = images(rows, seed=seed)
        stage.train()
        compiled_from.eval()
        compare_step(stage, model.train(), stage.step(*batch), picture_loss(model, *batch))
        stage.eval()
        close(stage(batch[0]), model.eval()(batch[0]), "results")
        close(stage.eval_step(*batch), picture_loss(model, *batch), "loss in eval mode")
        for name, buffer in stage.named_buffers():
            close(buffer, model.get_buffer(name), name)
    with pytest.raises(RunError, match="the stage is in eval mode"):
        stage.step(*images(8))


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "plan"), [("dp=2", "fsdp"), ("pp=2", "ddp")])
def test_train_and_eval_mean_what_they_say(world: Processes, mesh: str, plan: str) -> None:
    world.run(modes_of_pictures, mesh, plan, num=2)


def dropped_out() -> None:
    """Evaluations between two steps do not change what the steps draw."""
    kept = pictures()
    program = partc.compile(kept, "dp=2", images(8), loss=picture_loss, plan="ddp")
    plain, between = (begun(program, pictures()) for _ in range(2))
    for stage in (plain, between):
        stage.seed(5)
    for seed in range(2):
        between.eval_step(*images(8))
        close(between.step(*images(8, seed=seed)), plain.step(*images(8, seed=seed)), "loss")
    assert plain.seeded == between.seeded == (5, 2)
    twin = copy.deepcopy(between)
    close(twin.step(*images(8)), plain.step(*images(8)), "loss of a copy")


def test_evaluations_leave_the_draws_of_steps_alone(world: Processes) -> None:
    world.run(dropped_out, num=2)


def evaluated_first() -> None:
    """A model that is compiled in eval mode trains so, until ``train()`` is called."""
    model = pictures().eval()
    stage = begun(partc.compile(model, "dp=2", images(8), loss=picture_loss, plan="ddp"), model)
    assert not stage.training
    reference = pictures().eval()
    for rows in (8, 6):
        batch = images(rows)
        compare_step(stage, reference, stage.step(*batch), picture_loss(reference, *batch))
    stage.train()
    stage.step(*images(8))
    assert not torch.equal(stage.get_buffer("norm.running_mean"), torch.zeros(4))


@pytest.mark.exhaustive
def test_a_model_in_eval_mode_trains_in_eval_mode_until_told_otherwise(world: Processes) -> None:
    world.run(evaluated_first, num=2)


# several losses, backwards and optimizers ----------------------------------------------------
def train_gan(mesh: str, plan: str) -> None:
    """Two losses over one set of weights, an optimizer for each half of the model."""
    model, reference = gan(), gan()
    generator = torch.Generator().manual_seed(0)
    real, noise = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (6, 4))
    program = partc.compile(model, mesh, (real, noise), loss=critic_loss, plan=plan)
    stage = begun(program, model)
    maker = stage.share(program.also(noise, loss=maker_loss))
    ours, theirs = ([optimizer_of(m, half) for half in HALVES] for m in (stage, reference))
    for _ in range(3):
        turns: list[tuple[Any, Any, tuple[Tensor, ...]]] = [
            (critic_loss, stage.step, (real, noise)), (maker_loss, maker.step, (noise,)),
        ]  # fmt: skip
        for which, (loss, run, batch) in enumerate(turns):
            stage.zero_grad()
            reference.zero_grad()
            expected = loss(reference, *batch)
            close(run(*batch), expected, loss.__name__)
            expected.backward()
            ours[which].step()
            theirs[which].step()
    for name, tensor in stage.full_state_dict().items():
        close(tensor, reference.get_parameter(name), name)
    close(maker.eval_step(noise[:4]), maker_loss(reference, noise[:4]), "a smaller batch")
    assert bytes_of_model(stage) == bytes_alone(program)


HALVES = ("critic", "maker")


def optimizer_of(model: nn.Module, half: str) -> torch.optim.Optimizer:
    params = [p for name, p in model.named_parameters() if name.startswith(half)]
    return torch.optim.AdamW(params, lr=1e-2)


def bytes_alone(program: Program) -> int:
    return bytes_of_model(program.module())


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "plan"), [("dp=2", "fsdp"), ("tp=2", "megatron")])
def test_a_generator_and_its_critic_share_weights(world: Processes, mesh: str, plan: str) -> None:
    world.run(train_gan, mesh, plan, num=2)


class Normed(nn.Module):
    """A generator with a batch norm, and its critic."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(4, 8, bias=False)  # before a norm the gradient of a bias is noise
        self.maker = nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def normed_critic_loss(gan: Normed, real: Tensor, noise: Tensor) -> Tensor:
    copies = {name: buffer.clone() for name, buffer in gan.maker.named_buffers()}
    fake = torch.func.functional_call(gan.maker, copies, (noise,))
    return critic_of(gan, real, fake.detach())


def critic_of(gan: Normed, real: Tensor, fake: Tensor) -> Tensor:
    loss: Tensor = F.softplus(-gan.critic(real)).mean() + F.softplus(gan.critic(fake)).mean()
    return loss


def normed_maker_loss(gan: Normed, noise: Tensor) -> Tensor:
    return F.softplus(-gan.critic(gan.maker(noise))).mean()


def run_once(mesh: str, plan: str) -> None:
    """The script runs the generator once in an iteration; the programs do twice."""
    torch.manual_seed(0)
    model = Normed().double()
    reference = copy.deepcopy(model)
    numbers = torch.Generator().manual_seed(1)
    real, noise = (torch.randn(8, n, generator=numbers, dtype=torch.float64) for n in (6, 4))
    program = partc.compile(model, mesh, (real, noise), loss=normed_critic_loss, plan=plan)
    stage = begun(program, model)
    maker = stage.share(program.also(noise, loss=normed_maker_loss))
    ours, theirs = ([optimizer_of(m, half) for half in HALVES] for m in (stage, reference))
    for _ in range(3):
        fake = reference.maker(noise)
        stage.zero_grad()
        reference.zero_grad()
        critic_of(reference, real, fake.detach()).backward()
        stage.step(real, noise)
        ours[0].step()
        theirs[0].step()
        stage.zero_grad()
        reference.zero_grad()
        F.softplus(-reference.critic(fake)).mean().backward()
        maker.step(noise)
        ours[1].step()
        theirs[1].step()
    whole = stage.full_state_dict()
    for name, tensor in reference.state_dict().items():
        close(whole[name], tensor, name)


@pytest.mark.exhaustive
def test_a_generator_with_batch_norms_that_runs_once(world: Processes) -> None:
    world.run(run_once, "dp=2", "fsdp", num=2)


def otherwise_stored() -> None:
    model, noise = gan(), torch.randn(8, 4, dtype=torch.float64)
    real = torch.randn(8, 6, dtype=torch.float64)
    stage = partc.compile(model, "dp=2", (real, noise), loss=critic_loss, plan="ddp").module()
    other = partc.compile(model, "dp=2", (noise,), loss=maker_loss, plan="fsdp")
    with pytest.raises(RunError, match="programs of one stage share the memory of its weights"):
        stage.share(other)


@pytest.mark.exhaustive
def test_a_program_that_stores_weights_otherwise_is_refused(world: Processes) -> None:
    world.run(otherwise_stored, num=2)


def two_backwards() -> None:
    """Losses of two lengths, added up before one backward; then a layer is frozen and thawed."""
    kept, model = language(), language()
    stage = begun(compiled("fsdp", tokens(ROWS, 4), kept), kept)
    batches = tokens(ROWS, 4), tokens(ROWS, 5)
    loss = 2 * stage(*batches[0]) + stage(*batches[1])
    loss.backward()
    expected = 2 * language_loss(model, *batches[0]) + language_loss(model, *batches[1])
    compare_step(stage, model, loss, expected)
    for frozen in (True, False):
        for each in (stage, model):
            each.get_parameter("mix.weight").requires_grad_(not frozen)
        for batch in batches:
            compare_step(stage, model, stage.step(*batch), language_loss(model, *batch))


@pytest.mark.exhaustive
def test_two_lengths_in_one_backward_and_frozen_layers(world: Processes) -> None:
    world.run(two_backwards, num=2)


# generation ----------------------------------------------------------------------------------
def generated(model: Callable[[Tensor], Tensor], prompt: Tensor, size: int) -> Tensor:
    """Plain greedy and sampling code, in a window of one length: positions behind are not seen."""
    ids, draw = torch.zeros(len(prompt), size, dtype=torch.long), torch.Generator().manual_seed(0)
    ids[:, : prompt.shape[1]] = prompt
    for at in range(prompt.shape[1], size):
        logits = model(ids)[:, at - 1]
        taken = logits.argmax(-1)
        if at % 2:
            taken = torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0]
        ids[:, at] = taken
    return ids


def generate(layout: str, rows: int) -> None:
    model, prompt = language(), tokens(rows, 3)[0]
    stage = begun(compiled(layout, tokens(ROWS, 8), model), model).eval()
    found = generated(stage, prompt, 8)
    assert torch.equal(found, generated(model, prompt, 8))
    assert len(stage._own.members) == 2


@pytest.mark.rows(1)
@pytest.mark.parametrize(("layout", "rows"), [("fsdp", 1), ("tp", 1), ("pp", 2)])
def test_a_language_model_generates_without_compiling_for_each_length(
    world: Processes, layout: str, rows: int
) -> None:
    world.run(generate, layout, rows, num=2)


def several_results() -> None:
    """Results come in the structure in which the model returns them, without a warning."""
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for form in FORMS:
        model = Both(form).double()
        program = partc.compile(model, "dp=2", (x,), loss=first_of, plan="ddp", batch="local")
        stage = begun(program, model).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = stage(x)
        wanted = model(x)
        assert type(found) is (Results if form is with_a_cache else type(wanted))
        for one, other in zip(parts_of(found), parts_of(wanted), strict=True):
            close(one, other, form.__name__)


def parts_of(found: Any) -> list[Tensor]:
    if isinstance(found, tuple):
        first, second = found
        return [first, second]
    return [found["first"], found["second"]] if isinstance(found, dict) else [*vars(found).values()]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Fields:
    first: Tensor
    second: Tensor


def in_a_tuple(first: Tensor, second: Tensor) -> Any:
    return first, second


def by_name(first: Tensor, second: Tensor) -> Any:
    return {"first": first, "second": second}


def with_a_cache(first: Tensor, second: Tensor) -> Any:
    return {"first": first, "second": second, "cache": object()}


FORMS: tuple[Callable[[Tensor, Tensor], Any], ...] = in_a_tuple, by_name, Pair, Fields, with_a_cache


class Both(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(6, 6), form

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.form(y, y.square())


def first_of(model: nn.Module, x: Tensor) -> Tensor:
    return parts_of(model(x))[0].square().mean()


@pytest.mark.exhaustive
def test_results_have_the_structure_of_the_model_s(world: Processes) -> None:
    world.run(several_results, num=2)
