"""The last save of a script that ends without ``close`` is whole, however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from partc.program.checkpoints.run_folder import committed
from partc.program.checkpoints.saved_checkpoint import Saved
from tests.forked_scripts import run_ranks
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


def alone(script: Path) -> tuple[int, str]:
    """The exit code and the output of a script in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, script.name], cwd=script.parent, text=True, timeout=patience(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "end"), [*((1, end) for end in ENDS), (2, ""), (2, "destroy_process_group()")]
)
def test_the_last_save_is_finished(tmp_path: Path, ranks: int, end: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("RANKS", str(ranks)) + end)
    for code, told in [alone(script)] if ranks == 1 else run_ranks(script, num=ranks):
        assert code == ENDS[end], told
        assert "was not saved" not in told
    last = Saved.read(committed(tmp_path / "run")[-1])
    assert last.step == 2
    for rank in range(ranks):
        last.prove(rank)
