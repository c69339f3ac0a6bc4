"""What the system says of tensors that are held and freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patience import patience

PROGRAM = """
import torch
from partc.measure.resident import free_at_once, peak_resident_bytes, resident_bytes

free_at_once()
torch.ones(1000).sum()

def run():
    torch.ones(5_000_000)
    torch.ones(2_000_000)

before = resident_bytes()
kept = torch.ones(1_000_000)
for now in (resident_bytes(), peak_resident_bytes(run), resident_bytes()):
    print(round((now - before) / 1e6))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts this")
def test_held_and_peak() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience(),
    )
    held, peak, after = map(int, done.stdout.split())
    assert 3 <= held <= 5, "4 MB are kept"
    assert 23 <= peak <= 26, "and 20 MB more for a moment"
    assert 3 <= after <= 6, "which are given back"
