"""Scripts that compute the loss themselves, from what the model returns, as under DDP: the same
weights as in one process, on real gloo processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PartcError, RunError
from partc.verification.processes import Processes
from tests.mistakes.things import one_rank

LAYOUTS = [("dp=2", "ddp"), ("dp=2", "fsdp"), ("tp=2", "megatron"), ("dp=2,tp=2", "zero2")]
ROWS = 8


class Detector(nn.Module):
    """A batch norm, results by name: two with rows, one number, classes without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16)
        self.classes, self.box = nn.Linear(16, 5), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.relu(self.norm(self.first(x)))
        classes = self.classes(x)
        best = classes.argmax(-1)
        return {"classes": classes, "box": self.box(x), "best": best, "power": x.pow(2).mean()}


class Steps(nn.Module):
    """Sequence first, a recurrent part, nested results."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.out = nn.Embedding(11, 8), nn.LSTM(8, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, state = self.lstm(self.table(ids))
        return self.out(x), state


def detected(results: Any, target: Tensor) -> Tensor:
    assert not results["best"].requires_grad
    loss = F.cross_entropy(results["classes"], target) + 0.3 * results["power"]
    found: Tensor = loss + results["box"].pow(2).mean()
    return found


def followed(results: Any, target: Tensor) -> Tensor:
    scores, (hidden, _) = results
    found: Tensor = hidden.pow(2).mean()
    return F.cross_entropy(scores.flatten(0, 1), target.flatten()) + found


def of_detector(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 12, dtype=torch.float64, generator=drawn)
    return x, torch.randint(5, (ROWS,), generator=drawn)


def of_steps(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (6, ROWS), generator=drawn)
    return ids, torch.randint(11, (6, ROWS), generator=drawn)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any, int]] = {
    "detector": (Detector, of_detector, detected, 0),
    "steps": (Steps, of_steps, followed, 1),
}


def loop(model: Any, name: str, piece: int, num: int) -> list[float]:
    """Four steps: a call before one backward, two calls, two backwards, a call without any."""
    _, batch, loss_of, dim = MODELS[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(seed: int) -> Tensor:
        x, target = (each.chunk(num, dim)[piece] for each in batch(seed))
        found: Tensor = loss_of(model(x), target)
        return found

    losses = []
    for step in range(4):
        optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                loss(9)  # which batch norms see
        found = loss(step)
        if step == 1:
            found = found + 0.5 * loss(7)
        found.backward()
        if step == 2:
            (loss(8) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(found.item())
    return losses


def trains_alike(mesh: str, plan: str, name: str) -> None:
    torch.manual_seed(0)
    reference = MODELS[name][0]().double()
    model = partc.parallelize(copy.deepcopy(reference), mesh, plan=plan)
    found = torch.tensor(loop(model, name, model.data_rank, model.data_world))
    dist.all_reduce(found)
    expected = loop(reference, name, 0, 1)
    assert torch.allclose(found / dist.get_world_size(), torch.tensor(expected), atol=1e-6)
    state = model.full_state_dict()
    for key, value in reference.state_dict().items():
        assert torch.allclose(state[key], value, rtol=1e-11, atol=1e-12), key


@pytest.mark.gloo
@pytest.mark.rows(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS)
def test_a_loss_of_the_script_trains_as_in_one_process(
    mesh: str, plan: str, name: str, world: Processes
) -> None:
    world.run(trains_alike, mesh, plan, name, num=4 if "," in mesh else 2)


def same_gradients(model: nn.Module, reference: nn.Module) -> None:
    pairs: Any = zip(model.parameters(), reference.parameters(), strict=True)
    for ours, theirs in pairs:
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-13)


def uneven_rows() -> None:
    """The mean of both ranks' losses, of 5 and of 3 rows, as under DDP."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    model = partc.parallelize(copy.deepcopy(reference), "dp=2", plan="fsdp")
    for seed, begin in ((0, 4), (1, 5)):
        x, target = of_detector(seed)
        pieces = [slice(0, begin), slice(begin, ROWS)]
        mine = pieces[model.data_rank]
        model.zero_grad()
        F.cross_entropy(model(x[mine]), target[mine]).backward()
        reference.zero_grad()
        losses = [F.cross_entropy(reference(x[each]), target[each]) for each in pieces]
        torch.stack(losses).mean().backward()
        same_gradients(model, reference)


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_ranks_with_other_numbers_of_rows_weigh_alike(world: Processes) -> None:
    world.run(uneven_rows, num=2)


def penalised() -> None:
    """A loss of this rank's rows and a norm of all weights, which every rank has alike."""
    torch.manual_seed(0)
    reference = nn.Linear(12, 5).double()
    model = partc.parallelize(copy.deepcopy(reference), "dp=2", plan="fsdp")
    x, target = of_detector(0)
    mine = slice(model.data_rank * 4, model.data_rank * 4 + 4)
    for each, rows in ((model, mine), (reference, slice(None))):
        loss = F.cross_entropy(each(x[rows]), target[rows])
        (loss + 0.1 * sum(p.pow(2).sum() for p in each.parameters())).backward()
    same_gradients(model, reference)


