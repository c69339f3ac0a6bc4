"""A script without ``if __name__ == "__main__"`` whose workers import it again says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked_scripts import run_ranks

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


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize(("first", "call"), [("group", "init_process_group"), ("", "parallelize")])
def test_lines_that_a_worker_runs_again_are_refused(tmp_path: Path, first: str, call: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (done,) = run_ranks(script, first or "none", num=1)
    assert done.text.count("made\n") == 1
    assert f"{call}: it is called where the script is imported again" in done.text
    assert done.code
