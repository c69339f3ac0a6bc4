"""Numbers among the results of ranks that are given samples of their own, as ``len(x)``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PlanError, RunError
from partc.program import Program, load
from partc.verification.processes import Processes

ROWS, CLASSES = 4, 3


class Net(nn.Module):
    """Gives logits, and what its forward makes of the number of rows and of other things."""

    def __init__(self, numbers: Callable[[Tensor], Any] = len) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(6, CLASSES), numbers

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.layer(x), "numbers": self.numbers(x), "classes": CLASSES}


def loss_of(model: Net, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
    found = model(x)
    return F.cross_entropy(found["logits"], y), found


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6), torch.randint(CLASSES, (rows,))


def compiled(model: nn.Module, loss: Any = loss_of, **options: Any) -> Program:
    given = batch()[:1] if isinstance(loss, partc.ScriptLoss) else batch()
    options = {"mesh": "dp=2", "plan": "ddp", "batch": "local", **options}
    return partc.compile(model, inputs=given, loss=loss, **options)


def returned(program: Program) -> Any:
    """What a step gives back beside the loss, with no tensors in it."""
    assert program.returns is not None
    names = program.returns.names()
    return program.returns.built(dict.fromkeys(names, torch.zeros(())))[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"plan": "fsdp", "microbatches": 2},
        {"mesh": "pp=2,dp=2", "microbatches": 2},
        {"plan": "auto"},
    ],
)
def test_a_number_of_rows_is_this_ranks_beside_its_own_rows(options: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Net(lambda x: (len(x), x.shape[0] / 2, f"{len(x)} x")))
    found = returned(compiled(model, **options))
    assert found["numbers"] == (ROWS, ROWS / 2, f"{ROWS} x")
    assert found["classes"] == CLASSES


def test_so_it_is_where_the_script_computes_the_loss_and_in_a_saved_program(tmp_path: Path) -> None:
    model = Net()
    program = compiled(model, partc.ScriptLoss(model))
    program.save(tmp_path / "saved")
    for each in (program, load(tmp_path / "saved")):
        assert returned(each)["numbers"] == ROWS


def test_of_the_global_batch_it_is_the_global_one() -> None:
    assert returned(compiled(Net(), batch="global"))["numbers"] == ROWS


def of_sums(model: Net, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
    logits = model(x)["logits"]
    return F.cross_entropy(logits, y), {"right": (logits.argmax(-1) == y).sum(), "rows": len(y)}


def of_both(model: Net, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
    loss, found = of_sums(model, x, y)
    return loss, {**found, "logits": model(x)["logits"]}


def test_beside_sums_over_all_ranks_it_is_of_all_ranks() -> None:
    assert returned(compiled(Net(), of_sums))["rows"] == 2 * ROWS


def test_beside_both_it_is_refused() -> None:
    with pytest.raises(PlanError, match=r"rows: it is the number 4 (.|\n)*the number 8 for"):
        compiled(Net(), of_both)


def test_a_list_with_a_result_for_each_row_is_refused() -> None:
    def listed(model: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        loss, found = loss_of(model, x, y)
        return loss, [*found["logits"]]

    with pytest.raises(PlanError, match=r"other entries(.|\n)*\[\*logits\](.|\n)*one tensor"):
        compiled(Net(), listed)
    assert len(returned(compiled(Net(), listed, batch="global"))) == ROWS


class OfFourOrEight(Net):
    """Runs on all ranks' samples alone."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return super().forward(x.view(2 * ROWS, 6))


def test_a_step_that_does_not_run_on_one_ranks_samples_cannot_tell() -> None:
    with pytest.raises(PlanError, match=r"the number 8 follows(.|\n)*does not run(.|\n)*alone"):
        compiled(OfFourOrEight())


def stepped() -> None:
    torch.manual_seed(dist.get_rank())
    stage = compiled(Net()).module(partial="replicate")
    for rows in (ROWS, 2):
        x, y = batch(rows)
        assert stage.train().step(x, y)[1]["numbers"] == rows
        assert stage.eval_step(x, y)[1]["numbers"] == rows
        assert stage.eval()(x)["numbers"] == rows
    x, y = batch(2 + dist.get_rank())
    with pytest.raises(RunError, match="different numbers of rows"):
        stage.train().step(x, y)
    with pytest.raises(RunError, match="different numbers of rows"):
        stage.eval()(x)


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_other_shapes_and_modes_have_their_own_and_uneven_ones_are_refused(
    world: Processes,
) -> None:
    world.run(stepped, num=2)
