"""The emulated network has another bandwidth as soon as it is told so, while commands run on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.netlab import network
from benchmarks.netlab.network import Link, Network
from tests.patience import patience

SCRIPT = """
import json, pathlib, sys, time
import torch
import torch.distributed as dist

folder = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
x, seconds = torch.zeros(1 << 18), []
for phase in range(2):
    dist.all_reduce(x)
    start = time.perf_counter()
    dist.all_reduce(x)
    seconds.append(time.perf_counter() - start)
    dist.barrier()
    if dist.get_rank() == 0 and phase == 0:
        (folder / "asked").touch()
        while not (folder / "done").exists():
            time.sleep(0.01)
    dist.barrier()
if dist.get_rank() == 0:
    (folder / "seconds").write_text(json.dumps(seconds))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(network.missing()), reason=f"no {network.missing()}")
def test_links_change_while_commands_run(tmp_path: Path) -> None:
    with Network(2, Link(1000.0)) as hosts:

        def meanwhile() -> None:
            if (tmp_path / "asked").exists() and not (tmp_path / "done").exists():
                hosts.change(Link(10.0))
                (tmp_path / "done").touch()

        command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
        hosts.run(command, patience(120), meanwhile)
    before, after = json.loads((tmp_path / "seconds").read_text())
    assert after > 0.8  # a megabyte at 10 Mbit/s
    assert after > 3 * before