@pytest.mark.gloo
def test_weights_may_stand_in_the_loss(world: Processes) -> None:
    world.run(penalised, num=2)


def dropped_step() -> None:
    """A call whose results nobody uses leaves no transfer behind, for which later ones wait."""
    for _ in range(2):
        model = partc.parallelize(nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 4)), "dp=2",
                                  plan="fsdp")  # fmt: skip
        model(torch.randn(4, 12))
    model(torch.randn(4, 12)).sum().backward()


@pytest.mark.gloo
def test_a_step_may_end_in_its_middle(world: Processes) -> None:
    world.run(dropped_step, num=2)


def without_gradients_on_one() -> None:
    model = partc.parallelize(nn.Linear(12, 4), "dp=2", plan="ddp")
    model(torch.randn(4, 12)).sum().backward()
    grad = torch.set_grad_enabled(dist.get_rank() == 0)
    with grad, pytest.raises(RunError, match=r"under torch.no_grad\(\)"):
        model(torch.randn(4, 12))


@pytest.mark.gloo
def test_a_call_without_gradients_is_no_step(world: Processes) -> None:
    world.run(without_gradients_on_one, num=2)


def other_targets() -> None:
    model = partc.parallelize(nn.Linear(12, 4), "tp=2", plan="megatron")
    loss = model(torch.ones(ROWS, 12)).sum() * (1 + dist.get_rank())
    with pytest.raises(RunError, match="ranks 0 and 1 have the same results"):
        loss.backward()


@pytest.mark.gloo
def test_ranks_of_one_loss_that_compute_others_are_refused(world: Processes) -> None:
    world.run(other_targets, num=2)


def dropped(rate: float) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), nn.Dropout(rate), nn.Linear(64, 4))


@one_rank()
def test_a_second_call_leaves_the_draws_of_the_first() -> None:
    """The backward multiplies by the mask that its own forward has drawn."""
    model = partc.parallelize(dropped(0.5), {}, recompute="block")
    x = torch.ones(2, 12)
    first, _ = model(x), model(x)
    expected = torch.autograd.grad(first.sum(), model.get_parameter("2.weight"))[0]
    model.zero_grad()
    hidden = (first.detach() - model.get_parameter("2.bias")).sum()
    weight = model.get_parameter("2.weight").detach()
    assert torch.allclose((expected * weight).sum(), hidden, rtol=1e-4)


WRONG: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "step": (lambda model, x: model.step(x), "the program has none"),
    "eval_step": (lambda model, x: model.eval_step(x), "the program has none"),
    "in place": (lambda model, x: model(x).mul_(2).sum().backward(), "changed in place"),
}


@one_rank()
@pytest.mark.parametrize("what", WRONG)
def test_what_a_program_of_results_cannot_do_is_refused(what: str) -> None:
    call, match = WRONG[what]
    model = partc.parallelize(dropped(0.0), {})
    with pytest.raises(PartcError, match=match):
        call(model, torch.ones(2, 12))


class Maker(nn.Module):
    """What a critic judges: a batch norm, and no bias before it, whose gradient is noise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 12)

    def forward(self, noise: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.relu(self.norm(self.up(noise)))))


def played(maker: Any, critic: Any, piece: int, num: int) -> None:
    """Two models in turns; the maker learns through the critic."""
    steps = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (maker, critic)]
    for seed in range(3):
        drawn = torch.Generator().manual_seed(seed)
        real, noise = (
            torch.randn(ROWS, width, dtype=torch.float64, generator=drawn).chunk(num)[piece]
            for width in (12, 6)
        )
        fake = maker(noise)
        critic.zero_grad()
        judged = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        judged.backward()
        steps[1].step()
        critic.requires_grad_(seed == 1)
        maker.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        steps[0].step()
        critic.requires_grad_(True)


def plays_alike(mesh: str, plan: str) -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
    theirs = [Maker().double(), critic.double()]
    ours = [partc.parallelize(copy.deepcopy(each), mesh, plan=plan) for each in theirs]
    played(ours[0], ours[1], ours[0].data_rank, ours[0].data_world)
    played(theirs[0], theirs[1], 0, 1)
    for model, reference in zip(ours, theirs, strict=True):
        state = model.full_state_dict()
        for key, value in reference.state_dict().items():
            assert torch.allclose(state[key], value, rtol=1e-11, atol=1e-12), key


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS[1:3])
def test_a_model_learns_through_another(mesh: str, plan: str, world: Processes) -> None:
    world.run(plays_alike, mesh, plan, num=2)


def test_gradients_of_inputs_are_verified() -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    loss, given = partc.ScriptLoss(model, ["input"]), (torch.randn(ROWS, 12),)
    program = partc.compile(
        model, "dp=2,tp=2", given, loss=loss, plan="fsdp+megatron", batch="local"
    )
    partc.verify(program, model, given, loss=loss).check()
    assert any('return {"d_input": ' in text for text in program.sources.values())


class Judge(nn.Module):
    """Gives back what it is given, and classes of a rank's rows, beside a result that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.layer(x).log_softmax(-1)
        return action, scores.argmax(-1) + action, scores.gather(-1, action[:, None])


