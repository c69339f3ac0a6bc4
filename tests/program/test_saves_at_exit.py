"""The last save of a script that ends without ``close`` is whole, however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from partc.program.checkpoints.run_folder import committed
from partc.program.checkpoints.saved_checkpoint import Saved
from tests.patience import patience

pytestmark = pytest.mark.gloo
SCRIPT = """
import sys, time
from torch.distributed import destroy_process_group
import torch
from torch import nn
import partc
from partc.program.checkpoints.staging import Staging

finish = Staging.finish
Staging.finish = lambda staging: (time.sleep(0.5), finish(staging))  # the script ends before

model = partc.parallelize(
    nn.Linear(4, 4), "dp=RANKS", plan="fsdp", loss=lambda model, x: model(x).square().mean()
)
checkpoints = partc.Checkpoints("run")
for step in (1, 2):
    model.step(torch.ones(2, 4))
    checkpoints.save(step, model)
"""
ENDS = {"": 0, "sys.exit(3)": 3, "raise ValueError('mine')": 1, "destroy_process_group()": 0}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("ranks", "end"), [*((1, end) for end in ENDS), (2, ""), (2, "destroy_process_group()")]
)
def test_the_last_save_is_finished(tmp_path: Path, ranks: int, end: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("RANKS", str(ranks)) + end)
    launched = [*TORCHRUN, str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launched, "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=patience(), check=False,
    )  # fmt: skip
    assert done.returncode == ENDS[end], done.stderr
    assert "was not saved" not in done.stderr
    last = Saved.read(committed(tmp_path / "run")[-1])
    assert last.step == 2
    for rank in range(ranks):
        last.prove(rank)
