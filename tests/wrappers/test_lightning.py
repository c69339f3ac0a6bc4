"""``partc.wrappers.lightning.Strategy``: a real ``Trainer.fit`` is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from partc.errors import UsageError
from partc.verification.processes import Processes

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"mesh": "dp=2", "plan": "fsdp", "batch": "local"},
    "megatron": {"mesh": "tp=2", "plan": "megatron", "batch": "global", "in_parts": True},
    "pipeline": {
        "mesh": "pp=2", "plan": "ddp", "batch": "global", "stages": ["head"], "microbatches": 2
    },
}  # fmt: skip


def fitted(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    from tests.wrappers.lightning_runs import run

    return run(folder, **options)


def resumed_alone(checkpoint: Path) -> dict[str, Any]:
    from tests.wrappers.lightning_runs import resumed

    return resumed(checkpoint)


def refusals() -> dict[str, str]:
    from tests.wrappers.lightning_runs import refused

    return refused()


@pytest.fixture(scope="module")
def plain(world: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process gives."""
    found: dict[str, Any] = world.run(fitted, tmp_path_factory.mktemp("plain"), {}, num=1)[0]
    return found


@pytest.mark.rows(1)
@pytest.mark.gloo
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fits_as_one_process(
    world: Processes, plain: dict[str, Any], tmp_path: Path, layout: str
) -> None:
    resumes = layout == "fsdp"
    ranks = world.run(fitted, tmp_path, {**LAYOUTS[layout], "resumes": resumes}, num=2)
    predicted = torch.cat([each.pop("predicted") for each in ranks])
    if LAYOUTS[layout]["batch"] == "local":  # a rank predicts its rows: 2 of each batch of 4
        order = [0, 1, 5, 6, 2, 3, 7, 8, 4, 9]
        close(predicted[order], plain["predicted"])
    else:
        close(predicted, plain["predicted"].repeat(2, 1))
    for each in ranks:
        close(each, {name: plain[name] for name in each})
    if resumes:
        checkpoint = min(tmp_path.glob("epoch=0-*.ckpt"))
        alone = world.run(resumed_alone, checkpoint, num=1)[0]
        close(alone, {name: plain[name] for name in alone})


def unfreezing(mesh: str, later: bool) -> dict[str, Any]:
    from tests.wrappers.lightning_runs import unfrozen

    return unfrozen(mesh, later)


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_a_part_that_is_frozen_at_first(world: Processes) -> None:
    """Frozen behind the compile it is that of one process; else a warning and a refusal say so."""
    alone = world.run(unfreezing, "", False, num=1)[0]
    for each in world.run(unfreezing, "dp=2", True, num=2):
        assert not each["said"]
        close(each["losses"], alone["losses"])
        close(each["weights"], alone["weights"])
    early = world.run(unfreezing, "dp=1", False, num=1)[0]
    assert any("Freeze them in on_train_start" in text for text in early["warned"])
    assert "body.0.weight.requires_grad: is True, but the program computes no" in early["said"]
    assert "on_train_start of a Lightning callback" in early["said"]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gloo
def test_what_a_program_would_not_do_is_refused(world: Processes) -> None:
    said = world.run(refusals, num=1)[0]
    assert said["ReadsStep"].startswith("TraceError: ReadsStep, trainer.global_step:")
    assert said["LogsNumber"].startswith("TraceError: training_step, self.log('rate', ...):")
    assert said["LogsItem"].startswith("TraceError: LogsItem.training_step (")
    assert "it logs the value of a tensor" in said["LogsItem"]
    assert "Log the tensor itself" in said["LogsItem"]
    assert said["KeepsLoss"].startswith("RunError: KeepsLoss.last: a step sets it")
    assert said["Manual"].startswith("UsageError: Manual, automatic_optimization = False:")
    assert said["ChangesMode"].startswith("RunError: training_step, body: its train() or eval()")
    for precision in ("64-true", "bf16-true"):
        assert said[precision].startswith(f"UsageError: Trainer(precision={precision!r}):")
    assert said["32-true"] == ""  # of a module and batches in float64


def test_a_checkpoint_behind_the_fit_is_refused_by_name() -> None:
    from partc.wrappers.lightning import Strategy

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
    with pytest.raises(UsageError, match=r"the fit is over[\s\S]*weights_only=True"):
        Strategy("dp=2", plan="fsdp").optimizer_state(optimizer)
