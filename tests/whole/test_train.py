"""examples/train.py on two ranks: it goes on from its checkpoint, and compiles once."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from partc.verification.processes import Processes
from tests.patience import patience

LOSS = "loss_metrics/global_avg_loss"


def train(out: str) -> None:
    from examples import train as script  # here, as it reads this rank's number

    small = {"mesh": "dp=2", "out": out, "layers": 1, "width": 16, "length": 8, "steps": 3}
    script.main(Namespace(**{**script.OPTIONS, **small, "every": 2}))


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.exhaustive
def test_a_second_start_goes_on(tmp_path: Path) -> None:
    with Processes(2, timeout=patience()) as ranks:
        ranks.run(train, str(tmp_path))
        entries = sorted((tmp_path / "cache").glob("*/key.json"))
        written = [each.parent.stat().st_ino for each in entries]
        assert len(entries) == 2  # the step, and the evaluation, of both ranks
        ranks.run(train, str(tmp_path))
    assert [each.parent.stat().st_ino for each in entries] == written
    first, second, third, again = lines(tmp_path)
    assert [each["step"] for each in (first, second, third, again)] == [1, 2, 3, 3]
    assert (again[LOSS], again["grad_norm"], again["lr"]) == (
        pytest.approx(third[LOSS], abs=1e-6),
        pytest.approx(third["grad_norm"], abs=1e-6),
        third["lr"],
    )
    assert second["validation_metrics/loss"] == pytest.approx(second[LOSS], abs=0.3)
    assert second["ntokens_seen"] == 2 * 16 * 8
