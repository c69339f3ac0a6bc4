"""A model that is called in several forms, as ``model(x)`` and ``model(x, action)``: each has a
program over the same weights, as one process computes it. What is a mistake stays one.
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
from partc.errors import RunError
from partc.verification.processes import Processes
from tests.mistakes.things import one_rank

ROWS = 8


class Agent(nn.Module):
    """Acts, or judges an action: ``forward(x, action=None)``; and says how in a word."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, 5), nn.Linear(16, 1)

    def forward(
        self, x: Tensor, action: Tensor | None = None, *, how: str = "sharp"
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = self.body(x)
        scores = self.actor(x) if how == "sharp" else self.actor(x) / 4
        action = scores.argmax(-1) if action is None else action
        chosen = scores.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
        return action, chosen, self.critic(x).squeeze(-1)


def batch(seed: int, piece: int, num: int) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 6, dtype=torch.float64, generator=drawn).chunk(num)[piece]


def plays(model: Any, piece: int, num: int) -> None:
    """Acts without gradients, then learns from it in another form; then both forms learn."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(4):
        x = batch(seed, piece, num)
        with torch.no_grad():
            action, _, _ = model(x)
        action = (action + 1) % 5
        _, chosen, value = model(x, action) if seed % 2 else model(x, action=action)
        loss = -chosen.mean() + value.pow(2).mean()
        if seed > 1:
            loss = loss - model(x)[1].mean() + model(x, action, how="flat")[1].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def plays_alike(mesh: str, plan: str) -> None:
    torch.manual_seed(0)
    reference = Agent().double()
    model = partc.parallelize(copy.deepcopy(reference), mesh, plan=plan)
    plays(model, model.data_rank, model.data_world)
    plays(reference, 0, 1)
    state = model.full_state_dict()
    for key, value in reference.state_dict().items():
        assert torch.allclose(state[key], value, rtol=1e-11, atol=1e-12), key
    x = batch(9, model.data_rank, model.data_world)
    model.eval()
    for form in ((x,), (x, torch.ones(len(x), dtype=torch.int64))):
        for ours, theirs in zip(model(*form), reference(*form), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.gloo
@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("mesh", "plan"), [("dp=2", "fsdp"), ("tp=2", "megatron"), ("dp=2", "ddp")]
)
def test_an_agent_acts_and_learns(mesh: str, plan: str, world: Processes) -> None:
    world.run(plays_alike, mesh, plan, num=2)


def loss_of(model: nn.Module, x: Tensor, target: Tensor | None = None) -> Tensor:
    _, chosen, value = model(x)
    wanted = chosen.detach() if target is None else target
    found: Tensor = F.mse_loss(value, wanted) - chosen.mean()
    return found


@one_rank()
def test_a_loss_is_called_with_and_without_an_argument() -> None:
    torch.manual_seed(0)
    reference = Agent()
    model = partc.parallelize(copy.deepcopy(reference), {}, loss=loss_of)
    x, target = torch.randn(ROWS, 6), torch.randn(ROWS)
    for form in ((x,), (x, target), (x, None)):
        assert torch.allclose(model.step(*form), loss_of(reference, *form), atol=1e-6)
        loss_of(reference, *form).backward()
    pairs: Any = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6), name


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, by: Any = 2.0) -> Tensor:
        found: Tensor = self.layer(x) * by
        return found


@pytest.mark.exhaustive
@one_rank()
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((torch.ones(4, 6), 3.0), "it was the number 2.0 when compiled, and is the number 3.0 now"),
        ((torch.ones(4, 6), torch.ones(())), "and is a tensor now"),
        (([1.0] * 6,), "it was a tensor when compiled, and is a list now"),
        ((torch.ones(4, 6), 2.0, None), "too many"),
        ((), "missing"),
    ],
)
def test_other_numbers_and_mistakes_are_refused(args: tuple[Any, ...], said: str) -> None:
    model = partc.parallelize(Scaled(), {})
    model(torch.ones(4, 6))
    with pytest.raises(RunError, match=said):
        model(*args)


@one_rank()
def test_more_forms_than_a_stage_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partc.wrappers.forms.MOST_PROGRAMS", 1)
    model = partc.parallelize(Agent(), {})
    model(torch.ones(4, 6))
    with pytest.raises(RunError, match="called with 1 forms of arguments"):
        model(torch.ones(4, 6), how="flat")


# other ranks -------------------------------------------------------------------------------------
def differs(calls: Callable[[Any, int], Any], said: str) -> None:
    torch.manual_seed(0)
    model = partc.parallelize(Agent(), "dp=2", plan="ddp")
    x = torch.ones(4, 6)
    for how in ("sharp", "flat"):
        model(x, how=how)[1].sum().backward()
    with pytest.raises(RunError, match=said):
        calls(model, dist.get_rank())


def other_words(model: Any, rank: int) -> Any:
    return model(torch.ones(4, 6), how=("sharp", "flat")[rank])


def a_new_form(model: Any, rank: int) -> Any:
    x = torch.ones(4, 6)
    return model(x) if rank else model(x, torch.zeros(4, dtype=torch.int64))


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("calls", "said"),
    [(other_words, "by loss 2 of the stage"), (a_new_form, "the first call with these arguments")],
)
def test_ranks_that_call_in_other_forms_are_refused(
    calls: Callable[[Any, int], Any], said: str, world: Processes
) -> None:
    """Shapes may be the same, and what ranks compute is not."""
    world.run(differs, calls, said, num=2)


def first_loss(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)[2].mean()
    return found


def other_loss(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)[2].pow(2).mean()
    return found


def other_losses() -> None:
    model = partc.parallelize(Agent(), "dp=2", plan="ddp", loss=first_loss)
    other, x = model.also(other_loss), torch.ones(4, 6)
    for each in (model, other):
        each.step(x)
    with pytest.raises(RunError, match="by loss 2 of the stage"):
        (model, other)[dist.get_rank()].step(x)


@pytest.mark.gloo
def test_ranks_that_step_by_other_losses_are_refused(world: Processes) -> None:
    world.run(other_losses, num=2)
