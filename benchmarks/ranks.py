"""Run a benchmark's module on several processes of this host, each with one thread."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys


def run_ranks(module: str, num: int, folder: str, options: argparse.Namespace) -> None:
    """Run ``python -m module --rank FOLDER`` with these options on ``num`` ranks, by torchrun."""
    given = [f"--{name}={value}" for name, value in vars(options).items() if name != "rank"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num}", "-m", module, "--rank", folder, *given]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
