"""What scripts write of a model that parallelize gave, and what they are told to write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

import partc
from partc.errors import LoadError, RunError, TraceError, UsageError
from tests.mistakes.things import one_rank

X, Y = torch.ones(4, 8), torch.ones(4, 4)


def made_of(model: nn.Module) -> Any:
    return partc.parallelize(model, {}, plan="ddp")


class LossFirst(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        result = super().forward(x)
        return mse_loss(result, y), result


@one_rank()
def test_a_loss_first_is_not_unpacked() -> None:
    model = made_of(LossFirst(8, 4))
    with pytest.raises(RunError, match=r"Write loss = model\(\.\.\.\)\[0\]"):
        _loss, _result = model(X, Y)
    found = model(X, Y)
    assert list(found) == ["loss"]
    assert {**found}["loss"] is found[0]
    found.loss.backward()


class MakesOne(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "extra"):
            self.extra = nn.Parameter(torch.ones(4))
        return super().forward(x) * self.extra


@pytest.mark.exhaustive
@one_rank()
def test_a_parameter_that_forward_makes_is_refused_until_it_is_there() -> None:
    with pytest.raises(TraceError, match=r"extra.*the step makes this parameter.*in __init__"):
        made_of(MakesOne(8, 4))(X)
    once = MakesOne(8, 4)
    once(X)
    model = made_of(once)
    model(X).sum().backward()
    assert model.extra.grad is not None


class Yields(nn.Linear):
    def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        yield super().forward(x)


@one_rank()
def test_what_a_call_cannot_take_or_give_is_told() -> None:
    with pytest.raises(TraceError, match=r"a generator.*Return a list or a tuple"):
        made_of(Yields(8, 4))(X)
    with pytest.raises(TraceError, match=r"Pass torch\.from_numpy\(input\)\.$"):
        made_of(nn.Linear(8, 4))(X.numpy())


def test_names_of_a_wrapper_are_told_before_the_first_step_too() -> None:
    state = {f"module.{name}": x for name, x in nn.Linear(8, 4).state_dict().items()}
    model = made_of(nn.Linear(8, 4))
    with pytest.raises(LoadError, match=r"name\.removeprefix\('module\.'\)"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


@pytest.mark.parametrize("replicas", [1, 2])
def test_rows_are_dealt_out_once(replicas: int) -> None:
    from partc.wrappers.dealing import DataRanks, dealt

    sampler: Any = DistributedSampler(range(16), replicas, 0, shuffle=False)  # type: ignore[arg-type]
    loader: DataLoader[Any] = DataLoader(range(16), 4, sampler=sampler)  # type: ignore[arg-type]
    ranks = DataRanks.of("dp=2")
    if replicas == 1:
        assert len(dealt(loader, ranks, 1, split=False)) == 2
        return
    with pytest.raises(UsageError, match=r"deals out the rows to 2 already.*Sampler out"):
        dealt(loader, ranks, 1, split=False)
