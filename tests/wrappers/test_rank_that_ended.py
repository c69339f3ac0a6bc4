"""Each call of a prepared model and its Accelerator says by what another rank has ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience

SCRIPT = """
import sys, torch
from torch import nn
from partc.errors import TransferError
from partc.wrappers.accelerate import Accelerator

class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x):
        return {"loss": self.body(x).square().mean()}

model, x = Tower(), torch.ones(4, 8)
accelerator = Accelerator(mesh="pp=2", plan="ddp", cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
calls = {"a call of the model": lambda: model(x)}  # which compiles it
if sys.argv[1] == "trained":
    loss = model(x)["loss"]
    calls = {
        "loss.backward()": lambda: accelerator.backward(loss),
        "full_optim_state_dict": optimizer.state_dict,
        "gather": lambda: accelerator.gather(loss.detach()),
        "reduce": lambda: accelerator.reduce(loss.detach()),
        "gather_for_metrics": lambda: accelerator.gather_for_metrics("text"),
        "wait_for_everyone": accelerator.wait_for_everyone,
    }
for name, call in calls.items() if accelerator.process_index else ():
    try:
        call()
    except TransferError as error:
        print(f"rank 1, {name}: {'rank 0 has ended: its script came' in str(error)}", flush=True)
        assert str(error).startswith(f"rank 1, {name}: a transfer failed"), str(error)
"""
NAMES = ["loss.backward()", "full_optim_state_dict", "gather", "reduce", "gather_for_metrics",
         "wait_for_everyone"]  # fmt: skip


@pytest.mark.gloo
@pytest.mark.rows(1)
@pytest.mark.parametrize("when", ["trained", "new"])
def test_every_call_of_all_ranks_names_the_one_that_has_ended(tmp_path: Path, when: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "train.py", when],
        cwd=tmp_path, capture_output=True, text=True, timeout=patience(), check=False,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith("rank 1")]
    names = NAMES if when == "trained" else ["a call of the model"]
    assert said == [f"rank 1, {name}: True" for name in names], done.stderr
