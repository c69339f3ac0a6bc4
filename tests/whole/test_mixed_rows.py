"""Results of rows that meet in the model: each rank gets its own rows of them, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import PlanError

ROWS = (("dp", 0, 1),)


class Mixes(nn.Module):
    def __init__(self, mixed: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.head, self.mixed = nn.Linear(4, 6), nn.Linear(6, 4), mixed

    def forward(self, x: Tensor) -> Any:
        return self.mixed(self.first(x))


class Recurrent(nn.Module):
    """The second layer runs over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.GRU(4, 6, batch_first=True), nn.GRU(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.one(x)[0])[0]
        return y


def scanned(x: Tensor) -> Tensor:
    return x.cumsum(0).cumsum(1)


def attended(x: Tensor) -> Tensor:
    return (x @ x.t()).softmax(-1) @ x.tanh()


def correlated(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.cumsum(0)
    return y.t() @ y.cumsum(0), y.cumsum(1)


def kinds(shape: tuple[int, ...], model: nn.Module) -> Any:
    """What is compiled of a model: a step whose loss the script computes, one of loss and extras,
    and a forward.
    """
    x = torch.randn(shape, dtype=torch.float64)

    def loss_of(model: nn.Module, x: Tensor) -> Any:
        y = model(x)
        return (y**2).mean(), {"result": y}

    return x, [partc.ScriptLoss(model), loss_of, None]


@pytest.mark.rows(2)
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Recurrent, (2, 3, 4)),
        (lambda: Mixes(scanned), (2, 3, 4)),
        (lambda: Mixes(attended), (3, 4)),
    ],
)
def test_a_rank_gets_its_own_rows_of_what_is_computed_of_all(
    model: Callable[[], nn.Module], shape: tuple[int, ...], plan: str
) -> None:
    torch.manual_seed(0)
    net = model().double()
    x, losses = kinds(shape, net)
    for loss in losses:
        with torch.set_grad_enabled(loss is not None):
            program = partc.compile(net, "dp=2", (x,), loss=loss, plan=plan, batch="local")
            assert program.results == {"result": ROWS}
            partc.verify(program, net, (x,), loss=loss).check()


@pytest.mark.exhaustive
def test_over_several_data_axes_and_beside_tensor_parallelism() -> None:
    torch.manual_seed(0)
    net = Mixes(scanned).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    for mesh, plan in (("dp_replicate=2,dp_shard=2", "hsdp"), ("dp=2,tp=2", "fsdp+megatron")):
        loss = partc.ScriptLoss(net)
        program = partc.compile(net, mesh, (x,), loss=loss, plan=plan, batch="local")
        assert program.results == {"result": program.dealt["x"]}
        partc.verify(program, net, (x,), loss=loss).check()


def test_a_result_without_rows_is_whole_on_every_rank() -> None:
    torch.manual_seed(0)
    net = Mixes(correlated).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    loss = partc.ScriptLoss(net)
    program = partc.compile(net, "dp=2", (x,), loss=loss, plan="ddp", batch="local")
    [(name, cuts)] = program.results.items()
    assert (name, cuts) == ("1", ROWS)
    partc.verify(program, net, (x,), loss=loss).check()


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("mixed", "why"),
    [
        (lambda x: x @ x.t(), "dim 0 and dim 1 both follow from them"),
        (lambda x: x.cumsum(0).reshape(-1), "dim 0 is no dim of whole rows"),
        (lambda x: x.chunk(2)[0], "dim 0 is no dim of whole rows"),
    ],
)
def test_unknown_rows_are_refused(mixed: Callable[[Tensor], Tensor], why: str) -> None:
    net, x = Mixes(mixed), torch.randn(4, 4)
    for loss in (partc.ScriptLoss(net), None):
        with torch.set_grad_enabled(loss is not None), pytest.raises(PlanError) as refused:
            partc.compile(net, "dp=2", (x,), loss=loss, plan="ddp", batch="local")
        said = str(refused.value)
        assert why in said
        assert "test_mixed_rows.py" in said
        assert 'batch="global"' in said


def test_a_step_of_a_number_of_rows_is_refused() -> None:
    net = Mixes(lambda x: x.reshape(2, 4, 6).cumsum(1).cumsum(0).reshape(8, 6))
    with pytest.raises(PlanError, match="does not run on one rank's rows alone"):
        partc.compile(
            net, "dp=2", (torch.randn(4, 4),), loss=partc.ScriptLoss(net), plan="ddp",
            batch="local",
        )  # fmt: skip
