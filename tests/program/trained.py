"""The example's stage with an optimizer, some steps of it, and changes of a checkpoint's list."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from partc.program.checkpoints.saved_checkpoint import digest_of
from partc.program.stage.runtime import Stage
from tests.example_program import example_batch, example_model, example_program


def begin(dp: int, tp: int, seed: int) -> tuple[Stage, torch.optim.Optimizer]:
    stage = example_program(dp, tp).module()
    stage.load_full(example_model(seed))
    return stage, torch.optim.AdamW([p for p in stage.parameters() if p.requires_grad], lr=1e-3)


def train(stage: Stage, optimizer: torch.optim.Optimizer, num_steps: int) -> float:
    loss = torch.zeros(())
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = stage.step(*example_batch())
        optimizer.step()
    return loss.item()


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change checkpoint.json as someone would who also makes its digest right."""
    fields = json.loads((path / "checkpoint.json").read_text())
    change(fields)
    fields.pop("sha256", None)
    (path / "checkpoint.json").write_text(json.dumps({**fields, "sha256": digest_of(fields)}))
