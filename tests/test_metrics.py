"""A meter tells loggers torchtitan's names, and JSON lines keep them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from partc import metrics
from partc.metrics import JsonLines, Meter


class Noted:
    """A logger as of a tracking service."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.steps[step] = dict(numbers)


def test_a_meter_times_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.0, 101.0, 102.0, 102.0, 103.0, 104.0])  # s
    monkeypatch.setattr(metrics, "perf_counter", lambda: next(clock))
    noted, lines = Noted(), JsonLines(tmp_path / "logs" / "rank0.jsonl")
    meter = Meter([noted, lines], tokens=80, devices=2, start=5)
    batches = meter.waiting(["a", "b"])
    assert next(batches) == "a"  # waited from 100 to 101
    meter.log(6, {"loss_metrics/global_avg_loss": torch.tensor(2.5)})  # at 102
    assert next(batches) == "b"  # waited from 102 to 103
    told = meter.log(8, {"lr": 0.5})  # two steps later, at 104
    assert noted.steps[6] == {
        "loss_metrics/global_avg_loss": 2.5, "ntokens_seen": 480.0, "throughput(tps)": 20.0,
        "time_metrics/end_to_end(s)": 2.0, "time_metrics/data_loading(s)": 1.0,
        "time_metrics/data_loading(%)": 50.0,
    }  # fmt: skip
    assert (told["time_metrics/end_to_end(s)"], told["throughput(tps)"]) == (1.0, 40.0)
    written = [json.loads(line) for line in lines.path.read_text().splitlines()]
    assert written == [{"step": step, **each} for step, each in noted.steps.items()]


def test_a_file_goes_on(tmp_path: Path) -> None:
    for step in (1, 2, 2):
        JsonLines(tmp_path / "metrics.jsonl").log({"lr": 0.1 * step}, step)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
