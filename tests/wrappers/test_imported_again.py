"""A script without ``if __name__ == "__main__"`` whose workers import it again says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience

SCRIPT = """
import sys, torch
import torch.distributed as dist
from torch.utils.data import DataLoader
import partc

if sys.argv[1] == "group":
    dist.init_process_group("gloo")
model = partc.parallelize(torch.nn.Linear(8, 4), {}, plan="ddp")
print("made", flush=True)
for x in DataLoader(torch.ones(8, 8), 4, num_workers=1, multiprocessing_context="spawn"):
    model(x).square().mean().backward()
"""


@pytest.mark.gloo
@pytest.mark.parametrize(("first", "call"), [("group", "init_process_group"), ("", "parallelize")])
def test_lines_that_a_worker_runs_again_are_refused(tmp_path: Path, first: str, call: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "1", "train.py", first or "none"],
        cwd=tmp_path, capture_output=True, text=True, timeout=patience(), check=False,
    )  # fmt: skip
    assert done.stdout.count("made") == 1
    assert f"{call}: it is called where the script is imported again" in done.stderr
    assert done.returncode
