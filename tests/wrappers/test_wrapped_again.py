"""Torch's other ways to train on several ranks, around a model that partc has made: each is named,
and so is a loss that reads the weights from which that model began.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel

import partc
from partc.errors import RunError, TraceError
from partc.verification.processes import Processes
from tests.mistakes.things import one_rank

X = torch.ones(4, 8)
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{each}")
    for each in ("partc. the script keeps", "FSDP.state_dict_type", ".torch.jit")
]


def mean_square(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x).square().mean()


def before() -> Any:
    return partc.parallelize(nn.Linear(8, 4), {}, plan="ddp", loss=mean_square)


def behind() -> Any:
    model = before()
    model.step(X)
    return model


def stage() -> Any:
    return partc.compile(nn.Linear(8, 4), {}, (X,), loss=mean_square, plan="ddp").module()


def of_states(model: nn.Module) -> None:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.state_dict()


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "fully_shard": fully_shard,
    "FullyShardedDataParallel.state_dict_type": of_states,
}


@one_rank()
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("made", [before, behind, stage], ids=lambda made: str(made.__name__))
def test_wrappers_of_torch_are_refused(wrapper: str, made: Callable[[], Any]) -> None:
    model = made()
    with pytest.raises(RunError, match=f"^{wrapper}: it is given a (model|stage)") as refused:
        WRAPPERS[wrapper](model)
    assert "Leave" in str(refused.value)
    model.step(X)


def in_pieces() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer as Zero

        model = partc.parallelize(nn.Linear(8, 4), "dp=2", plan="fsdp", loss=mean_square)
        kept = Zero(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(RunError, match="ZeroRedundancyOptimizer: it is made over the"):
            model.step(X)
        del kept
        model = partc.parallelize(nn.Linear(8, 4), "dp=2", plan="fsdp", loss=mean_square)
        model.step(X)
        optimizer = Zero(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(RunError, match="ZeroRedundancyOptimizer: it is made over the"):
            optimizer.step()


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_an_optimizer_in_pieces_of_torchs_own_is_refused(world: Processes) -> None:
    world.run(in_pieces, num=2)


@one_rank()
def test_a_penalty_of_the_weights_of_before_is_refused() -> None:
    kept = nn.Linear(8, 4)
    model = partc.parallelize(kept, {}, plan="ddp")
    model(X).square().mean().backward()
    kept.weight.pow(2).sum().backward()  # of a backward of its own
    loss = model(X).square().mean() + kept.weight.pow(2).sum()
    with pytest.raises(RunError, match="weight: the loss reads this weight of the model that was"):
        loss.backward()
    (model(X).square().mean() + model.weight.pow(2).sum()).backward()


class Holder(nn.Module):
    """A model with a part that is parallelized by itself, as a LightningModule may have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(before())

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x).square().mean()


@one_rank()
def test_a_part_that_parallelize_gave_is_refused() -> None:
    with pytest.raises(TraceError, match=r"the model's net.0 is .* as it was before parallelize"):
        partc.parallelize(Holder(), {}, plan="ddp")