@pytest.mark.parametrize("batch", ["global", "local"])
@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS[:3])
def test_results_without_a_gradient_are_given_out_with_the_others(
    mesh: str, plan: str, batch: str
) -> None:
    """Of the whole batch they are gathered, before the step waits for the script."""
    model, given = Judge(), (torch.randn(ROWS, 12), torch.randint(5, (ROWS,)))
    loss = partc.ScriptLoss(model)
    program = partc.compile(model, mesh, given, loss=loss, plan=plan, batch=batch)
    partc.verify(program, model, given, loss=loss).check()


@one_rank()
def test_an_input_that_was_compiled_without_a_gradient_is_refused() -> None:
    model = dropped(0.0)
    loss, x = partc.ScriptLoss(model), torch.ones(2, 12)
    stage = partc.compile(model, {}, (x,), loss=loss).module()
    with pytest.raises(RunError, match="waits for a gradient"):
        stage(x.requires_grad_())


@one_rank()
def test_a_backward_runs_once_with_the_weights_of_its_call() -> None:
    model = partc.parallelize(dropped(0.0), {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss, later = model(torch.ones(2, 12)).sum(), model(torch.ones(2, 12)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RunError, match="a second time"):
        loss.backward()
    optimizer.step()
    with pytest.raises(RunError, match="changed between the call of the model and backward"):
        later.backward()


@one_rank()
def test_an_input_that_was_written_to_before_backward_is_refused() -> None:
    model, batch = partc.parallelize(dropped(0.0), {}), torch.ones(2, 12)
    loss = model(batch).sum()
    batch.copy_(torch.zeros(2, 12))  # the next one
    with pytest.raises(RunError, match="was written to between the call of the model"):
        loss.backward()
    with torch.inference_mode():
        made = torch.ones(2, 12)
    model(made).sum().backward()
    batch.zero_()
    model(batch).sum().backward()


@pytest.mark.parametrize(
    ("mesh", "options"), [("pp=2", {}), ("dp=2", {"microbatches": 2})], ids=["pp", "microbatches"]
)
def test_plans_whose_parts_take_turns_need_the_loss(mesh: str, options: dict[str, Any]) -> None:
    model = dropped(0.0)
    with pytest.raises(PartcError, match="there is no loss="):
        partc.compile(
            model, mesh, (torch.ones(4, 12),), loss=partc.ScriptLoss(model), plan="ddp", **options
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "plan", "norm"), [("dp=2", "fsdp", "local"), ("tp=2", "megatron", "global")]
)
def test_statistics_are_written_before_the_step_waits(mesh: str, plan: str, norm: Any) -> None:
    model, given = Detector(), (torch.randn(ROWS, 12),)
    loss = partc.ScriptLoss(model)
    program = partc.compile(
        model, mesh, given, loss=loss, plan=plan, batch="local", batch_norm=norm
    )
    partc.verify(program, model, given, loss=loss).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", ["local", "global"])
@pytest.mark.parametrize("plan", ["fsdp+megatron", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_programs_that_give_results_out_are_verified(name: str, plan: str, batch: Any) -> None:
    made, batch_of, _, _ = MODELS[name]
    model, x = made(), batch_of(0)[0]
    given = (x.float() if x.is_floating_point() else x,)
    loss = partc.ScriptLoss(model)
    program = partc.compile(model, "dp=2,tp=2", given, loss=loss, plan=plan, batch=batch)
    partc.verify(program, model, given, loss=loss).check()


def test_the_text_waits_for_the_script_once() -> None:
    model = Detector()
    program = partc.compile(
        model, "dp=2", (torch.ones(ROWS, 12),), loss=partc.ScriptLoss(model), plan="fsdp"
    )
    (text,) = (each for name, each in program.sources.items() if name.startswith("stage"))
    before, _, behind = text.partition("def step")[2].partition("] = yield {")
    given = behind.partition("}")[0]
    assert all(f'"{name}": ' in given for name in ("classes", "box", "best", "power"))
    assert "self.norm_running_mean.copy_(" in before
    assert "yield" not in before
    assert not [word for word in ("copy_(running", "return") if word in behind]


@pytest.mark.exhaustive
def test_statistics_of_a_frozen_trunk_are_kept_until_they_are_written() -> None:
    """The blocks of its norms have no backward, and nothing else reads what they return."""
    torch.manual_seed(0)
    trunk = [
        module
        for width in (3, 8, 8)
        for module in (nn.Conv2d(width, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    ]
    model = nn.Sequential(*trunk, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    for param in model[:-1].parameters():
        param.requires_grad_(False)
    x, loss = torch.randn(2, 3, 2, 2), partc.ScriptLoss(model)
    program = partc.compile(model, "dp=2", (x,), loss=loss, plan="ddp", batch="local")
    partc.verify(program, model, (torch.randn(4, 3, 2, 2),), loss=loss).check()
